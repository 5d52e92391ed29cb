"""What tcp and local share: listening, the handshake, one receive thread a connection, controls, fencing.

The receiving side executes the last hop (it copies from the socket, or from the peer's memory, into our region), so a
connection that is cut and whose thread has left its copy cannot land a byte: that is the fence.
"""

import logging
import socket
import threading
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from pdxfer.core.cpus import unpin_current_thread
from pdxfer.core.errors import ChannelError, PdxferError, ProtocolError
from pdxfer.memory.region import Region
from pdxfer.transport import admission
from pdxfer.transport.admission import Admission, describe
from pdxfer.transport.base import Channel, Control, EndpointOptions, PeerId, Sink, UnitHeader
from pdxfer.transport.frames import FrameSocket, FrameType, Head

log = logging.getLogger(__name__)

MAX_HANDSHAKES = 64
"""Connections that may be in their handshake at once; more are closed unheard."""

_encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T")
_header_decoder = msgspec.msgpack.Decoder(UnitHeader)
control_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)


def decode(data: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """A msgpack value of a peer. Raises ProtocolError."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"malformed message on the data channel: {error}") from error


class Accepted:
    """A connection that a peer opened to us."""

    def __init__(self, frames: FrameSocket) -> None:
        self.frames = frames
        self.peer: PeerId | None = None
        self.landing = threading.Lock()
        """Held while bytes of this connection may be written into our region."""
        self.thread: threading.Thread | None = None

    def land_or_fail(self) -> None:
        """With `landing` held, before each copy: raise if this connection was cut."""
        if self.frames.closing:
            raise ChannelError("the connection was cut here (fence, or the peer is not admitted any more)")

    def fence(self) -> None:
        """Cut, and wait until nothing of it is being copied into our region."""
        self.frames.cut()
        with self.landing:
            pass


class StreamServer:
    """A listening socket: who may connect (Admission), the handshake, and one thread a connection that serves it."""

    kind = ""

    def __init__(self, options: EndpointOptions, me: PeerId, server: socket.socket) -> None:
        self.options, self.me = options, me
        self.admission = Admission()
        self._server = server
        self._lock = threading.Lock()
        self._accepted: dict[Accepted, None] = {}
        """Oldest first."""
        self._handshakes = threading.Semaphore(MAX_HANDSHAKES)
        self._stopping = threading.Event()
        self._accepter = threading.Thread(target=self._accept, name=f"pdxfer-{self.kind}-accept", daemon=True)

    def __repr__(self) -> str:
        with self._lock:
            state = "closed" if self._stopping.is_set() else "open"
            return f"<{type(self).__name__} {state} peers_in={len(self._accepted)}>"

    def start(self) -> None:
        """Begin to accept; the subclass calls it when it is complete."""
        self._accepter.start()

    def admit(self, peers: Sequence[PeerId], secret: bytes) -> None:
        """See Endpoint. Connections of peers that are not admitted any more are cut."""
        self.admission.set(peers, secret)
        for connection in self._connections():
            if connection.peer is not None and not self.admission.admits(connection.peer):
                connection.frames.cut()

    def close(self) -> None:
        """Cut every connection, end all threads. Idempotent."""
        with self._lock:
            if self._stopping.is_set():
                return
            self._stopping.set()
        self.admission.close()
        try:
            self._server.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # was never listening
        self.closing()
        for connection in self._connections():
            connection.fence()
        for thread in [self._accepter, *(c.thread for c in self._connections())]:
            if thread is not None and thread.is_alive() and thread is not threading.current_thread():
                thread.join(self.options.connect_timeout_s)
        self._server.close()

    # ---- for subclasses --------------------------------------------------------------------------------------------

    def tune(self, sock: socket.socket) -> None:
        """Socket options of a new connection."""

    def accepted(self, frames: FrameSocket) -> Accepted:
        """A new connection."""
        return Accepted(frames)

    def greet(self, connection: Accepted) -> None:
        """After the handshake, before the first frame. Raises to refuse."""

    def serve(self, connection: Accepted, peer: PeerId, head: Head) -> None:
        """One frame of an admitted peer. Raises PdxferError to end the connection."""
        raise NotImplementedError

    def lost(self, peer: PeerId, reason: str) -> None:
        """A connection that was past its handshake has ended."""

    def closing(self) -> None:
        """Nobody is accepted any more; connections are cut next."""

    # ---- accepting -------------------------------------------------------------------------------------------------

    def _connections(self) -> list[Accepted]:
        with self._lock:
            return list(self._accepted)

    def _accept(self) -> None:
        unpin_current_thread()
        while not self._stopping.is_set():
            try:
                sock, _ = self._server.accept()
            except OSError as error:
                if not self._stopping.wait(0.1):  # out of descriptors, most likely: try again
                    log.warning("%s cannot accept a connection: %s", self.kind, error)
                continue
            if self._stopping.is_set() or not self._handshakes.acquire(blocking=False):
                self.admission.refused["too many handshakes"] += 1
                sock.close()
                continue
            connection = self.accepted(FrameSocket(sock, self.options.connect_timeout_s))
            name = f"pdxfer-{self.kind}-in"
            connection.thread = threading.Thread(target=self._serve, args=(connection, sock), name=name, daemon=True)
            with self._lock:
                self._accepted[connection] = None
            try:
                connection.thread.start()
            except RuntimeError as error:  # out of threads, most likely
                log.warning("%s cannot serve a connection: %s", self.kind, error)
                self._turn_away(connection)

    def _turn_away(self, connection: Accepted) -> None:
        connection.thread = None
        with self._lock:
            self._accepted.pop(connection, None)
        self._handshakes.release()
        connection.frames.close()

    def _serve(self, connection: Accepted, sock: socket.socket) -> None:
        """One connection's life."""
        unpin_current_thread()
        frames, reason = connection.frames, "closed"
        try:
            self._handshake(connection, sock)
            while True:
                self._serve_next(connection, frames.receive_head())
        except PdxferError as error:
            reason = str(error)
        except Exception as error:  # a bug of ours or of the sink must not leave a claim or a peer hanging
            log.exception("%s connection of %s failed: please report this", self.kind, connection.peer)
            reason = f"{type(error).__name__}: {error}"
        finally:
            frames.close()
            with self._lock:
                self._accepted.pop(connection, None)
            if connection.peer is None:
                log.debug("%s connection refused: %s", self.kind, reason)
            else:
                log.debug("%s connection of %s ended: %s", self.kind, describe(connection.peer), reason)
                self.lost(connection.peer, reason)

    def _handshake(self, connection: Accepted, sock: socket.socket) -> None:
        try:
            self.tune(sock)
            timeout_s = self.options.connect_timeout_s
            peer = admission.receive(connection.frames, self.kind, self.me, self.admission, timeout_s)
        finally:
            self._handshakes.release()
        self.greet(connection)
        connection.frames.set_timeout(self.options.write_timeout_s)
        connection.peer = peer
        if not self.admission.admits(peer):
            raise ChannelError(f"{describe(peer)} was admitted no more when its handshake ended")

    def _serve_next(self, connection: Accepted, head: Head) -> None:
        assert connection.peer is not None
        self.serve(connection, connection.peer, head)


class StreamEndpoint(StreamServer):
    """Base of TcpEndpoint and LocalEndpoint; see transport/base.py for the contract."""

    writes_here = True

    def __init__(self, options: EndpointOptions, me: PeerId, region: Region, sink: Sink, server: socket.socket) -> None:
        super().__init__(options, me, server)
        self.region, self.sink = region, sink
        self._channels: set[Channel] = set()

    def __repr__(self) -> str:
        with self._lock:
            state = "closed" if self._stopping.is_set() else "open"
            return f"<{type(self).__name__} {state} peers_in={len(self._accepted)} peers_out={len(self._channels)}>"

    @property
    def generation(self) -> int:
        """Constant: a fence cuts connections, the address stays."""
        return 0

    def connections(self, peer: PeerId) -> frozenset[object]:
        """See Endpoint."""
        return frozenset(c for c in self._connections() if c.peer == peer and not c.frames.closing)

    def tell(self, peer: PeerId, control: Control) -> None:
        """See Endpoint. The newest: an older one may be dead, and its end not noticed yet."""
        for connection in reversed(self._connections()):
            if connection.peer == peer and not connection.frames.closing:
                connection.frames.send(FrameType.CONTROL, _encode(control))
                return
        raise ChannelError(f"{describe(peer)} has no {self.kind} connection to this node")

    def fence(self, peer: PeerId) -> None:
        """See Endpoint: cuts all connections of the peer."""
        for connection in self._connections():
            if connection.peer == peer:
                connection.fence()

    def attend(self, active: bool) -> None:
        """Nothing to do: threads sleep in the kernel until bytes come."""

    # ---- as a StreamServer -----------------------------------------------------------------------------------------

    def closing(self) -> None:
        """Close what goes out, too."""
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            channel.close()

    def lost(self, peer: PeerId, reason: str) -> None:
        """The sink is told."""
        self.sink.lost(peer, reason)

    def serve(self, connection: Accepted, peer: PeerId, head: Head) -> None:
        """A unit, a control, or a probe."""
        frames = connection.frames
        meta = frames.receive_meta(head)
        match head.type:
            case FrameType.UNIT:
                self.land(connection, peer, decode(meta, _header_decoder), head)
            case FrameType.CONTROL:
                self.sink.control(peer, decode(meta, control_decoder))
            case FrameType.PROBE:
                frames.send(FrameType.PROBED, meta)
            case _:
                raise ProtocolError(f"{head.type.name} frame from a sender")

    def land(self, connection: Accepted, peer: PeerId, header: UnitHeader, head: Head) -> None:
        """Move one unit into the region and tell the sink."""
        raise NotImplementedError

    # ---- used by channels ------------------------------------------------------------------------------------------

    def open(self, channel: Channel) -> None:
        """Remember a channel so that `close` closes it too."""
        with self._lock:
            if self._stopping.is_set():
                raise ChannelError(f"this node's {self.kind} endpoint is closed")
            self._channels.add(channel)

    def forget(self, channel: Channel) -> None:
        """The channel is closed."""
        with self._lock:
            self._channels.discard(channel)
