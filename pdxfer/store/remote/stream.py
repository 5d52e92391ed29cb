"""One TCP or TLS connection whose every call ends by a moment, with large bodies received where they belong.

Blocking, used by one worker thread at a time; only `abort` may come from another thread. Copies: none of ours for
bodies; lines go through a buffer of 8 KiB. `end` is a moment of the system's monotonic clock.
"""

import socket
import ssl
import struct
from collections.abc import Sequence

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store.base import Buffer
from pdxfer.store.remote.errors import Reason, ServerError
from pdxfer.store.remote.url import Address

_LINE_BYTES = 8192
_MAX_VECTORS = 512
_TIMEVAL = struct.Struct("ll")


def remaining(end: float) -> float:
    """Seconds until `end`. Raises ServerError when it has passed."""
    left = end - SYSTEM_CLOCK.now()
    if left <= 0:
        raise ServerError(Reason.TIMEOUT, "the deadline came first")
    return left


class Stream:
    """A connection, made by the constructor. Raises ServerError, after which it must be closed."""

    def __init__(self, address: Address, end: float, tls: ssl.SSLContext | None = None) -> None:
        self.address = address
        self._buffer = memoryview(bytearray(_LINE_BYTES))
        self._begin = self._end = 0
        try:
            plain = socket.create_connection((address.host, address.port), timeout=remaining(end))
        except OSError as error:
            raise ServerError(_reason(error), f"cannot connect to {address}: {error}") from error
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = plain
        self._tls = tls is not None
        if tls is None:
            plain.settimeout(None)  # the kernel's own timeouts (_arm) let one call move a whole body
            return
        try:
            plain.settimeout(remaining(end))
            self._socket = tls.wrap_socket(plain, server_hostname=address.host)
        except (OSError, ServerError) as error:
            plain.close()
            reason = Reason.REFUSED if isinstance(error, ssl.SSLCertVerificationError) else _reason(error)
            raise ServerError(reason, f"no TLS with {address}: {error}") from error

    def send(self, parts: Sequence[Buffer], end: float) -> None:
        """All of `parts`, gathered by the kernel."""
        views = [view for part in parts if (view := memoryview(part).cast("B")).nbytes]
        at = 0
        try:
            while at < len(views):
                self._arm(end, socket.SO_SNDTIMEO)
                sent = (
                    self._socket.send(views[at]) if self._tls else self._socket.sendmsg(views[at : at + _MAX_VECTORS])
                )
                while at < len(views) and sent >= views[at].nbytes:
                    sent -= views[at].nbytes
                    at += 1
                if sent:
                    views[at] = views[at][sent:]
        except OSError as error:
            raise self._broken(error) from error

    def fill(self, view: memoryview, end: float) -> None:
        """Exactly as many bytes as `view` holds."""
        kept = min(len(view), self._end - self._begin)
        if kept:
            view[:kept] = self._buffer[self._begin : self._begin + kept]
            self._begin += kept
            view = view[kept:]
        while view.nbytes:
            view = view[self._receive(view, end, whole=True) :]

    def line(self, end: float, mark: bytes = b"\r\n") -> bytes:
        """Up to CR LF (or another mark), without it."""
        while (at := bytes(self._buffer[self._begin : self._end]).find(mark)) < 0:
            self._more(end)
        self._begin += at + len(mark)
        return bytes(self._buffer[self._begin - at - len(mark) : self._begin - len(mark)])

    def take(self, num_bytes: int, end: float) -> bytes:
        """A few bytes, copied."""
        if num_bytes > _LINE_BYTES:
            taken = bytearray(num_bytes)
            self.fill(memoryview(taken), end)
            return bytes(taken)
        while self._end - self._begin < num_bytes:
            self._more(end)
        self._begin += num_bytes
        return bytes(self._buffer[self._begin - num_bytes : self._begin])

    def skip(self, num_bytes: int, end: float) -> None:
        """Read and forget."""
        waste = memoryview(bytearray(min(num_bytes, 1 << 16)))
        while num_bytes:
            part = waste[: min(num_bytes, len(waste))]
            self.fill(part, end)
            num_bytes -= len(part)

    def abort(self) -> None:
        """Make a call in progress fail at once; any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except (OSError, ValueError):
            return  # not connected any more

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def _more(self, end: float) -> None:
        """Receive into the line buffer whatever is there."""
        held = self._end - self._begin
        if held == _LINE_BYTES:
            raise ServerError(Reason.PROTOCOL, f"{self.address} sent a line of more than {_LINE_BYTES} bytes")
        self._buffer[:held] = self._buffer[self._begin : self._end]
        self._begin, self._end = 0, held
        self._end += self._receive(self._buffer[held:], end)

    def _receive(self, view: memoryview, end: float, whole: bool = False) -> int:
        try:
            self._arm(end, socket.SO_RCVTIMEO)
            flags = socket.MSG_WAITALL if whole and not self._tls else 0
            got = self._socket.recv_into(view, view.nbytes, flags)
        except OSError as error:
            raise self._broken(error) from error
        if not got:
            raise ServerError(Reason.UNREACHABLE, f"{self.address} closed the connection")
        return got

    def _arm(self, end: float, option: int) -> None:
        """The next call of the socket ends by `end`."""
        left = remaining(end)
        if self._tls:
            self._socket.settimeout(left)
        else:
            left = max(left, 0.001)  # a timeval of zero would mean for ever
            self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(left), int(left % 1 * 1e6)))

    def _broken(self, error: OSError) -> ServerError:
        reason = _reason(error)
        if reason is Reason.TIMEOUT:  # the kernel's word for it is "Resource temporarily unavailable"
            return ServerError(reason, f"{self.address} did not answer in time")
        return ServerError(reason, f"connection to {self.address}: {error}")


def _reason(error: Exception) -> Reason:
    if isinstance(error, ServerError):
        return error.reason
    late = isinstance(error, (TimeoutError, BlockingIOError))
    return Reason.TIMEOUT if late else Reason.UNREACHABLE
