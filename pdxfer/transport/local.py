"""Same host: the sender says where its blocks lie, the receiver reads them out of its memory (one copy, no socket).

Headers and answers go over a Unix socket in the abstract namespace, with the same handshake as tcp and the kernel's
word for the peer's process id and user. A unit's source is free when the reader has answered. A reader that finds the
sender's end closed after its copy throws the copy away: by then the source may have held something else.

    sender   CARD (pid, layout, a probe) ─▶ receiver: tries the probe   UNIT (source block ids) ─▶ read, verify
                                         ◀─ CARD (empty)                                        ◀─ RESULT
"""

import ctypes
import os
import secrets
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.cpus import unpin_current_thread
from pdxfer.core.errors import ChannelError, ConfigError, PdxferError, ProtocolError
from pdxfer.kv.layout import KvLayout
from pdxfer.kv.runs import block_runs, pair_runs
from pdxfer.memory.region import Region
from pdxfer.transport import admission, cma
from pdxfer.transport.admission import describe
from pdxfer.transport.base import EndpointOptions, OutgoingUnit, PeerId, Sink, UnitHeader, UnitResult
from pdxfer.transport.frames import FrameSocket, FrameType, Head
from pdxfer.transport.stream import Accepted, StreamEndpoint, decode
from pdxfer.transport.stream_channel import StreamChannel
from pdxfer.transport.vectors import iovecs

_UCRED = struct.Struct("3i")
_encode = msgspec.msgpack.Encoder().encode


class LocalAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a LocalEndpoint listens, and on which host that means anything."""

    host: str
    pid_namespace: str
    name: str
    """Of the socket, in the abstract namespace."""


class Card(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a reader needs to know of a sender."""

    pid: int
    layout: KvLayout
    probe: int
    """Address of 8 bytes in the sender's process..."""
    value: bytes
    """...and what they are."""


_address_decoder = msgspec.msgpack.Decoder(LocalAddress)
_card_decoder = msgspec.msgpack.Decoder(Card)


class _Source(Accepted):
    """A connection of a sender whose memory we read."""

    reader: cma.Reader
    layout: KvLayout


class LocalEndpoint(StreamEndpoint):
    """One node's Unix socket; its receive threads read the senders' memory."""

    kind = "local"

    def __init__(self, options: EndpointOptions, me: PeerId, region: Region, sink: Sink) -> None:
        if not region.host:
            raise ConfigError(
                "KV is in device memory, which process_vm_readv cannot read: set transport.channels: [nixl]"
            )
        name = f"pdxfer-{secrets.token_hex(8)}"
        try:
            server = socket.socket(socket.AF_UNIX)
            server.bind(f"\0{name}")
            server.listen(128)
            self._address = LocalAddress(host=cma.host_id(), pid_namespace=cma.pid_namespace(), name=name)
        except OSError as error:
            raise ConfigError(f"the local channel needs Linux (abstract Unix sockets, /proc): {error}") from error
        super().__init__(options, me, region, sink, server)
        region.use_huge_pages()
        self._helper = ThreadPoolExecutor(1, "pdxfer-local-copy", initializer=unpin_current_thread)
        self._probe = ctypes.create_string_buffer(secrets.token_bytes(8), 8)
        self.start()

    def close(self) -> None:
        """See Endpoint."""
        super().close()
        self._helper.shutdown()

    def address(self) -> bytes:
        """See Endpoint."""
        return _encode(self._address)

    def accepts(self, address: bytes) -> str:
        """Same boot of the same kernel, same pid namespace; ptrace rights are tried out by connect."""
        try:
            there = decode(address, _address_decoder)
        except ProtocolError as error:
            return str(error)
        if there.host != self._address.host:
            return "other host"
        if there.pid_namespace != self._address.pid_namespace:
            return "other pid namespace (container)"
        return ""

    def connect(self, peer: PeerId, address: bytes, timeout_s: float) -> "LocalChannel":
        """See Endpoint."""
        where = decode(address, _address_decoder)
        if reason := self.accepts(address):
            raise ChannelError(f"local to {describe(peer)}: {reason}")
        secret = self.admission.secret_for(peer, timeout_s)
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(timeout_s)
        try:
            sock.connect(f"\0{where.name}")
            _same_user(sock)
        except OSError as error:
            sock.close()
            raise ChannelError(
                f"local to {describe(peer)}: {error}; it has ended, or lives in another network namespace"
            ) from error
        frames = FrameSocket(sock, timeout_s)
        try:
            admission.enter(frames, self.kind, self.me, peer, secret)
            self._offer(frames)
            frames.set_timeout(self.options.write_timeout_s)
            channel = LocalChannel(self, peer, frames)
            channel.start()
        except PdxferError as error:
            frames.close()
            raise ChannelError(f"local to {describe(peer)}: {error}") from error
        return channel

    def _offer(self, frames: FrameSocket) -> None:
        """Sender: hand out the card and wait until the reader has read the probe."""
        cma.allow_readers()
        address = ctypes.addressof(self._probe)
        card = Card(pid=os.getpid(), layout=self.region.layout, probe=address, value=self._probe.raw)
        frames.send(FrameType.CARD, _encode(card))
        head = frames.receive_head()
        meta = frames.receive_meta(head)
        if head.type is FrameType.REFUSED:
            raise ChannelError(f"refused: {meta.decode(errors='replace')}")
        if head.type is not FrameType.CARD:
            raise ProtocolError(f"{head.type.name} frame where CARD belongs")

    # ---- the reading side ------------------------------------------------------------------------------------------

    def accepted(self, frames: FrameSocket) -> Accepted:
        """A new connection."""
        return _Source(frames)

    def greet(self, connection: Accepted) -> None:
        """Reader: check the card and try to read. Tells the sender why not."""
        assert isinstance(connection, _Source)
        frames = connection.frames
        try:
            pid = _same_user(frames.sock)
            head = frames.receive_head()
            if head.type is not FrameType.CARD:
                raise ProtocolError(f"{head.type.name} frame where CARD belongs")
            card = decode(frames.receive_meta(head), _card_decoder)
            self._check(card, pid)
            reader = cma.Reader(pid, self._helper)
            _try(reader, card)
        except PdxferError as error:
            frames.send(FrameType.REFUSED, str(error).encode()[:1000])
            raise
        connection.reader, connection.layout = reader, card.layout
        frames.send(FrameType.CARD)

    def _check(self, card: Card, pid: int) -> None:
        if card.pid != pid:
            raise ProtocolError(f"the kernel says process {pid}, the card {card.pid}: another pid namespace")
        try:
            card.layout.check()
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        mine, theirs = self.region.layout, card.layout
        if (mine.num_layers, mine.block_bytes) != (theirs.num_layers, theirs.block_bytes):
            raise ChannelError(
                f"KV layouts differ: {theirs.num_layers} layers x {theirs.block_bytes} bytes a block there, "
                f"{mine.num_layers} x {mine.block_bytes} here"
            )

    def land(self, connection: Accepted, peer: PeerId, header: UnitHeader, head: Head) -> None:
        """Read one unit into its claimed place and answer."""
        if head.payload_bytes:
            raise ProtocolError("a unit on the local channel carries no payload")
        connection.frames.send(FrameType.RESULT, self._read(connection, peer, header).encode()[:1000])

    def _read(self, connection: Accepted, peer: PeerId, header: UnitHeader) -> str:
        """Returns what went wrong for the sender to know; raises when the connection is of no use any more."""
        runs = self.sink.claim(peer, header)
        if runs is None:
            return "not wanted"
        assert isinstance(connection, _Source)
        layout = connection.layout
        try:
            source = block_runs(layout, header.source_blocks, header.first_layer, header.num_layers)
            from_runs, to_runs = pair_runs(source, runs)
            with connection.landing:
                connection.land_or_fail()
                connection.reader.copy(iovecs(self.region.layout.base, to_runs), iovecs(layout.base, from_runs))
            _still_there(connection.frames)
        except BaseException as error:
            self.sink.failed(peer, header, str(error))
            if isinstance(error, ValueError):
                return str(error)
            raise
        return "" if self.sink.arrived(peer, header) else "digest mismatch"


