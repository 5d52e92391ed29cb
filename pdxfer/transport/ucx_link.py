"""The only file that imports ucxx: one UCX worker for each connection, driven by whoever has something to move.

A UcxLink carries numbered messages one way over UCX's tag matching, in pieces through two staging buffers. It has no
thread: nothing moves, and nothing costs, unless a caller is in `push`, `pull` or `drive`; there it sleeps on UCX's
descriptor. UCX takes its settings from the environment; what the user has set there wins.
"""

import importlib
import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.errors import ChannelError, ConfigError
from pdxfer.core.install import pip_install
from pdxfer.transport.base import EndpointOptions
from pdxfer.transport.nixl_agent import set_ucx_defaults, writer_executed

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
"""Of a unit in one message. Over TCP 1.6 GB/s; 256 KiB gives 1.4, 2 MiB 1.5, 4 MiB 1.2 (measured, UCX 1.21)."""
NUM_SLOTS = 2
"""One slot fills while the other is under way; with a single one 1.35 GB/s."""
_LOOK_S = 1.0
"""Longest sleep while driving: UCX does not promise an event for everything it may do."""
_TAG_MASK = (1 << 64) - 1
_HANGUP = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


class Ucx:
    """The library and one context of it. Raises ConfigError saying what to install or set."""

    def __init__(self, options: EndpointOptions) -> None:
        set_ucx_defaults(options)
        if writers := [name for name in writer_executed() if name != "cuda_ipc"]:
            raise ConfigError(
                f"UCX_TLS allows {', '.join(writers)}, in which the peer stores into our memory itself and a fence "
                "does not stop it: unset UCX_TLS, or leave `ucx` out of transport.channels"
            )
        self._module = _load()
        self.api: Any = self._module.libucxx
        self.array: Any = importlib.import_module("ucxx._lib.arr").Array
        features = self.api.Feature
        with self.errors("UCX cannot start"):
            self.context = self.api.UCXContext({}, (features.TAG, features.WAKEUP))

    def tag(self, value: int) -> Any:
        """A message's number as the library wants it."""
        return self._module.types.Tag(value & _TAG_MASK)

    @contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """The library's errors become ChannelError."""
        try:
            yield
        except self._module.exceptions.UCXError as error:
            raise ChannelError(f"{what}: {error or type(error).__name__}") from error


