"""Who may use an endpoint's channels, and the proof that a stranger is one of them.

The router tells every node its peers and a secret (wire/messages.py, Peers). Both ends of a new connection show by
HMAC over both nonces that they know it. Introductions reach the two ends at different moments, so a newcomer is
waited for, within the handshake's deadline.
"""

import hmac
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from pdxfer.core.errors import ChannelError, ProtocolError
from pdxfer.transport.base import PeerId
from pdxfer.transport.frames import FrameSocket, FrameType

NONCE_BYTES = 16
MAX_HELLO_BYTES = 1024
_encode = msgspec.msgpack.Encoder().encode


class Admission:
    """The admitted peers and the secret; `refused` counts who was turned away, by cause."""

    def __init__(self) -> None:
        self._peers: frozenset[PeerId] = frozenset()
        self._secret = b""
        self._open = True
        self._changed = threading.Condition()
        self.refused: Counter[str] = Counter()

    def set(self, peers: Sequence[PeerId], secret: bytes) -> None:
        """Replace who is admitted."""
        with self._changed:
            self._peers, self._secret = frozenset(peers), secret
            self._changed.notify_all()

    def close(self) -> None:
        """Admit nobody any more and end all waits."""
        with self._changed:
            self._open, self._peers = False, frozenset()
            self._changed.notify_all()

    def admits(self, peer: PeerId) -> bool:
        """Whether this peer may talk to us now."""
        with self._changed:
            return self._open and bool(self._secret) and peer in self._peers

    def secret_for(self, peer: PeerId, timeout_s: float) -> bytes:
        """The secret shared with `peer`, waiting for its introduction. Raises ChannelError when there is none."""
        with self._changed:
            known: Callable[[], bool] = lambda: not self._open or (bool(self._secret) and peer in self._peers)  # noqa: E731
            if not self._changed.wait_for(known, timeout_s) or not self._open:
                raise ChannelError(
                    f"{describe(peer)} was not introduced to this node by the router within {timeout_s:g} s; "
                    "is it of another incarnation, or another cluster?"
                )
            return self._secret


class Hello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First frame of each side."""

    kind: str
    """Of channel; both must mean the same."""
    sender: PeerId
    receiver: PeerId
    """Whom the sender believes to talk to."""
    nonce: bytes


_hello_decoder = msgspec.msgpack.Decoder(Hello)


def describe(peer: PeerId) -> str:
    """A peer in messages and logs."""
    return f"{peer.engine_id}/w{peer.rank} ({peer.incarnation})"


def proof(secret: bytes, role: bytes, client: Hello, server: Hello) -> bytes:
    """What a side sends to show that it knows the secret; `role` keeps one side's proof from serving as the other's."""
    return hmac.digest(secret, b"pdxfer-channel-1\0" + role + b"\0" + _encode([client, server]), "sha256")


def enter(frames: FrameSocket, kind: str, me: PeerId, peer: PeerId, secret: bytes) -> None:
    """The connecting side's handshake. Raises ChannelError (refused, with the reason) or ProtocolError."""
    mine = Hello(kind=kind, sender=me, receiver=peer, nonce=secrets.token_bytes(NONCE_BYTES))
    frames.send_preamble()
    frames.send(FrameType.HELLO, _encode(mine))
    frames.receive_preamble()
    theirs = _decode_hello(_expect(frames, FrameType.HELLO))
    if (theirs.kind, theirs.sender, theirs.receiver) != (kind, peer, me):
        raise ProtocolError(f"expected {kind} of {describe(peer)}, found {theirs.kind} of {describe(theirs.sender)}")
    frames.send(FrameType.PROOF, proof(secret, b"client", mine, theirs))
    if not hmac.compare_digest(_expect(frames, FrameType.PROOF), proof(secret, b"server", mine, theirs)):
        raise ProtocolError(f"{describe(peer)} does not know the router's secret")
    frames.handshaken()


def receive(frames: FrameSocket, kind: str, me: PeerId, admission: Admission, timeout_s: float) -> PeerId:
    """The listening side's handshake: who has connected. Counts and answers refusals, then raises."""
    frames.send_preamble()
    try:
        frames.receive_preamble()
        client = _decode_hello(_expect(frames, FrameType.HELLO))
        if (client.kind, client.receiver) != (kind, me):
            raise ProtocolError(f"this is {kind} of {describe(me)}, not {client.kind} of {describe(client.receiver)}")
    except (ProtocolError, ChannelError) as error:
        _refuse(frames, admission, "protocol", error)
        raise
    try:
        secret = admission.secret_for(client.sender, timeout_s)
    except ChannelError as error:
        _refuse(frames, admission, "unknown peer", error)
        raise
    server = Hello(kind=kind, sender=me, receiver=client.sender, nonce=secrets.token_bytes(NONCE_BYTES))
    frames.send(FrameType.HELLO, _encode(server))
    if not hmac.compare_digest(_expect(frames, FrameType.PROOF), proof(secret, b"client", client, server)):
        wrong = ChannelError(f"{describe(client.sender)} gave a wrong proof: another router's secret?")
        _refuse(frames, admission, "wrong proof", wrong)
        raise wrong
    frames.send(FrameType.PROOF, proof(secret, b"server", client, server))
    frames.handshaken()
    return client.sender


def _expect(frames: FrameSocket, kind: FrameType) -> bytes:
    head = frames.receive_head()
    meta = frames.receive_meta(head, MAX_HELLO_BYTES)
    if head.type is FrameType.REFUSED:
        raise ChannelError(f"refused: {meta.decode(errors='replace')}")
    if head.type is not kind:
        raise ProtocolError(f"{head.type.name} frame where {kind.name} belongs")
    return meta


def _decode_hello(data: bytes) -> Hello:
    try:
        hello = _hello_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"malformed hello: {error}") from error
    if len(hello.nonce) != NONCE_BYTES:
        raise ProtocolError(f"nonce of {len(hello.nonce)} bytes; it must be {NONCE_BYTES}")
    return hello


def _refuse(frames: FrameSocket, admission: Admission, cause: str, error: Exception) -> None:
    admission.refused[cause] += 1
    try:
        frames.send(FrameType.REFUSED, str(error).encode()[:MAX_HELLO_BYTES])
    except ChannelError:
        pass  # it has gone already
