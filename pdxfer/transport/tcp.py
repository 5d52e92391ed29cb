"""Plain sockets: the portable channel. The sender writes straight from the region, the receiver reads straight into it.

A unit is one frame: its header, then its bytes in canonical order, moved by vectored calls of at most 1,024 ranges
without a copy in user space. When sendmsg has returned the kernel holds a copy, so source memory is free at once.
"""

import fcntl
import socket
import termios

import msgspec

from pdxfer.core.errors import ChannelError, ConfigError, PdxferError, ProtocolError
from pdxfer.kv.runs import total_bytes
from pdxfer.memory.region import Region
from pdxfer.transport import admission
from pdxfer.transport.admission import describe
from pdxfer.transport.base import EndpointOptions, OutgoingUnit, PeerId, Sink, UnitHeader, UnitResult
from pdxfer.transport.frames import FrameSocket, FrameType, Head
from pdxfer.transport.stream import Accepted, StreamEndpoint, decode
from pdxfer.transport.stream_channel import StreamChannel
from pdxfer.transport.vectors import iovecs

_encode = msgspec.msgpack.Encoder().encode
_SIOCOUTQ = termios.TIOCOUTQ
"""Linux gives both the same number."""


class TcpAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a TcpEndpoint listens, as its peers reach it."""

    host: str
    port: int


_address_decoder = msgspec.msgpack.Decoder(TcpAddress)


class TcpEndpoint(StreamEndpoint):
    """One node's listening socket and what came in over it."""

    kind = "tcp"

    def __init__(self, options: EndpointOptions, me: PeerId, region: Region, sink: Sink) -> None:
        if not region.host:
            raise ConfigError("KV is in device memory, which sockets cannot read: set transport.channels: [nixl]")
        server = listen(options.bind, options.ports)
        super().__init__(options, me, region, sink, server)
        self._address = TcpAddress(host=options.advertise, port=server.getsockname()[1])
        self.start()

    def address(self) -> bytes:
        """See Endpoint."""
        return _encode(self._address)

    def accepts(self, address: bytes) -> str:
        """Any address that can be read will do; whether it answers shows on connect."""
        try:
            decode(address, _address_decoder)
        except ProtocolError as error:
            return str(error)
        return ""

    def connect(self, peer: PeerId, address: bytes, timeout_s: float) -> StreamChannel:
        """See Endpoint."""
        where = decode(address, _address_decoder)
        secret = self.admission.secret_for(peer, timeout_s)
        try:
            sock = socket.create_connection((where.host, where.port), timeout_s)
        except OSError as error:
            raise ChannelError(
                f"{self.kind} to {describe(peer)} at {where.host}:{where.port}: {error}; check network.advertise there "
                "and firewalls on the way"
            ) from error
        self.tune(sock)
        frames = FrameSocket(sock, timeout_s)
        try:
            admission.enter(frames, self.kind, self.me, peer, secret)
            frames.set_timeout(self.options.write_timeout_s)
            return self.open_channel(peer, frames, timeout_s)
        except PdxferError as error:
            frames.close()
            raise ChannelError(f"{self.kind} to {describe(peer)} at {where.host}:{where.port}: {error}") from error

    def open_channel(self, peer: PeerId, frames: FrameSocket, timeout_s: float) -> StreamChannel:
        """The channel over a connection past its handshake, started."""
        channel = TcpChannel(self, peer, frames)
        channel.start()
        return channel

    def tune(self, sock: socket.socket) -> None:
        """See keep_alive."""
        keep_alive(sock, self.options.write_timeout_s)

    def land(self, connection: Accepted, peer: PeerId, header: UnitHeader, head: Head) -> None:
        """Receive one unit into its claimed place, or drop it unread by anybody."""
        num_bytes = header.frame_bytes or header.num_bytes
        if head.payload_bytes != num_bytes:
            raise ProtocolError(f"unit of {num_bytes} bytes came with a payload of {head.payload_bytes}")
        runs = self.sink.claim(peer, header)
        if runs is None:
            connection.frames.discard(head.payload_bytes)
            return
        try:
            assert total_bytes(runs) == num_bytes, "the sink claimed runs of another length"
            with connection.landing:
                connection.land_or_fail()
                connection.frames.receive_vectors(iovecs(self.region.layout.base, runs))
        except BaseException as error:
            self.sink.failed(peer, header, str(error))
            raise
        self.sink.arrived(peer, header)


class TcpChannel(StreamChannel):
    """A connection to one peer."""

    kind = "tcp"

    def write(self, unit: OutgoingUnit) -> None:
        """Blocks until the kernel has taken the unit (back-pressure), at most write_timeout_s without progress."""
        source = iovecs(self._endpoint.region.layout.base, unit.source)
        self._send(FrameType.UNIT, _encode(unit.header), source)
        self._finished(UnitResult(header=unit.header))

    def pending(self) -> tuple[int, int] | None:
        """See MeasuredChannel: the kernel's count of unconfirmed bytes (Linux)."""
        count = bytearray(4)
        try:
            fcntl.ioctl(self._frames.sock.fileno(), _SIOCOUTQ, count)
        except OSError:
            return None
        return self._frames.num_sent_bytes, int.from_bytes(count, "little")


def keep_alive(sock: socket.socket, write_timeout_s: float) -> None:
    """No delay for small frames; a dead host is noticed although nothing is sent (keepalive) or while sending."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(write_timeout_s * 1000))


def listen(bind: str, ports: tuple[int, int]) -> socket.socket:
    """A listening socket on the first free port of the range. Raises ConfigError."""
    low, high = ports
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    reason = "the range is empty"
    for port in range(low, high + 1):
        try:
            return socket.create_server((bind, port), family=family, backlog=128)
        except OSError as error:
            reason = str(error)
    raise ConfigError(f"no data port of {low}..{high} can be used on {bind} ({reason}): check network.ports and bind")