class LocalChannel(StreamChannel):
    """Our offers to one reader; several may be open."""

    kind = "local"

    def __init__(self, endpoint: LocalEndpoint, peer: PeerId, frames: FrameSocket) -> None:
        super().__init__(endpoint, peer, frames)
        self._offered: deque[UnitHeader] = deque()
        self._answered_at = 0.0

    def write(self, unit: OutgoingUnit) -> None:
        """Offer a unit; the reader answers in order."""
        if not self._offered:
            self._answered_at = SYSTEM_CLOCK.now()
        self._offered.append(unit.header)
        self._send(FrameType.UNIT, _encode(msgspec.structs.replace(unit.header, source_blocks=unit.source_blocks)))

    def poll(self, timeout_s: float) -> Sequence[UnitResult]:
        """As any stream's; a reader that answers nothing for write_timeout_s (stopped?) is given up."""
        limit_s = self._endpoint.options.write_timeout_s
        if self._offered and SYSTEM_CLOCK.now() > self._answered_at + limit_s:
            self._die(f"the reader has answered nothing for {limit_s:g} s")
        return super().poll(timeout_s)

    def _result(self, error: str) -> None:
        if not self._offered:
            raise ProtocolError("RESULT frame without a unit in flight")
        self._answered_at = SYSTEM_CLOCK.now()
        self._finished(UnitResult(header=self._offered.popleft(), error=error))


def _same_user(sock: socket.socket) -> int:
    """Process id of the other end, from the kernel. Raises ChannelError for another user's process."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid != os.geteuid():
        raise ChannelError(f"process {pid} belongs to user {uid}, we are {os.geteuid()}: memory is not shared")
    if pid == 0:
        raise ChannelError("the other process is outside our pid namespace")
    return int(pid)


def _try(reader: cma.Reader, card: Card) -> None:
    got = ctypes.create_string_buffer(8)
    one = np.array([[0, 8]], dtype=np.int64)
    reader.copy(iovecs(ctypes.addressof(got), one), iovecs(card.probe, one))
    if got.raw != card.value:
        raise ChannelError(f"a probe read of process {reader.pid} found other bytes: not the process it claims to be")


def _still_there(frames: FrameSocket) -> None:
    """Raise if the sender has closed its end: what was read since may not be what it offered."""
    poller = select.poll()
    poller.register(frames.sock.fileno(), select.POLLRDHUP)
    if poller.poll(0):
        raise ChannelError("the sender closed the channel while its memory was being read")
