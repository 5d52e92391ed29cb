"""What tcp and local share: listening, the handshake, one receive thread a connection, controls, fencing.

The receiving side executes the last hop (it copies from the socket, or from the peer's memory, into our region), so a
connection that is cut and whose thread has left its copy cannot land a byte: that is the fence.
"""

import logging
import socket
import threading
from collections import deque
from collections.abc import Sequence

import msgspec

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.cpus import unpin_current_thread
from pdxfer.core.errors import ChannelError, PdxferError, ProtocolError
from pdxfer.memory.region import Region
from pdxfer.transport import admission
from pdxfer.transport.admission import Admission, describe
from pdxfer.transport.base import Control, EndpointOptions, OutgoingUnit, PeerId, Sink, UnitHeader, UnitResult
from pdxfer.transport.frames import FrameSocket, FrameType, Head

log = logging.getLogger(__name__)

MAX_HANDSHAKES = 64
"""Connections that may be in their handshake at once; more are closed unheard."""
PROBE = b"probe"

_encode = msgspec.msgpack.Encoder().encode
_header_decoder = msgspec.msgpack.Decoder(UnitHeader)
_control_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)


def decode_header(meta: bytes) -> UnitHeader:
    """Raises ProtocolError."""
    try:
        return _header_decoder.decode(meta)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"malformed unit header: {error}") from error


def decode_control(meta: bytes) -> Control:
    """Raises ProtocolError."""
    try:
        return _control_decoder.decode(meta)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"malformed control: {error}") from error


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


class StreamEndpoint:
    """Base of TcpEndpoint and LocalEndpoint; see transport/base.py for the contract."""

    kind = ""
    writes_here = True

    def __init__(self, options: EndpointOptions, me: PeerId, region: Region, sink: Sink, server: socket.socket) -> None:
        self.options, self.me, self.region, self.sink = options, me, region, sink
        self.admission = Admission()
        self._server = server
        self._lock = threading.Lock()
        self._accepted: set[Accepted] = set()
        self._channels: set[StreamChannel] = set()
        self._handshakes = threading.Semaphore(MAX_HANDSHAKES)
        self._stopping = threading.Event()
        self._accepter = threading.Thread(target=self._accept, name=f"pdxfer-{self.kind}-accept", daemon=True)

    def __repr__(self) -> str:
        with self._lock:
            state = "closed" if self._stopping.is_set() else "open"
            return f"<{type(self).__name__} {state} peers_in={len(self._accepted)} peers_out={len(self._channels)}>"

    def start(self) -> None:
        """Begin to accept; the subclass calls it when it is complete."""
        self._accepter.start()

    @property
    def generation(self) -> int:
        """Constant: a fence cuts connections, the address stays."""
        return 0

    def admit(self, peers: Sequence[PeerId], secret: bytes) -> None:
        """See Endpoint. Connections of peers that are not admitted any more are cut."""
        self.admission.set(peers, secret)
        for connection in self._connections():
            if connection.peer is not None and not self.admission.admits(connection.peer):
                connection.frames.cut()

    def tell(self, peer: PeerId, control: Control) -> None:
        """See Endpoint."""
        for connection in self._connections():
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

    def close(self) -> None:
        """See Endpoint."""
        with self._lock:
            if self._stopping.is_set():
                return
            self._stopping.set()
            channels = list(self._channels)
        self.admission.close()
        try:
            self._server.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # was never listening
        for channel in channels:
            channel.close()
        for connection in self._connections():
            connection.fence()
        for thread in [self._accepter, *(c.thread for c in self._connections())]:
            if thread is not None and thread.is_alive() and thread is not threading.current_thread():
                thread.join(self.options.connect_timeout_s)
        self._server.close()

    # ---- for subclasses --------------------------------------------------------------------------------------------

    def tune(self, sock: socket.socket) -> None:
        """Socket options of a new connection."""

    def greet(self, connection: Accepted) -> None:
        """After the handshake, before the first frame. Raises to refuse."""

    def land(self, connection: Accepted, peer: PeerId, header: UnitHeader, head: Head) -> None:
        """Move one unit into the region and tell the sink."""
        raise NotImplementedError

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
            connection = Accepted(FrameSocket(sock, self.options.connect_timeout_s))
            name = f"pdxfer-{self.kind}-in"
            connection.thread = threading.Thread(target=self._serve, args=(connection, sock), name=name, daemon=True)
            with self._lock:
                self._accepted.add(connection)
            connection.thread.start()

    def _serve(self, connection: Accepted, sock: socket.socket) -> None:
        """One connection's life."""
        unpin_current_thread()
        frames, reason = connection.frames, "closed"
        try:
            self._handshake(connection, sock)
            while True:
                self._next(connection, frames.receive_head())
        except PdxferError as error:
            reason = str(error)
        except Exception as error:  # a bug of ours or of the sink must not leave a claim or a peer hanging
            log.exception("%s connection of %s", self.kind, connection.peer)
            reason = f"{type(error).__name__}: {error}"
        finally:
            frames.close()
            with self._lock:
                self._accepted.discard(connection)
            if connection.peer is None:
                log.debug("%s connection refused: %s", self.kind, reason)
            else:
                log.debug("%s connection of %s ended: %s", self.kind, describe(connection.peer), reason)
                self.sink.lost(connection.peer, reason)

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

    def _next(self, connection: Accepted, head: Head) -> None:
        frames, peer = connection.frames, connection.peer
        assert peer is not None
        meta = frames.receive_meta(head)
        match head.type:
            case FrameType.UNIT:
                self.land(connection, peer, decode_header(meta), head)
            case FrameType.CONTROL:
                self.sink.control(peer, decode_control(meta))
            case FrameType.PROBE:
                frames.send(FrameType.PROBED, meta)
            case _:
                raise ProtocolError(f"{head.type.name} frame from a sender")

    # ---- used by channels ------------------------------------------------------------------------------------------

    def open(self, channel: "StreamChannel") -> None:
        """Remember a channel so that `close` closes it too."""
        with self._lock:
            if self._stopping.is_set():
                raise ChannelError(f"this node's {self.kind} endpoint is closed")
            self._channels.add(channel)

    def forget(self, channel: "StreamChannel") -> None:
        """The channel is closed."""
        with self._lock:
            self._channels.discard(channel)


