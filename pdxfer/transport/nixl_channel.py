"""The sending end of nixl: an agent of its own for each peer, so that closing one channel stops exactly its writes.

One sender thread writes and polls; notes that come back are read by the endpoint's thread (`look`).
"""

import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.errors import ChannelError, ProtocolError
from pdxfer.kv.layout import KvLayout
from pdxfer.transport import nixl_notes
from pdxfer.transport.admission import describe
from pdxfer.transport.base import Control, EndpointOptions, OutgoingUnit, PeerId, Sink, UnitHeader, UnitResult
from pdxfer.transport.nixl_agent import Agent, indices
from pdxfer.transport.nixl_notes import Hello, Keys, NoteType, Welcome, seal, unseal
from pdxfer.transport.pauses import LONGEST_S, pause_after, sleep_precisely

HELLO_AGAIN_S = 0.25
STAY_WRITING_S = 0.02
_encode = msgspec.msgpack.Encoder().encode
_welcome_decoder = msgspec.msgpack.Decoder(Welcome)
_control_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)


class NixlChannel:
    """See Channel."""

    kind = "nixl"

    def __init__(
        self,
        options: EndpointOptions,
        me: PeerId,
        peer: PeerId,
        layouts: tuple[KvLayout, KvLayout],
        metadata: bytes,
        sink: Sink,
        on_close: Callable[["NixlChannel"], None],
    ) -> None:
        """`layouts` are ours and the peer's; `metadata` is of the peer's agent. Raises ChannelError."""
        self.peer = peer
        self.generation = 0
        self._options, self._me, self._sink, self._on_close = options, me, sink, on_close
        self._mine, self._theirs = layouts
        self._keys: Keys | None = None
        self._secret = b""
        self._nonce = secrets.token_bytes(nixl_notes.NONCE_BYTES)
        self._dead = ""
        self._posted: list[tuple[Any, UnitHeader]] = []
        self._done: list[UnitResult] = []
        self._moved_at = 0.0
        self._num_probed = 0
        self._num_sent_bytes = 0
        self._changed = threading.Condition()
        self._posting = threading.Lock()
        """Held while a write is posted, and while `close` says goodbye: after that none may be."""
        self._rest = threading.Event()
        """Never set: waiting for it is a short sleep."""
        self._agent = Agent(f"{me.engine_id}-w{me.rank}-out", self._mine, receives=False)
        try:
            self._target = self._agent.add_peer(metadata)
            self._agent.prepare(self._target, self._theirs)
        except ChannelError:
            self._agent.destroy()
            raise

    def __repr__(self) -> str:
        state = self._dead or "open"
        sent = self._num_sent_bytes / (1 << 20)
        return f"<NixlChannel to={self.peer.engine_id} {state} inflight={len(self._posted)} sent={sent:.1f}MiB>"

    @property
    def dead(self) -> str:
        """See Channel."""
        return self._dead

    @property
    def entering(self) -> bool:
        """The welcome is due: the endpoint looks often."""
        return not self._dead and self._keys is None

    @property
    def writing(self) -> bool:
        """Something is posted, or was just now: an Abort may come."""
        if self._dead:
            return False
        return bool(self._posted) or SYSTEM_CLOCK.now() - self._moved_at < STAY_WRITING_S

    # ---- called by the sender thread -------------------------------------------------------------------------------

    def enter(self, secret: bytes, timeout_s: float) -> None:
        """Say hello until the peer answers. Raises ChannelError."""
        self._secret = secret
        hello = Hello(sender=self._me, receiver=self.peer, nonce=self._nonce, metadata=self._agent.metadata)
        note = seal(secret, NoteType.HELLO, _encode(hello))
        deadline = SYSTEM_CLOCK.now() + timeout_s
        while self._keys is None:
            left = deadline - SYSTEM_CLOCK.now()
            if left <= 0:
                raise ChannelError(
                    f"no answer in {timeout_s:g} s: unreachable from here, or this node was not introduced to it"
                )
            self._agent.send(self._target, note)
            with self._changed:
                self._changed.wait_for(lambda: self._keys is not None or self._dead, min(left, HELLO_AGAIN_S))
            self._check()

    def write(self, unit: OutgoingUnit) -> None:
        """Posts the unit, and drives those before it: their notes leave when they are seen to be done.

        Raises ValueError for blocks outside either pool.
        """
        self._collect()
        assert self._keys is not None
        header = unit.header
        source = indices(self._mine, unit.source_blocks, header.first_layer, header.num_layers)
        target = indices(self._theirs, unit.target_blocks, header.first_layer, header.num_layers)
        note = seal(self._keys.to_receiver, NoteType.UNIT, _encode(header))
        with self._posting:
            self._check()
            if not self._posted:
                self._moved_at = SYSTEM_CLOCK.now()
                sleep_precisely()
            try:
                self._posted.append((self._agent.write(self._target, source, target, note), header))
            except ChannelError as error:
                raise self._die(str(error)) from error
        self._num_sent_bytes += header.num_bytes

    def poll(self, timeout_s: float) -> Sequence[UnitResult]:
        """See Channel."""
        deadline = SYSTEM_CLOCK.now() + timeout_s
        while not self._collect():
            left = deadline - SYSTEM_CLOCK.now()
            if left <= 0:
                break
            self._sleep(left)
        done, self._done = self._done, []
        return done

    def tell(self, control: Control) -> None:
        """Waits for the writes before it: NIXL does not order notifications after writes that are not done."""
        while self._posted:
            self._collect()
            self._sleep(LONGEST_S)
        self._send(NoteType.CONTROL, _encode(control))
        self._moved_at = SYSTEM_CLOCK.now()

    def probe(self, timeout_s: float) -> None:
        """See Channel."""
        with self._changed:
            target = self._num_probed + 1
        self._send(NoteType.PROBE)
        with self._changed:
            answered = self._changed.wait_for(lambda: self._num_probed >= target or self._dead, timeout_s)
        self._check()
        if not answered:
            raise ChannelError(f"probe of {describe(self.peer)} over nixl not answered in {timeout_s:g} s")

    def close(self) -> None:
        """Destroys the agent: nothing that is still posted leaves any more. A peer that owes nothing is told."""
        with self._posting:
            if not self._dead and self._keys is not None and not self._posted:
                try:
                    self._send(NoteType.BYE)
                except ChannelError:
                    pass  # it has gone already
            self._die("closed here")
        self._agent.destroy()
        self._on_close(self)

    # ---- called by the endpoint's thread ---------------------------------------------------------------------------

    def look(self) -> bool:
        """Handle what has come from the peer; whether anything has."""
        if self._dead:
            return False
        try:
            notes = list(self._agent.notes())
            for name, note in notes:
                self._handle(name, note)
        except (ChannelError, ProtocolError, msgspec.MsgspecError) as error:
            self._die(str(error))
            return False
        return bool(notes)

    def ping(self) -> None:
        """Find out whether the peer is gone."""
        if self._keys is not None and not self._dead and not self._posted:
            try:
                self._send(NoteType.PING)
            except ChannelError:
                pass  # dead now, and says why

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _handle(self, name: str, note: bytes) -> None:
        kind = nixl_notes.kind_of(note)
        if name != self._target:
            return  # somebody else has our metadata; the seal would not fit either
        if kind is NoteType.WELCOME:
            welcome = _welcome_decoder.decode(unseal(self._secret, note))
            if welcome.echo != self._nonce:
                raise ProtocolError("welcome to another hello")
            with self._changed:
                self.generation = welcome.generation
                self._keys = self._keys or Keys(self._secret, self._nonce, welcome.nonce)
                self._changed.notify_all()
            return
        if self._keys is None:
            raise ProtocolError(f"{kind.name} note before the welcome")
        body = unseal(self._keys.to_sender, note)
        match kind:
            case NoteType.CONTROL:
                self._sink.control(self.peer, _control_decoder.decode(body))
            case NoteType.PROBED:
                with self._changed:
                    self._num_probed += 1
                    self._changed.notify_all()
            case NoteType.PING:
                pass
            case _:
                raise ProtocolError(f"{kind.name} note from a receiver")

    def _collect(self) -> bool:
        """Move what is done from posted to done; whether there is something to report. Raises ChannelError."""
        self._check()
        done: list[UnitHeader] = []
        try:
            while self._posted and self._agent.done(self._posted[0][0]):
                done.append(self._posted.pop(0)[1])
        except ChannelError as error:
            raise self._die(str(error)) from error
        now = SYSTEM_CLOCK.now()
        if done:
            self._moved_at = now
            self._done.extend(UnitResult(header=header) for header in done)
        elif self._posted and now - self._moved_at > self._options.write_timeout_s:
            raise self._die(f"{len(self._posted)} writes made no progress for {self._options.write_timeout_s:g} s")
        return bool(self._done)

    def _sleep(self, longest_s: float) -> None:
        """Between two looks at posted writes, which also drive them. Spinning would take the receiver's core."""
        if self._posted:
            longest_s = min(longest_s, pause_after(SYSTEM_CLOCK.now() - self._moved_at))
        self._rest.wait(longest_s)

    def _send(self, kind: NoteType, body: bytes = b"") -> None:
        self._check()
        assert self._keys is not None
        try:
            self._agent.send(self._target, seal(self._keys.to_receiver, kind, body))
        except ChannelError as error:
            raise self._die(str(error)) from error

    def _die(self, reason: str) -> ChannelError:
        with self._changed:
            self._dead = self._dead or f"nixl channel to {describe(self.peer)}: {reason}"
            self._changed.notify_all()
            return ChannelError(self._dead)

    def _check(self) -> None:
        if self._dead:
            raise ChannelError(self._dead)
