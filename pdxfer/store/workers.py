"""Threads for what is long and releases the GIL: copies, checksums, codecs. One pool a store.

A job is never left behind: it reads and writes memory that its caller owns (leases, reservations), so a cancelled
caller waits for it (milliseconds) before it goes on to release them.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from pdxfer.core.cpus import unpin_current_thread

INLINE_BYTES = 4 << 20
"""Half a millisecond of copying and checking; handing it to another thread and back costs 150 us."""

P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """`run` from the store's loop."""

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, "pdxfer-store", unpin_current_thread)

    async def run(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The job's result. Ends, also by cancellation, only after the job has."""
        future = asyncio.wrap_future(self._pool.submit(job, *args, **kwargs))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await _settled(future)
            raise

    async def run_sized(self, num_bytes: int, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `run`, of a job that touches so many bytes: a small one is done here and now, sooner than handed over."""
        if num_bytes <= INLINE_BYTES:
            return job(*args, **kwargs)
        return await self.run(job, *args, **kwargs)

    def close(self) -> None:
        """Wait for running jobs. Idempotent."""
        self._pool.shutdown(wait=True)


async def _settled(future: "asyncio.Future[T]") -> None:
    """Until it is done, however often we are cancelled meanwhile."""
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()  # seen
