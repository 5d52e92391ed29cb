"""Threads in which a local tier touches its medium, and waiting for them with a deadline."""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from pdxfer.core.cpus import unpin_current_thread

P = ParamSpec("P")
T = TypeVar("T")


class Jobs:
    """Runs blocking calls and knows how many are out. Not bounded itself: a job holds a buffer of a bounded pool."""

    def __init__(self, num_threads: int, name: str) -> None:
        self.running = 0
        self._pool = ThreadPoolExecutor(num_threads, name, unpin_current_thread)
        self._idle: list[asyncio.Future[None]] = []

    def submit(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "asyncio.Future[T]":
        """Start it. The future is not cancelled by us: a thread cannot be recalled."""
        self.running += 1
        future = asyncio.wrap_future(self._pool.submit(job, *args, **kwargs))
        future.add_done_callback(self._ended)
        return future

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no job is out; whether that is so."""
        if self.running:
            idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(idle)
            await asyncio.wait((idle,), timeout=timeout_s)
        return not self.running

    def close(self) -> None:
        """No more jobs; does not wait. Idempotent."""
        self._pool.shutdown(wait=False)

    def _ended(self, future: "asyncio.Future[Any]") -> None:
        self.running -= 1
        if not future.cancelled():
            future.exception()  # seen: who asked may be gone
        if not self.running:
            idle, self._idle = self._idle, []
            for waiting in idle:
                if not waiting.done():
                    waiting.set_result(None)


async def all_within(futures: Iterable["asyncio.Future[Any]"], timeout_s: float) -> bool:
    """Whether all were done in time; they are not cancelled if not."""
    waiting = [future for future in futures if not future.done()]
    if waiting and timeout_s > 0:
        _done, late = await asyncio.wait(waiting, timeout=timeout_s)
        return not late
    return not waiting
