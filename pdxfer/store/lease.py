"""Leases and reservations of tiers that have no memory of their own: a bounded pool lends them buffers.

Used by disk and remote tiers: `BufferPool` bounds the bytes in flight, `BufferLease` shows a value that was read into a
buffer, `BufferReservation` collects one that will be written from it. Buffers are page-aligned (O_DIRECT) and reused.
"""

import asyncio
import mmap
import threading
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from pdxfer.memory.segment import private_map
from pdxfer.store.base import Buffer, Outcome
from pdxfer.store.bell import Bell
from pdxfer.store.counters import TierCounters

_CLASSES_PER_DOUBLING = 4


def rounded_bytes(num_bytes: int) -> int:
    """Size of the buffer that carries `num_bytes`: whole pages, four sizes a doubling, so freed buffers fit again."""
    pages = max(1, -(-num_bytes // mmap.PAGESIZE))
    step = max(1, (1 << pages.bit_length() - 1) // _CLASSES_PER_DOUBLING)
    return -(-pages // step) * step * mmap.PAGESIZE


def copy_parts(view: memoryview, parts: Sequence[Buffer]) -> None:
    """Concatenate `parts` into `view`, which is exactly as long. One copy."""
    at = 0
    for part in parts:
        flat = memoryview(part).cast("B")
        view[at : at + flat.nbytes] = flat
        at += flat.nbytes
    assert at == len(view), (at, len(view))


def total_bytes(parts: Sequence[Buffer]) -> int:
    """Length of the concatenation."""
    return sum(memoryview(part).nbytes for part in parts)


class Once:
    """Tells the first caller from all later ones, whatever their threads."""

    def __init__(self) -> None:
        self._token = [True]

    @property
    def done(self) -> bool:
        """Whether the first call was."""
        return not self._token

    def first(self) -> bool:
        """True exactly once (list.pop is atomic)."""
        try:
            return self._token.pop()
        except IndexError:
            return False


class PooledBuffer:
    """One buffer out of the pool. `view` is as long as asked for, `block` whole pages; `give_back` once, any thread."""

    def __init__(self, pool: "BufferPool", block: mmap.mmap, num_bytes: int) -> None:
        self._pool = pool
        self._map = block
        self._once = Once()
        self.block = memoryview(block)
        self.view = self.block[:num_bytes]

    def give_back(self) -> None:
        """Return the memory; idempotent. Nobody may use the views any more."""
        if self._once.first():
            self._pool._give_back(self._map)


class BufferPool:
    """At most `max_bytes` of buffers, lent and idle together. `take` on the loop, `give_back` from any thread."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._idle_bytes = 0
        self._lent_bytes = 0
        self._returned = Bell()

    def __repr__(self) -> str:
        return f"<BufferPool lent={self._lent_bytes} idle={self._idle_bytes} of {self.max_bytes} B>"

    @property
    def lent_bytes(self) -> int:
        """Bytes out at this moment; 0 when everything came back."""
        return self._lent_bytes

    def fits(self, num_bytes: int) -> bool:
        """Whether a buffer of this size can be had at all."""
        return rounded_bytes(num_bytes) <= self.max_bytes

    def try_take(self, num_bytes: int) -> PooledBuffer | None:
        """A buffer now, or None."""
        size = rounded_bytes(num_bytes)
        with self._lock:
            if self._lent_bytes + size > self.max_bytes:
                return None
            self._lent_bytes += size
            idle = self._idle.get(size)
            if idle:
                self._idle_bytes -= size
                return PooledBuffer(self, idle.pop(), num_bytes)
            self._drop_idle()
        return PooledBuffer(self, private_map(size), num_bytes)

    async def take(self, num_bytes: int, timeout_s: float) -> PooledBuffer | None:
        """A buffer as soon as there is one; None: too large for the pool, or not within `timeout_s`."""
        if not self.fits(num_bytes):
            return None
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while True:
            rung = self._returned.rung
            if (buffer := self.try_take(num_bytes)) is not None:
                return buffer
            if not await self._returned.after(rung, end - loop.time()):
                return None

    def close(self) -> None:
        """Unmap idle buffers; lent ones go when they come back. Idempotent."""
        with self._lock:
            self.max_bytes = 0
            self._drop_idle()

    def _drop_idle(self) -> None:
        """Let go of idle buffers until lent + idle fit; the lock is held. Unmapped with the last view of them."""
        while self._idle_bytes and self._idle_bytes + self._lent_bytes > self.max_bytes:
            largest = max(size for size, blocks in self._idle.items() if blocks)
            self._idle[largest].pop()
            self._idle_bytes -= largest

    def _give_back(self, block: mmap.mmap) -> None:
        size = len(block)
        with self._lock:
            self._lent_bytes -= size
            self._idle.setdefault(size, []).append(block)
            self._idle_bytes += size
            self._drop_idle()
        self._returned.ring()


class BufferLease:
    """A value read into a pooled buffer. Implements base.Lease."""

    def __init__(self, buffer: PooledBuffer, counters: TierCounters) -> None:
        self._buffer = buffer
        self._view = buffer.view.toreadonly()
        self._counters = counters
        self._once = Once()
        counters.lease_opened()

    @property
    def view(self) -> memoryview:
        """The value, read-only."""
        return self._view

    def release(self) -> None:
        """Give the buffer back; idempotent, any thread."""
        if self._once.first():
            self._buffer.give_back()
            self._counters.lease_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class BufferReservation:
    """A value being collected in a pooled buffer; `write` stores it. Implements base.Reservation.

    A cancelled commit lets `write` finish in the background (it is bounded by the reservation's deadline), and only
    then returns the buffer: a thread may still be reading it.
    """

    def __init__(
        self, buffer: PooledBuffer, counters: TierCounters, write: Callable[[PooledBuffer], Awaitable[Outcome]]
    ) -> None:
        self._buffer = buffer
        self._write = write
        self._begun = Once()
        self._counters = counters
        counters.reservation_opened()

    @property
    def view(self) -> memoryview:
        """Writable, as long as was reserved."""
        return self._buffer.view

    async def commit(self) -> Outcome:
        """Write; once, and not after abort."""
        assert self._begun.first(), "commit of a reservation that has ended"
        task = asyncio.ensure_future(self._write(self._buffer))
        task.add_done_callback(self._written)
        return await asyncio.shield(task)

    def abort(self) -> None:
        """Give the buffer back unless commit has begun; idempotent, any thread."""
        if self._begun.first():
            self._end()

    def _written(self, task: "asyncio.Future[Outcome]") -> None:
        self._end()
        if not task.cancelled():
            task.exception()  # seen: if commit was cancelled nobody else asks for it

    def _end(self) -> None:
        self._buffer.give_back()
        self._counters.reservation_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