class UcxLink:
    """One end of a connection's data path. One thread at a time uses it; `wake` may come from any.

    Both ends cut units into pieces of `piece_bytes` and number them from `first_tag`, which is to be hard to guess:
    UCX lets anybody who reaches its port send.
    """

    def __init__(self, ucx: Ucx, piece_bytes: int, first_tag: int) -> None:
        self._ucx, self.piece_bytes = ucx, piece_bytes
        self._next_tag = first_tag
        self._slots = [memoryview(bytearray(piece_bytes)) for _ in range(NUM_SLOTS)]
        self._poller = select.poll()
        with ucx.errors("UCX cannot make a worker"):
            self._worker = ucx.api.UCXWorker(ucx.context)
            self._worker.init_blocking_progress_mode()
        self._poller.register(self._worker.epoll_file_descriptor, select.POLLIN)
        self._endpoint: Any = None
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._bell_fd_lock = threading.Lock()
        self._poller.register(self._bell, select.POLLIN)

    def address(self) -> bytes:
        """What the other end dials."""
        data: bytes = self._worker.address.tobytes()
        return data

    def dial(self, address: bytes) -> None:
        """Aim at the worker of the other end; connects with the first message."""
        api = self._ucx.api
        with self._ucx.errors("UCX cannot use the peer's address"):
            there = api.UCXAddress.create_from_buffer(address)
            self._endpoint = api.UCXEndpoint.create_from_worker_address(self._worker, there, True)

    def watch(self, sock: socket.socket) -> None:
        """From now on the end of this socket ends all driving."""
        self._poller.register(sock.fileno(), select.POLLRDHUP)

    def push(self, views: Sequence[memoryview], timeout_s: float) -> None:
        """Send bytes (copied once, into staging). Returns when no message needs its slot. Raises ChannelError."""
        under_way: deque[Any] = deque()
        for index, piece in enumerate(cut(views, self.piece_bytes)):
            if len(under_way) == NUM_SLOTS:
                self._finish(under_way.popleft(), timeout_s)
            slot = self._slots[index % NUM_SLOTS]
            num_bytes = gather(piece, slot)
            with self._ucx.errors("UCX cannot send"):
                under_way.append(self._endpoint.tag_send(self._ucx.array(slot[:num_bytes]), self._number()))
        while under_way:
            self._finish(under_way.popleft(), timeout_s)

    def pull(self, num_bytes: int, timeout_s: float) -> Iterator[memoryview]:
        """Receive bytes piece by piece; each view is valid until the next is asked for. Raises ChannelError.

        To be exhausted, or the link to be closed.
        """
        sizes = [min(self.piece_bytes, num_bytes - at) for at in range(0, num_bytes, self.piece_bytes)]
        under_way = deque(self._expect(index, size) for index, size in enumerate(sizes[:NUM_SLOTS]))
        for index, size in enumerate(sizes):
            self._finish(under_way.popleft(), timeout_s)
            yield self._slots[index % NUM_SLOTS][:size]
            ahead = index + NUM_SLOTS
            if ahead < len(sizes):
                under_way.append(self._expect(ahead, sizes[ahead]))

    def drive(self, done: Callable[[], object], timeout_s: float) -> None:
        """Let UCX work until `done`. Raises ChannelError after `timeout_s`, or when the watched socket ends."""
        deadline = SYSTEM_CLOCK.now() + timeout_s
        while True:
            with self._ucx.errors("UCX failed"):
                self._worker.progress()
                if done():
                    return
                may_sleep = self._worker.arm()
            left_s = deadline - SYSTEM_CLOCK.now()
            if left_s <= 0:
                raise ChannelError(f"nothing moved over UCX for {timeout_s:g} s")
            hangup = may_sleep and self._sleep(min(left_s, _LOOK_S))
            if hangup and not done():
                raise ChannelError("the connection ended")

    def wake(self) -> None:
        """Make `drive` look at `done` again."""
        with self._bell_fd_lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Give up what is under way and all of UCX's resources. Idempotent; nobody may be driving."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        try:
            with self._ucx.errors("UCX did not close cleanly"):
                if self._endpoint is not None:
                    self._endpoint.close_blocking()
                worker.cancel_inflight_requests()
        except ChannelError as error:
            log.debug("%s", error)
        self._endpoint = None
        with self._bell_fd_lock:
            os.close(self._bell)
            self._bell = -1

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _number(self) -> Any:
        tag, self._next_tag = self._next_tag, self._next_tag + 1
        return self._ucx.tag(tag)

    def _expect(self, index: int, size: int) -> Any:
        with self._ucx.errors("UCX cannot receive"):
            return self._worker.tag_recv(self._ucx.array(self._slots[index % NUM_SLOTS][:size]), self._number())

    def _finish(self, request: Any, timeout_s: float) -> None:
        self.drive(lambda: request.completed, timeout_s)
        with self._ucx.errors("UCX broke off"):
            request.check_error()

    def _sleep(self, timeout_s: float) -> bool:
        """True if the watched socket has ended."""
        hangup = False
        for fd, event in self._poller.poll(timeout_s * 1000):
            if fd == self._bell:
                os.eventfd_read(fd)
            hangup = hangup or bool(event & _HANGUP)
        return hangup


def cut(views: Sequence[memoryview], size: int) -> Iterator[list[memoryview]]:
    """The same bytes as groups of views, each of `size` bytes in all; the last may be shorter."""
    group: list[memoryview] = []
    room = size
    for view in views:
        while len(view):
            group.append(view[:room])
            view, room = view[room:], room - len(group[-1])
            if not room:
                yield group
                group, room = [], size
    if group:
        yield group


def gather(views: Sequence[memoryview], into: memoryview) -> int:
    """Copy the views one after the other; the number of bytes."""
    at = 0
    for view in views:
        into[at : at + len(view)] = view
        at += len(view)
    return at


def scatter(data: memoryview, views: Sequence[memoryview]) -> None:
    """The reverse of gather."""
    at = 0
    for view in views:
        view[:] = data[at : at + len(view)]
        at += len(view)


def _load() -> Any:
    """Import ucxx, without what it does to UCX's environment (NIXL in this process would read it too)."""
    before = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
    try:
        return importlib.import_module("ucxx")
    except ImportError as error:
        raise ConfigError(
            f"the ucx channel needs ucxx ({error}): {pip_install('ucx')} (ucxx-cu13 beside a "
            "torch for CUDA 13), or leave `ucx` out of transport.channels"
        ) from error
    finally:
        for name in [name for name in os.environ if name.startswith("UCX_") and name not in before]:
            del os.environ[name]