class StreamChannel:
    """Base of TcpChannel and LocalChannel: a connection that we opened, with a thread that reads what comes back."""

    kind = ""

    def __init__(self, endpoint: StreamEndpoint, peer: PeerId, frames: FrameSocket) -> None:
        self.peer, self._endpoint, self._frames = peer, endpoint, frames
        self._dead = ""
        self._results: deque[UnitResult] = deque()
        self._num_probed = 0
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name=f"pdxfer-{self.kind}-out", daemon=True)

    def __repr__(self) -> str:
        state = self._dead or "open"
        sent = self._frames.num_sent_bytes / (1 << 20)
        return f"<{type(self).__name__} to={self.peer.engine_id} {state} sent={sent:.1f}MiB>"

    @property
    def dead(self) -> str:
        """See Channel."""
        return self._dead

    def start(self) -> None:
        """Begin to read; the frames are past their handshake."""
        self._endpoint.open(self)
        self._reader.start()

    def write(self, unit: OutgoingUnit) -> None:
        """See Channel."""
        raise NotImplementedError

    def poll(self, timeout_s: float) -> Sequence[UnitResult]:
        """See Channel."""
        with self._changed:
            self._changed.wait_for(lambda: self._results or self._dead, timeout_s)
            if self._dead:
                raise ChannelError(self._dead)
            results = list(self._results)
            self._results.clear()
            return results

    def tell(self, control: Control) -> None:
        """See Channel."""
        self._send(FrameType.CONTROL, _encode(control))

    def probe(self, timeout_s: float) -> None:
        """See Channel."""
        with self._changed:
            target = self._num_probed + 1
        deadline = SYSTEM_CLOCK.now() + timeout_s
        self._send(FrameType.PROBE, PROBE)
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._num_probed >= target or self._dead, max(0.0, deadline - SYSTEM_CLOCK.now())
            )
            if self._dead:
                raise ChannelError(self._dead)
            if not done:
                raise ChannelError(f"probe of {describe(self.peer)} over {self.kind} not answered in {timeout_s:g} s")

    def close(self) -> None:
        """See Channel."""
        self._die("closed here")
        if self._reader.is_alive() and self._reader is not threading.current_thread():
            self._reader.join(self._endpoint.options.connect_timeout_s)
        self._endpoint.forget(self)
        self._frames.close()

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _send(self, kind: FrameType, meta: bytes, payload: Sequence[memoryview] = ()) -> None:
        if self._dead:
            raise ChannelError(self._dead)
        try:
            self._frames.send(kind, meta, payload)
        except ChannelError as error:
            self._die(str(error))
            raise ChannelError(f"{self.kind} channel to {describe(self.peer)}: {error}") from error

    def _die(self, reason: str) -> None:
        with self._changed:
            self._dead = self._dead or f"{self.kind} channel to {describe(self.peer)}: {reason}"
            self._changed.notify_all()
        self._frames.cut()

    def _read(self) -> None:
        unpin_current_thread()
        try:
            while True:
                head = self._frames.receive_head()
                self._next(head, self._frames.receive_meta(head))
        except PdxferError as error:
            self._die(str(error))
        except Exception as error:  # a bug in the sink must end the channel, not silence it
            log.exception("%s channel to %s", self.kind, describe(self.peer))
            self._die(f"{type(error).__name__}: {error}")

    def _next(self, head: Head, meta: bytes) -> None:
        match head.type:
            case FrameType.CONTROL:
                self._endpoint.sink.control(self.peer, decode_control(meta))
            case FrameType.PROBED:
                with self._changed:
                    self._num_probed += 1
                    self._changed.notify_all()
            case FrameType.RESULT:
                self._result(meta.decode(errors="replace"))
            case _:
                raise ProtocolError(f"{head.type.name} frame from a receiver")

    def _result(self, error: str) -> None:
        raise ProtocolError("RESULT frame on a channel that pushes")

    def _finished(self, result: UnitResult) -> None:
        with self._changed:
            self._results.append(result)
            self._changed.notify_all()
