"""A tier over a local medium: the asynchronous side of disk, lmdb and sqlite. Implements base.Tier.

Decides on the event loop (index, room, pins, deadlines) and moves bytes in the medium's worker threads, through aligned
buffers of a bounded pool; disk_writer.py has the puts, disk_shelf.py the state.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import Clock
from pdxfer.store.base import Buffer, Entry, Outcome, TierStats
from pdxfer.store.disk_index import FOREVER, Index, Record
from pdxfer.store.disk_jobs import all_within
from pdxfer.store.disk_medium import DamagedError, Medium
from pdxfer.store.disk_reservation import LocalReservation
from pdxfer.store.disk_shelf import Shelf
from pdxfer.store.disk_writer import Writer
from pdxfer.store.lease import BufferLease, BufferPool, PooledBuffer
from pdxfer.store.policy import PATIENCE_S

MAX_ERRORS = 3
"""Reads in a row that fail before a value is given up."""
MAX_OVERDUE = 3
"""Reads past their deadline whose threads have not ended: with so many a medium is known to hang."""


class LocalTier:
    """One medium. Methods on the event loop; `stats` and `take_evicted` from any thread."""

    def __init__(
        self,
        kind: str,
        medium: Medium,
        config: TierConfig,
        clock: Clock,
        *,
        capacity_bytes: int,
        buffer_bytes: int,
        tenant_quota: Mapping[str, int],
        pin_fraction: float,
    ) -> None:
        new_index: Callable[[], Index] = partial(
            Index,
            capacity_bytes=capacity_bytes,
            unit_bytes=medium.unit_bytes,
            tenant_quota=tenant_quota,
            pin_fraction=pin_fraction,
            ttl_s=config.ttl_s,
            eviction=config.eviction,
        )
        self.kind = kind
        self._capacity_bytes = capacity_bytes
        self._clock = clock
        self._medium = medium
        self._shelf = Shelf(kind, medium, clock, new_index)
        self._pool = BufferPool(buffer_bytes)
        self._writer = Writer(self._shelf, self._pool)

    def __repr__(self) -> str:
        return f"<LocalTier {self._shelf} {self._pool}>"

    async def open(self) -> None:
        await self._shelf.open()

    async def close(self) -> None:
        await self._shelf.close()
        self._pool.close()

    @property
    def hangs(self) -> bool:
        """Whether a further read would only wait for its deadline, and keep a buffer."""
        return len(self._shelf.overdue) >= MAX_OVERDUE

    def stats(self) -> TierStats:
        index = self._shelf.index
        return self._shelf.counters.stats(
            self.kind,
            used_bytes=index.used_bytes,
            capacity_bytes=self._capacity_bytes,
            num_values=len(index),
            pinned_bytes=index.pinned_bytes(self._clock.wall()),
            reachable=self._shelf.answers,
        )

    def take_evicted(self) -> list[bytes] | None:
        """See base.EvictionNotices."""
        return self._shelf.take_evicted()

    # -- without I/O ------------------------------------------------------------------------------------------------

    async def lookup(self, keys: Sequence[bytes], deadline: float) -> list[Entry | None]:
        if not self._answers(deadline):
            return [None] * len(keys)
        wall, index = self._clock.wall(), self._shelf.index
        found = [index.find(key, wall) for key in keys]
        return [None if record is None else index.entry(record, wall) for record in found]

    async def scan(self, after: bytes, limit: int, deadline: float) -> list[Entry]:
        return self._shelf.index.scan(after, limit, self._clock.wall()) if self._answers(deadline) else []

    # -- values -----------------------------------------------------------------------------------------------------

    async def put(self, key: bytes, parts: Sequence[Buffer], deadline: float, tenant: str = "") -> Outcome:
        return await self._writer.put(key, parts, deadline, tenant)

    async def reserve(
        self, key: bytes, num_bytes: int, deadline: float, tenant: str = ""
    ) -> LocalReservation | Outcome:
        return await self._writer.reserve(key, num_bytes, deadline, tenant)

    async def get(self, key: bytes, deadline: float) -> BufferLease | None:
        """Read into a buffer of the pool and check the digest; no other copy."""
        record = self._shelf.index.find(key, self._clock.wall()) if self._answers(deadline) else None
        lease = None if record is None else await self._read(record, deadline)
        self._shelf.counters.got(lease is not None)
        return lease

    async def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        records = self._find(keys, deadline)
        for record in records:
            self._shelf.remove(record)
        if records:
            await self._finish([self._shelf.jobs.submit(self._medium.flush)], deadline)
        return len(records)

    async def pin(self, keys: Sequence[bytes], ttl_s: float | None, deadline: float) -> int:
        wall = self._clock.wall()
        until = FOREVER if ttl_s is None else wall + ttl_s
        pinned = [record for record in self._find(keys, deadline) if self._shelf.index.pin(record, until, wall)]
        await self._finish([self._shelf.jobs.submit(self._medium.update, record) for record in pinned], deadline)
        return len(pinned)

    async def unpin(self, keys: Sequence[bytes], deadline: float) -> int:
        wall = self._clock.wall()
        pinned = [record for record in self._find(keys, deadline) if record.pin_until > wall]
        for record in pinned:
            self._shelf.index.unpin(record)
        await self._finish([self._shelf.jobs.submit(self._medium.update, record) for record in pinned], deadline)
        return len(pinned)

    # -- steps ------------------------------------------------------------------------------------------------------

    def _answers(self, deadline: float) -> bool:
        return self._clock.now() < deadline and self._shelf.usable()

    def _find(self, keys: Sequence[bytes], deadline: float) -> list[Record]:
        """Those of `keys` that are there, each once."""
        if not self._answers(deadline):
            return []
        wall = self._clock.wall()
        found = (self._shelf.index.find(key, wall) for key in dict.fromkeys(keys))
        return [record for record in found if record is not None]

    async def _finish(self, jobs: "list[asyncio.Future[None]]", deadline: float) -> None:
        """Wait for small writes; what fails is counted, the index is right already."""
        for job in jobs:
            job.add_done_callback(lambda job: self._shelf.failed(job) and None)
        await all_within(jobs, deadline - self._clock.now())

    async def _read(self, record: Record, deadline: float) -> BufferLease | None:
        """The value stays in its place until the thread has ended, whatever becomes of it or of us."""
        shelf = self._shelf
        record.readers += 1
        shelf.occupied()
        buffer = None
        try:
            buffer = await self._pool.take(record.num_bytes, deadline - self._clock.now())
        finally:
            if buffer is None:
                self._unread(record)
        if buffer is None:
            shelf.counters.failed("no_buffer")
            return None
        if shelf.closed or record.epoch != shelf.epoch:
            buffer.give_back()
            self._unread(record)
            return None
        loop = asyncio.get_running_loop()
        done: asyncio.Future[bool | None] = loop.create_future()
        job = shelf.jobs.submit(self._medium.read, record, buffer.block)
        job.add_done_callback(partial(self._was_read, record, buffer, done))
        left = deadline - self._clock.now()
        timer = loop.call_later(left, self._too_late, done, left >= PATIENCE_S)
        try:
            right = await done
        except asyncio.CancelledError:
            if not done.cancelled() and done.result():
                buffer.give_back()
            raise
        finally:
            timer.cancel()
        return BufferLease(buffer, shelf.counters) if right else None

    def _too_late(self, done: "asyncio.Future[bool | None]", patient: bool) -> None:
        """The deadline, and the thread has not ended: it keeps the buffer until it does."""
        if not done.done():
            self._shelf.counters.failed("late")
            if patient:
                self._shelf.overdue.add(done)
            done.set_result(None)

    def _was_read(
        self, record: Record, buffer: PooledBuffer, done: "asyncio.Future[bool | None]", job: "asyncio.Future[None]"
    ) -> None:
        """The thread has ended. The buffer is the caller's if the bytes are right and it still waits."""
        self._shelf.overdue.discard(done)
        right = self._judge(record, job)
        self._unread(record)
        if done.done() or not right:
            buffer.give_back()
        if not done.done():
            done.set_result(right)

    def _judge(self, record: Record, job: "asyncio.Future[None]") -> bool:
        """Whether the bytes are right; a damaged value goes, one that could not be read after MAX_ERRORS tries."""
        error = job.exception()
        is_known = not record.dead and record.epoch == self._shelf.epoch
        if isinstance(error, DamagedError):
            self._shelf.counters.failed(error.reason)
            record.errors = MAX_ERRORS
        elif self._shelf.failed(job):
            record.errors += 1
        else:
            record.errors = 0
            if is_known:
                self._shelf.index.used(record)
        if record.errors >= MAX_ERRORS and is_known:
            self._shelf.drop(record)
        return error is None

    def _unread(self, record: Record) -> None:
        record.readers -= 1
        if record.dead and not record.readers:
            self._shelf.free(record)
        self._shelf.released()
