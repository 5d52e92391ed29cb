"""UCX's two-sided messages through ucxx: for hosts whose UCX has a faster way than sockets, but without NIXL.

Handshake, headers, controls and answers go over a TCP connection exactly as with tcp; only the units' bytes go over
UCX. ucxx has no one-sided write, and a message a block is slow, so both ends copy: the sender packs the unit into
staging, the receiver scatters it into the claimed blocks. That is two copies more than tcp or nixl make. The receiver
executes the last hop; a fence ends the TCP connection and waits for a scatter under way, as with tcp.

    sender                           ◀─ CARD (UCX address, first tag) receiver
           greeting over UCX ────────▶
                                     ◀─ CARD (empty)
           UNIT (header), bytes over UCX ─▶ claim, receive, scatter, verify
                                     ◀─ RESULT
"""

import secrets
import socket
import threading
from collections.abc import Callable
from typing import Annotated

import msgspec

from pdxfer.core.errors import ChannelError, PdxferError, ProtocolError
from pdxfer.kv.runs import total_bytes
from pdxfer.memory.region import Region
from pdxfer.transport.base import EndpointOptions, OutgoingUnit, PeerId, Sink, UnitHeader, UnitResult
from pdxfer.transport.frames import FrameSocket, FrameType, Head
from pdxfer.transport.stream import Accepted, decode
from pdxfer.transport.stream_channel import PROBE, StreamChannel
from pdxfer.transport.tcp import TcpEndpoint
from pdxfer.transport.ucx_link import PIECE_BYTES, Ucx, UcxLink, cut, scatter

GREETING = b"pdxfer over UCX"
MAX_CARD_BYTES = 1 << 16
_encode = msgspec.msgpack.Encoder().encode


class UcxCard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a sender's messages go, on UCX."""

    address: bytes
    """Of the receiver's worker for this connection."""
    first_tag: int
    """Number of the first message, out of 64 random bits."""
    piece_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 26)]
    """Of a unit in one message; the last may be shorter."""


_card_decoder = msgspec.msgpack.Decoder(UcxCard)


class _Source(Accepted):
    """A connection of a sender, with the UCX worker that receives from it."""

    link: UcxLink | None = None


class UcxEndpoint(TcpEndpoint):
    """One node's listening socket; each connection that came in has its own UCX worker, driven by its own thread."""

    kind = "ucx"
    piece_bytes = PIECE_BYTES
    """Of what we receive."""

    def __init__(self, options: EndpointOptions, me: PeerId, region: Region, sink: Sink) -> None:
        self.ucx = Ucx(options)
        super().__init__(options, me, region, sink)

    def open_channel(self, peer: PeerId, frames: FrameSocket, timeout_s: float) -> "UcxChannel":
        """Dial the receiver's worker and wait until it has our greeting."""
        head = frames.receive_head()
        card = decode(frames.receive_meta(head, MAX_CARD_BYTES), _card_decoder)
        if head.type is not FrameType.CARD:
            raise ProtocolError(f"{head.type.name} frame where CARD belongs")
        channel = UcxChannel(self, peer, frames, UcxLink(self.ucx, card.piece_bytes, card.first_tag))
        try:
            channel.start()
            channel.greet(card.address, timeout_s)
        except PdxferError:
            channel.close()
            raise
        return channel

    # ---- the receiving side ----------------------------------------------------------------------------------------

    def accepted(self, frames: FrameSocket) -> Accepted:
        """A new connection."""
        return _Source(frames)

    def greet(self, connection: Accepted) -> None:
        """Say where our worker is and wait for the sender's first message."""
        assert isinstance(connection, _Source)
        first_tag = secrets.randbits(64)
        link = connection.link = UcxLink(self.ucx, self.piece_bytes, first_tag)
        link.watch(connection.frames.sock)
        card = UcxCard(address=link.address(), first_tag=first_tag, piece_bytes=self.piece_bytes)
        connection.frames.send(FrameType.CARD, _encode(card))
        self._receive_small(link, GREETING, self.options.connect_timeout_s)
        connection.frames.send(FrameType.CARD)

    def land(self, connection: Accepted, peer: PeerId, header: UnitHeader, head: Head) -> None:
        """Receive one unit, scatter it into its claimed place (or drop it) and answer."""
        if head.payload_bytes:
            raise ProtocolError("a unit on the ucx channel carries its bytes over UCX, not in the frame")
        runs = self.sink.claim(peer, header)
        if runs is None:
            self._receive(connection, header, [])
            answer = "not wanted"
        else:
            assert total_bytes(runs) == header.num_bytes, "the sink claimed runs of another length"
            try:
                self._receive(connection, header, self.region.views(runs))
            except BaseException as error:
                self.sink.failed(peer, header, str(error))
                raise
            answer = "" if self.sink.arrived(peer, header) else "digest mismatch"
        connection.frames.send(FrameType.RESULT, answer.encode())

    def _receive(self, connection: Accepted, header: UnitHeader, views: list[memoryview]) -> None:
        assert isinstance(connection, _Source) and connection.link is not None
        targets = cut(views, self.piece_bytes)
        for piece in connection.link.pull(header.num_bytes, self.options.write_timeout_s):
            with connection.landing:
                connection.land_or_fail()
                scatter(piece, next(targets, []))

    def serve(self, connection: Accepted, peer: PeerId, head: Head) -> None:
        """As StreamEndpoint; a probe crosses the link, too."""
        if head.type is FrameType.PROBE:
            assert isinstance(connection, _Source) and connection.link is not None
            self._receive_small(connection.link, PROBE, self.options.write_timeout_s)
        super().serve(connection, peer, head)

    def _receive_small(self, link: UcxLink, expected: bytes, timeout_s: float) -> None:
        for piece in link.pull(len(expected), timeout_s):
            if piece != expected:
                raise ProtocolError(f"a message over UCX is {bytes(piece)!r}; it should be {expected!r}")

    def _serve(self, connection: Accepted, sock: socket.socket) -> None:
        assert isinstance(connection, _Source)
        try:
            super()._serve(connection, sock)
        finally:
            if connection.link is not None:
                connection.link.close()


