"""The sending end of tcp and local: a connection that we opened, and a thread that reads what comes back over it.

One sender thread writes; controls, probe answers and results are read by the channel's own thread.
"""

import logging
import threading
from collections import deque
from collections.abc import Sequence

import msgspec

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.cpus import unpin_current_thread
from pdxfer.core.errors import ChannelError, PdxferError, ProtocolError
from pdxfer.transport.admission import describe
from pdxfer.transport.base import Control, OutgoingUnit, PeerId, UnitResult
from pdxfer.transport.frames import FrameSocket, FrameType, Head
from pdxfer.transport.stream import StreamEndpoint, control_decoder, decode
from pdxfer.transport.vectors import Iovecs

log = logging.getLogger(__name__)

PROBE = b"probe"
_encode = msgspec.msgpack.Encoder().encode


class StreamChannel:
    """Base of TcpChannel and LocalChannel: a connection that we opened, with a thread that reads what comes back."""

    kind = ""
    generation = 0

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

    def _send(self, kind: FrameType, meta: bytes, payload: Iovecs | None = None) -> None:
        if self._dead:
            raise ChannelError(self._dead)
        try:
            if payload is None:
                self._frames.send(kind, meta)
            else:
                self._frames.send_vectors(kind, meta, payload)
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
            log.exception("%s channel to %s failed: please report this", self.kind, describe(self.peer))
            self._die(f"{type(error).__name__}: {error}")

    def _next(self, head: Head, meta: bytes) -> None:
        match head.type:
            case FrameType.CONTROL:
                self._endpoint.sink.control(self.peer, decode(meta, control_decoder))
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
