"""One engine's connection to the store process: the mapped segment, calls and their answers, what is held over it.

shared.py makes a new link when this one ends. A call that is given up (deadline, cancellation) leaves its answer to
us: a lease that arrives for nobody is dropped at once.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from itertools import count
from pathlib import Path

import msgspec
from msgspec import structs

from pdxfer.core.errors import ConfigError, ProtocolError, UnreachableError
from pdxfer.memory.pinning import pin
from pdxfer.memory.segment import Segment
from pdxfer.store.policy import PATIENCE_S
from pdxfer.store.shared_wire import (
    MAX_FRAME_BYTES,
    VERSION,
    Answer,
    Drop,
    Evicted,
    Figures,
    FrameBuffer,
    Held,
    Question,
    Refused,
    Request,
    Welcome,
    decode_from_server,
    frame_bytes,
    pack,
)

log = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 2.0


class SharedLink(asyncio.Protocol):
    """An attached connection. Loop thread only, except `drop`."""

    def __init__(self, segment: Segment, evicted: Callable[[Evicted], None]) -> None:
        self.segment = segment
        self._pinning: asyncio.Future[bool] | None = None
        self.figures = Figures(0, segment.num_bytes, 0, 0, 0)
        """Of the tier, at its last answer."""
        self._evicted = evicted
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._frames = FrameBuffer()
        self._numbers = count(1)
        self._calls: dict[int, asyncio.Future[Answer | None]] = {}
        self._unsent: list[bytes] = []
        self._num_heard = 0
        """Times that anything came."""
        self.silent = False
        """The last patient call got no answer, and nothing else has come since it was made."""
        self.ended = asyncio.Event()
        """Set when the connection is over."""

    def __repr__(self) -> str:
        return f"<SharedLink alive={self.alive} calls={len(self._calls)} {self.segment!r}>"

    @property
    def alive(self) -> bool:
        """Whether requests can be made."""
        return self._transport is not None

    @classmethod
    async def attach(cls, path: Path, evicted: Callable[[Evicted], None]) -> "SharedLink":
        """Connect and map. UnreachableError: nobody serves the path now. ConfigError: we may not, or other version."""
        connection, segment = await asyncio.to_thread(_attach, path)
        link = cls(segment, evicted)
        await link._loop.create_unix_connection(lambda: link, sock=connection)
        link._pinning = link._loop.run_in_executor(None, pin, segment)
        return link

    async def call(self, request: Question, timeout_s: float) -> Answer | None:
        """The answer to a request, whose id we choose; None: not in time, or the connection ended."""
        if self._transport is None or timeout_s <= 0:
            return None
        number, heard = next(self._numbers), self._num_heard
        answer: asyncio.Future[Answer | None] = self._loop.create_future()
        self._calls[number] = answer
        timer = self._loop.call_later(timeout_s, _give_up, answer)
        self._send(structs.replace(request, id=number))
        try:
            if await answer is None and timeout_s >= PATIENCE_S and heard == self._num_heard:
                self.silent = True
            return answer.result()
        except asyncio.CancelledError:
            if not answer.cancelled():  # it came in the same turn of the loop as the cancellation
                self._dispose(answer.result())
            raise
        finally:
            timer.cancel()
            self._calls.pop(number, None)

    def drop(self, handle: int) -> None:
        """End a lease or a reservation of this link. Any thread; nothing to do if the connection is over."""
        if not self.alive:
            return
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            self._send_drop(handle)
            return
        try:
            self._loop.call_soon_threadsafe(self._send_drop, handle)
        except RuntimeError:  # the loop is closed, and the connection with it
            return

    async def close(self) -> None:
        """End the connection; what is still held comes back on the other side. Idempotent."""
        self._flush()
        if self._transport is not None:
            self._transport.close()
            await self.ended.wait()
        if self._pinning is not None:
            await asyncio.wait((self._pinning,))
        self.segment.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._num_heard += 1
        self.silent = False
        try:
            for body in self._frames.feed(data):
                self._take(decode_from_server(body))
        except (msgspec.DecodeError, ProtocolError) as error:
            log.warning("store process does not speak our protocol, detached: %s", error)
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """No call waits any longer."""
        self._transport = None
        for answer in self._calls.values():
            _give_up(answer)
        self.ended.set()

    def _send_drop(self, handle: int) -> None:
        self._send(Drop(handle))

    def _send(self, request: Request) -> None:
        """At the end of this turn of the loop, in one system call with what else it sends: a call costs 30 us."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(pack(request))

    def _flush(self) -> None:
        frames, self._unsent = self._unsent, []
        if frames and self._transport is not None:
            self._transport.write(b"".join(frames))

    def _take(self, message: object) -> None:
        if isinstance(message, Evicted):
            self._evicted(message)
            return
        if not isinstance(message, Answer):
            raise ProtocolError(f"unexpected {type(message).__name__} from the store process")
        self.figures = message.figures
        answer = self._calls.pop(message.id, None)
        if answer is None or answer.done():
            self._dispose(message)
        else:
            answer.set_result(message)

    def _dispose(self, message: Answer | None) -> None:
        if isinstance(message, Held):
            self._send_drop(message.handle)


def _give_up(answer: "asyncio.Future[Answer | None]") -> None:
    if not answer.done():
        answer.set_result(None)


def _attach(path: Path) -> tuple[socket.socket, Segment]:
    """Connect, read Welcome and the fd, map. Blocking, bounded."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(ATTACH_TIMEOUT_S)
        connection.connect(os.fspath(path))
        segment = _welcomed(connection, path)
        connection.setblocking(False)
    except OSError as error:
        connection.close()
        raise UnreachableError(f"no store process answers at {path}: {error}") from error
    except BaseException:
        connection.close()
        raise
    return connection, segment


def _welcomed(connection: socket.socket, path: Path) -> Segment:
    head, fds, _, _ = socket.recv_fds(connection, 4, 1)
    try:
        body = _exactly(connection, frame_bytes(_rest(connection, head, 4)))
        message = decode_from_server(body)
        if isinstance(message, Refused):
            raise ConfigError(f"the store process at {path} refused us: {message.reason}")
        if not isinstance(message, Welcome) or not fds:
            raise ConfigError(f"what listens at {path} is no store process; correct store.shared_memory")
        if message.version != VERSION:
            raise ConfigError(
                f"the store process at {path} speaks version {message.version}, we speak {VERSION};"
                " restart it with the installed version"
            )
        return Segment.attach(fds.pop(), message.num_bytes)
    except (msgspec.DecodeError, ProtocolError) as error:
        raise ConfigError(f"what listens at {path} is no store process; correct store.shared_memory") from error
    finally:
        for fd in fds:
            os.close(fd)


def _rest(connection: socket.socket, head: bytes, length: int) -> bytes:
    return head + _exactly(connection, length - len(head))


def _exactly(connection: socket.socket, length: int) -> bytes:
    assert 0 <= length <= MAX_FRAME_BYTES
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionResetError("closed during the welcome")
        data += part
    return data
