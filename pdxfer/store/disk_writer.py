"""Puts of a local tier: claim the key, find room, write in a thread, make visible. See disk_local.py."""

import asyncio
from collections.abc import Sequence
from functools import partial

from pdxfer.store.base import Buffer, Outcome
from pdxfer.store.disk_index import Record, kept_tenant
from pdxfer.store.disk_jobs import all_within
from pdxfer.store.disk_reservation import LocalReservation
from pdxfer.store.disk_shelf import Shelf
from pdxfer.store.lease import BufferPool, PooledBuffer, total_bytes


class Writer:
    """One key has one writer at a time; the others wait for it. Loop side."""

    def __init__(self, shelf: Shelf, pool: BufferPool) -> None:
        self._shelf = shelf
        self._pool = pool
        self._clock = shelf.clock
        self._writing: dict[bytes, asyncio.Future[None]] = {}
        self._growth: asyncio.Task[bool] | None = None

    async def put(self, key: bytes, parts: Sequence[Buffer], deadline: float, tenant: str) -> Outcome:
        """One copy, into an aligned buffer, in the worker thread."""
        claimed = await self._claim(key, total_bytes(parts), deadline, tenant)
        if isinstance(claimed, Outcome):
            return claimed
        record, buffer = claimed
        return await self._write(record, buffer, [memoryview(part).cast("B") for part in parts], deadline)

    async def reserve(self, key: bytes, num_bytes: int, deadline: float, tenant: str) -> LocalReservation | Outcome:
        """Room on the medium, and a buffer to fill; written without a copy."""
        claimed = await self._claim(key, num_bytes, deadline, tenant)
        if isinstance(claimed, Outcome):
            return claimed
        record, buffer = claimed
        return LocalReservation(
            buffer,
            self._shelf.counters,
            write=lambda: self._write(record, buffer, (), deadline),
            abandon=partial(self._end, record),
        )

    # -- steps ------------------------------------------------------------------------------------------------------

    async def _claim(
        self, key: bytes, num_bytes: int, deadline: float, tenant: str
    ) -> tuple[Record, PooledBuffer] | Outcome:
        """The key, room and a buffer are ours; or why not."""
        record = Record(key=key, num_bytes=num_bytes, tenant=kept_tenant(tenant), created_wall=self._clock.wall())
        while (outcome := self._refused(record, deadline)) is None and (writer := self._writing.get(key)) is not None:
            if not await all_within((writer,), self._left(deadline)):
                return Outcome.LATE
        if outcome is not None:
            return outcome
        self._writing[key] = asyncio.get_running_loop().create_future()
        buffer = None
        try:
            outcome = await self._find_room(record, deadline)
            if outcome is None:
                buffer = await self._pool.take(num_bytes, self._left(deadline))
        finally:
            if buffer is None:
                self._end(record)
        if buffer is not None:
            return record, buffer
        if outcome is None:
            self._shelf.counters.failed("no_buffer")
        return outcome or Outcome.LATE

    def _refused(self, record: Record, deadline: float) -> Outcome | None:
        """What can be said without waiting."""
        shelf = self._shelf
        if shelf.closed:
            return Outcome.FAILED
        if self._left(deadline) <= 0:
            return Outcome.LATE
        if not shelf.usable():
            return Outcome.FAILED
        fits = record.num_bytes <= shelf.medium.room_bytes and self._pool.fits(record.num_bytes)
        if not fits or shelf.index.never_fits(record.tenant, record.num_bytes):
            return Outcome.TOO_LARGE
        wall = self._clock.wall()
        shelf.expire(wall)
        return Outcome.ALREADY if shelf.index.find(record.key, wall) is not None else None

    async def _find_room(self, record: Record, deadline: float) -> Outcome | None:
        """Give `record` its place: free, by growing, or by evicting. None: done."""
        shelf, epoch, growth_failed = self._shelf, self._shelf.epoch, False
        while shelf.usable() and shelf.epoch == epoch:
            if self._left(deadline) <= 0:
                return Outcome.LATE
            shelf.expire(self._clock.wall())
            over_quota = shelf.index.over_quota(record.tenant, record.num_bytes)
            if not over_quota and shelf.medium.place(record):
                record.epoch = epoch
                shelf.index.placed(record)
                shelf.occupied()
                return None
            if not over_quota and shelf.medium.may_grow(self._clock.now()):
                growth = self._start_growth()
                if not await all_within((growth,), self._left(deadline)):
                    return Outcome.LATE
                growth_failed = not growth.result()
                continue
            victim = shelf.index.victim(self._clock.wall(), record.tenant if over_quota else None)
            if victim is not None:
                shelf.evict(victim)
            elif not shelf.busy:
                return Outcome.FAILED if growth_failed else Outcome.FULL
            elif not await shelf.room_comes(self._left(deadline)):
                return Outcome.FULL
        return Outcome.FAILED

    def _start_growth(self) -> "asyncio.Task[bool]":
        """Let the medium take more of its capacity into use, one step at a time."""
        if self._growth is None:
            self._growth = asyncio.ensure_future(self._grow(self._shelf.epoch))
        return self._growth

    async def _grow(self, epoch: int) -> bool:
        """One step; whether it succeeded. Over only when the next may begin: who waits for it must not find it again,
        done, and loop without ever yielding."""
        job = self._shelf.jobs.submit(self._shelf.medium.grow)
        await asyncio.wait((job,))
        self._growth = None
        failed = self._shelf.failed(job)
        if epoch == self._shelf.epoch:
            self._shelf.medium.grown(self._clock.now(), failed)
        return not failed

    async def _write(
        self, record: Record, buffer: PooledBuffer, parts: Sequence[memoryview], deadline: float
    ) -> Outcome:
        """Write in a thread. Past the deadline the value stays invisible; room and buffer come back with the thread."""
        gone = self._shelf.closed or record.epoch != self._shelf.epoch
        if gone or self._left(deadline) <= 0:
            buffer.give_back()
            self._end(record)
            return Outcome.FAILED if gone else Outcome.LATE
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Outcome] = loop.create_future()
        job = self._shelf.jobs.submit(self._shelf.medium.write, record, buffer.block, parts)
        job.add_done_callback(partial(self._written, record, buffer, done))
        timer = loop.call_later(self._left(deadline), self._too_late, record, done)
        try:
            return await done
        except asyncio.CancelledError:
            record.dead = record.dead or done.cancelled()
            raise
        finally:
            timer.cancel()

    def _too_late(self, record: Record, done: "asyncio.Future[Outcome]") -> None:
        """The deadline, and the thread has not ended."""
        if not done.done():
            record.dead = True
            self._shelf.counters.failed("late")
            done.set_result(Outcome.LATE)

    def _written(
        self, record: Record, buffer: PooledBuffer, done: "asyncio.Future[Outcome]", job: "asyncio.Future[None]"
    ) -> None:
        """The thread has ended."""
        buffer.give_back()
        shelf, outcome = self._shelf, Outcome.STORED
        if shelf.failed(job) or record.epoch != shelf.epoch:
            outcome = Outcome.FAILED
        elif record.dead or done.cancelled():
            outcome = Outcome.LATE
        else:
            shelf.index.add(record)
        self._end(record, written=True, stored=outcome is Outcome.STORED)
        shelf.counters.put_ended(outcome)
        if not done.done():
            done.set_result(outcome)

    def _end(self, record: Record, *, written: bool = False, stored: bool = False) -> None:
        """This writer is through with the key. What did not become visible gives its place back."""
        if record.epoch and not stored:
            record.dead = True
            if written and record.epoch == self._shelf.epoch:
                self._shelf.medium.erase(record)
            self._shelf.free(record)
        self._writing.pop(record.key).set_result(None)
        if record.epoch:
            self._shelf.released()

    def _left(self, deadline: float) -> float:
        return deadline - self._clock.now()
