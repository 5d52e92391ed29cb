"""One medium with its index: whether it is there, what is on it, who is reading. Loop side, shared by the writer, the
reader and the tier itself (disk_local.py).

A value's room is given out again only when no thread reads or writes it any more. When the medium is lost, everything
on it is a miss; the next calls open it again, once the threads that still hold the old files have ended.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

from pdxfer.core.clock import Clock
from pdxfer.core.errors import ConfigError
from pdxfer.store.counters import TierCounters
from pdxfer.store.disk_files import reason_of
from pdxfer.store.disk_index import Index, Record
from pdxfer.store.disk_jobs import Jobs, all_within
from pdxfer.store.disk_medium import Medium

log = logging.getLogger(__name__)

CHECK_S = 1.0
"""While it is used the medium is looked at this often: are its files still there?"""
RETRY_S = 1.0
"""A lost medium is opened again at this interval."""
CLOSE_S = 10.0
"""close waits this long for threads that a hung disk holds."""
MAX_NOTICES = 65536


class Shelf:
    """See above. Everything but `take_evicted` belongs to the event loop."""

    def __init__(self, kind: str, medium: Medium, clock: Clock, new_index: Callable[[], Index]) -> None:
        self.kind = kind
        self.medium = medium
        self.clock = clock
        self.index = new_index()
        self.counters = TierCounters()
        self.jobs = Jobs(medium.threads, f"pdxfer-{kind}")
        self.attached = self.closed = False
        self.epoch = 1
        """Counts attachments; a record of an older one has no room to give back."""
        self.busy = 0
        """Values being read, and places given to values not yet visible: room that will come by itself."""
        self.overdue: set[asyncio.Future[Any]] = set()
        """Reads that had time enough and whose threads have not ended."""
        self._new_index = new_index
        self._check_at = self._retry_at = 0.0
        self._recovery: asyncio.Task[None] | None = None
        self._room_came: asyncio.Future[None] | None = None
        self._lock = threading.Lock()
        self._evicted: list[bytes] | None = []

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open" if self.attached else "lost"
        return f"<Shelf {self.kind} {state} values={len(self.index)} {self.medium}>"

    @property
    def answers(self) -> bool:
        """It is there, and no read hangs in it."""
        return self.attached and not self.overdue

    # -- is it there ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Attach. ConfigError is the caller's; a medium that cannot be had now is tried again later."""
        try:
            await self._attach()
        except OSError as error:
            self._not_there(error)

    async def close(self) -> None:
        """Let running threads end, then detach. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._tell_room()
        if self._recovery is not None:
            await all_within((self._recovery,), CLOSE_S)
        if await self.jobs.idle(CLOSE_S):
            await asyncio.shield(self.jobs.submit(self.medium.close))
        else:
            log.warning("%s tier: threads still hang in its medium after %g s; they are left behind", self, CLOSE_S)
        self.attached = False
        self.jobs.close()

    def usable(self) -> bool:
        """Whether to ask the medium now. Starts what finds out: a check while it is there, else a new open."""
        if self.closed:
            return False
        now = self.clock.now()
        if self.attached:
            if now >= self._check_at:
                self._check_at = now + CHECK_S
                self.jobs.submit(self.medium.check).add_done_callback(self._checked)
        elif now >= self._retry_at and self._recovery is None:
            self._recovery = asyncio.ensure_future(self._recover())
        return self.attached

    def doubt(self) -> None:
        """A call failed: check before the next."""
        self._check_at = 0.0

    # -- what is on it ----------------------------------------------------------------------------------------------

    def expire(self, wall: float) -> None:
        """Values beyond their ttl go."""
        for record in self.index.expired(wall):
            self.drop(record)

    def evict(self, record: Record) -> None:
        """`record` goes to make room."""
        self.counters.evicted()
        self.drop(record)

    def drop(self, record: Record) -> None:
        """`record` goes without being asked to: the store is told."""
        self._notice(record.key)
        self.remove(record)

    def remove(self, record: Record) -> None:
        """Not visible any more; erased with the next write, its room free when nobody reads it."""
        self.index.remove(record)
        self.medium.erase(record)
        if not record.readers:
            self.free(record)

    def free(self, record: Record) -> None:
        """Its room may be given out again."""
        assert record.dead and not record.readers, record
        if record.epoch == self.epoch:
            self.medium.free(record)
            self.index.freed(record)
        self._tell_room()

    def occupied(self) -> None:
        """A read begins, or a place was given."""
        self.busy += 1

    def released(self) -> None:
        """It ended."""
        self.busy -= 1
        self._tell_room()

    async def room_comes(self, timeout_s: float) -> bool:
        """Wait until some room came back, or nothing can be had any more; False: not in time."""
        if self._room_came is None:
            self._room_came = asyncio.get_running_loop().create_future()
        return await all_within((self._room_came,), timeout_s)

    def failed(self, job: "asyncio.Future[None]") -> bool:
        """Whether a job failed; counted, and the medium is doubted."""
        error = job.exception()
        if isinstance(error, OSError):
            self.counters.failed(reason_of(error))
            self.doubt()
        elif error is not None:
            self.counters.failed("bug")
            log.error("%s tier: a worker failed in our own code; please report", self.kind, exc_info=error)
        return error is not None

    def take_evicted(self) -> list[bytes] | None:
        """See base.EvictionNotices."""
        with self._lock:
            taken, self._evicted = self._evicted, []
        return taken

    # -- steps ------------------------------------------------------------------------------------------------------

    async def _attach(self) -> None:
        records = await asyncio.shield(self.jobs.submit(self.medium.open))
        self.index = self._new_index()
        for record in records:
            record.epoch = self.epoch
            self.index.placed(record)
            self.index.add(record)
        for reason, times in self.medium.take_damage().items():
            for _ in range(times):
                self.counters.failed(reason)
        self._check_at = self.clock.now() + CHECK_S
        self.attached = True

    async def _recover(self) -> None:
        """Open again, after every thread that may hold the old files has ended. Nobody knows what is on it then."""
        try:
            if await self.jobs.idle(RETRY_S) and not self.closed:
                await self.jobs.submit(self.medium.close)
                await self._attach()
                self._notice(None)
                log.warning("%s tier: back, with %d values", self.kind, len(self.index))
        except (OSError, ConfigError) as error:
            self._retry_at = self.clock.now() + RETRY_S
            log.debug("%s tier: still away: %s", self.kind, error)
        finally:
            self._recovery = None

    def _checked(self, job: "asyncio.Future[None]") -> None:
        error = job.exception()
        if isinstance(error, OSError) and self.attached:
            self._not_there(error)
            self.epoch += 1
            self.index = self._new_index()
            self._notice(None)
            self._tell_room()

    def _not_there(self, error: OSError) -> None:
        self.attached = False
        self._retry_at = self.clock.now() + RETRY_S
        self.counters.failed(reason_of(error))
        log.warning("%s tier: not there, everything is a miss until it is back: %s", self.kind, error)

    def _notice(self, key: bytes | None) -> None:
        with self._lock:
            if key is None or (self._evicted is not None and len(self._evicted) >= MAX_NOTICES):
                self._evicted = None
            elif self._evicted is not None:
                self._evicted.append(key)

    def _tell_room(self) -> None:
        came, self._room_came = self._room_came, None
        if came is not None and not came.done():
            came.set_result(None)
