"""What is copied from tier to tier in the background: one bounded queue and a few tasks a tier.

Filled by writing.py (saves going down, hits going up, write-back), never waited for by a request. A full queue drops,
counted; a copy whose source is gone when its turn comes is lost, counted.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pdxfer.store.base import Lease
from pdxfer.store.slot import TierSlot

log = logging.getLogger(__name__)

TASKS_A_LANE = 2


class SharedView:
    """Bytes that several copies read; `done` of the last one releases them. Any thread."""

    def __init__(self, view: memoryview, readers: int, release: Callable[[], None]) -> None:
        assert readers > 0
        self.view = view
        self._readers, self._release = readers, release
        self._lock = threading.Lock()

    def done(self) -> None:
        """One reader less."""
        with self._lock:
            self._readers -= 1
            last = self._readers == 0
        if last:
            self._release()

    @classmethod
    def of(cls, lease: Lease, readers: int) -> "SharedView":
        """Takes the lease over."""
        return cls(lease.view, readers, lease.release)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One value to be written into the lane's tier."""

    key: bytes
    tenant: str
    source: SharedView | None
    """A whole frame; None: read it from the front tier when the turn comes."""
    origin: TierSlot | None = None
    """Where `source` was read; whose value it is can be asked there."""
    why: str
    """Which counter: stored, promoted or written_back."""


class Lane:
    """The queue of one tier. Loop thread only; `start` on the loop, `close` gives everything back."""

    def __init__(self, slot: TierSlot, max_pending: int, copy: Callable[[TierSlot, Copy], Awaitable[None]]) -> None:
        self.slot = slot
        self._copy = copy
        self._queue: asyncio.Queue[Copy] = asyncio.Queue(max_pending)
        self._keys: set[bytes] = set()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pending(self) -> int:
        """Copies that have not ended."""
        return len(self._keys)

    @property
    def room(self) -> int:
        """Copies that can still be offered."""
        return self._queue.maxsize - self._queue.qsize()

    def start(self) -> None:
        """Begin to work."""
        self._tasks = [asyncio.create_task(self._work()) for _ in range(TASKS_A_LANE)]

    def offer(self, copy: Copy) -> bool:
        """Queue it, or drop it: the queue is full, or the key is on its way already. Takes its source over."""
        if copy.key in self._keys:
            _done(copy)
            return True
        try:
            self._queue.put_nowait(copy)
        except asyncio.QueueFull:
            self.slot.counts["dropped"] += 1
            _done(copy)
            return False
        self._keys.add(copy.key)
        return True

    async def drain(self, timeout_s: float) -> None:
        """Until nothing is pending, or the time is over."""
        join = asyncio.ensure_future(self._queue.join())
        try:
            await asyncio.wait((join,), timeout=timeout_s)
        finally:
            join.cancel()

    async def close(self) -> None:
        """Stop, and give back what was queued. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks = []
        while not self._queue.empty():
            copy = self._queue.get_nowait()
            self.slot.counts["dropped"] += 1
            self._ended(copy)

    async def _work(self) -> None:
        while True:
            copy = await self._queue.get()
            try:
                await self._copy(self.slot, copy)
            except Exception:  # one bad copy must not end the lane: reported, and the next one is tried
                log.exception("store: copying chunk %s to tier %s failed", copy.key.hex()[:12], self.slot.name)
                self.slot.counts["raised"] += 1
            finally:
                self._ended(copy)

    def _ended(self, copy: Copy) -> None:
        self._keys.discard(copy.key)
        _done(copy)
        self._queue.task_done()


def _done(copy: Copy) -> None:
    if copy.source is not None:
        copy.source.done()