class UcxChannel(StreamChannel):
    """A connection to one peer. A unit is under way at a time: write returns when the receiver has answered."""

    kind = "ucx"

    def __init__(self, endpoint: UcxEndpoint, peer: PeerId, frames: FrameSocket, link: UcxLink) -> None:
        super().__init__(endpoint, peer, frames)
        self._link = link
        self._driving = threading.Lock()
        """Held by whoever uses the link."""
        self._greeted = False
        self._answer: str | None = None
        link.watch(frames.sock)

    def greet(self, address: bytes, timeout_s: float) -> None:
        """The first message; the way there works when the receiver has confirmed it."""
        with self._driving:
            self._link.dial(address)
            self._move([memoryview(GREETING)], lambda: self._greeted, timeout_s)

    def write(self, unit: OutgoingUnit) -> None:
        """Blocks until the receiver has answered, at most write_timeout_s without progress."""
        with self._driving:
            self._answer = None
            self._send(FrameType.UNIT, _encode(unit.header))
            views = self._endpoint.region.views(unit.source)
            self._move(views, lambda: self._answer is not None, self._endpoint.options.write_timeout_s)
            self._finished(UnitResult(header=unit.header, error=self._answer or ""))

    def probe(self, timeout_s: float) -> None:
        """Over UCX there, over TCP back."""
        with self._driving:
            target = self._num_probed + 1
            self._send(FrameType.PROBE, PROBE)
            self._move([memoryview(PROBE)], lambda: self._num_probed >= target, timeout_s)

    def close(self) -> None:
        """See Channel. Waits for a write under way to notice."""
        self._die("closed here")
        with self._driving:
            self._link.close()
        super().close()

    def _move(self, views: list[memoryview], answered: Callable[[], bool], timeout_s: float) -> None:
        """Push the bytes and wait for the answer."""
        try:
            self._link.push(views, timeout_s)
            self._link.drive(lambda: answered() or self._dead, timeout_s)
        except ChannelError as error:
            self._die(str(error))
            raise ChannelError(self._dead) from error
        if not answered():
            raise ChannelError(self._dead)

    def _next(self, head: Head, meta: bytes) -> None:
        if head.type is FrameType.CARD:
            self._greeted = True
        else:
            super()._next(head, meta)
        self._link.wake()

    def _result(self, error: str) -> None:
        self._answer = error

    def _die(self, reason: str) -> None:
        super()._die(reason)
        self._link.wake()
