"""The write half of the tiered store: a chunk goes into memory at once, from there to other tiers in the background.

    save ──► front tier (first in memory): reserve, copy + digest, commit ──► lanes: every `write: through` tier
                │ refused, or there is none                                    └─► `back`: when the front fills up
                └─► a copy of its own ──► lanes                  hits in slow tiers ──► lanes of faster ones (promote)

Bounded everywhere; what does not fit is dropped and counted. A `reserved` save (spill) is never dropped: it waits for
room until its deadline and says truthfully whether a tier that other engines read (reach.py) has the bytes.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from pdxfer.codec.frame import ForeignFrameError, FrameError, read_header
from pdxfer.core.clock import Clock
from pdxfer.store.base import Buffer, Lease, Outcome
from pdxfer.store.chunk import NewChunk, Saved, SaveResult
from pdxfer.store.events import EventLog
from pdxfer.store.lanes import Copy, Lane, SharedView
from pdxfer.store.policy import BreakerState, SecondSight
from pdxfer.store.reach import in_reach
from pdxfer.store.reading import Reader
from pdxfer.store.slot import TierSlot
from pdxfer.store.transcode import RAW, Transcoder
from pdxfer.store.workers import Workers
from pdxfer.store.writeback import WriteBack

log = logging.getLogger(__name__)

MAX_STAGED_BYTES = 256 << 20
"""Copies of chunks that no memory tier took, on their way to slower ones."""
MAX_PROMOTIONS = 8
"""Leases of slow tiers that wait in one lane: their buffers are few."""
HELD = (Outcome.STORED, Outcome.ALREADY)


class Writer:
    """Saves, promotions and write-back of one store. Loop thread only."""

    def __init__(
        self,
        slots: Sequence[TierSlot],
        coder: Transcoder,
        workers: Workers,
        events: EventLog,
        clock: Clock,
        reader: Reader,
        max_pending: int,
        second_sight: bool,
    ) -> None:
        self._slots, self._coder, self._workers = slots, coder, workers
        self._events, self._clock, self._reader = events, clock, reader
        self._max_pending = max_pending
        self._saving = 0
        self._staged_bytes = 0
        self._sight = SecondSight() if second_sight else None
        self.front = next((s for s in slots if s.in_memory and s.codec == RAW and s.config.write == "through"), None)
        self.lanes = {slot.name: Lane(slot, max_pending, self._copy) for slot in slots}
        back = [slot for slot in slots if slot.config.write == "back"]
        self.unlisted = {slot.name for slot in slots if slot.local}
        """Local tiers whose keys have to be listed: not done yet, or they evicted more than they remember."""
        self._back = WriteBack(slot.name for slot in back if self.front is not None)
        self.counts: Counter[str] = Counter()
        """saves by outcome (Saved)."""

    def start(self) -> None:
        """Begin to work; on the loop."""
        for lane in self.lanes.values():
            lane.start()

    @property
    def pending(self) -> int:
        """Chunks on their way into some tier."""
        return self._saving + sum(lane.pending for lane in self.lanes.values())

    @property
    def staged_bytes(self) -> int:
        """Memory of our own that waits to be written."""
        return self._staged_bytes

    # ---- save --------------------------------------------------------------------------------------------------------

    async def save(self, chunk: NewChunk, deadline: float, tenant: str, reserved: bool) -> SaveResult:
        """As TieredStore.save."""
        self._saving += 1
        try:
            if reserved:
                result = await self._save_surely(chunk, deadline, tenant)
            elif self._sight is not None and not self._sight.admits(chunk.key):
                result = SaveResult(outcome=Saved.SKIPPED)
            elif self._saving > self._max_pending:
                result = SaveResult(outcome=Saved.DROPPED)
            else:
                result = await self._save(chunk, deadline, tenant)
        finally:
            self._saving -= 1
        self.counts[result.outcome.value] += 1
        return result

    async def _save(self, chunk: NewChunk, deadline: float, tenant: str) -> SaveResult:
        said: dict[str, Outcome] = {}
        if self.front is not None:
            outcome = said[self.front.name] = await self._into_front(self.front, chunk, deadline, tenant)
            if outcome in HELD:
                self._send_down(chunk.key, tenant)
                return _held(outcome, said)
        return await self._stage(chunk, tenant, said)

    async def _save_surely(self, chunk: NewChunk, deadline: float, tenant: str) -> SaveResult:
        """The first tier that others read from and that takes it, whatever its write policy; what it has already counts
        only if it is right."""
        said: dict[str, Outcome] = {}
        frame: memoryview | None = None
        for slot in in_reach(self._slots):
            if not slot.readable or self._clock.now() >= deadline:
                continue
            for _ in range(2):
                if slot is self.front:
                    outcome = await self._into_front(slot, chunk, deadline, tenant)
                else:
                    if frame is None:
                        frame = await self._workers.run(self._coder.raw_frame, chunk)
                    outcome = await self.put_frame(slot, chunk.key, frame, deadline, tenant)
                said[slot.name] = outcome
                if outcome is Outcome.STORED:
                    self._events.flush()  # another node is about to be told that it can read it
                    return _held(outcome, said)
                if outcome is not Outcome.ALREADY:
                    break
                if await self._reader.check(slot, chunk.key, deadline) is not None:
                    return _held(outcome, said)
        return SaveResult(outcome=Saved.FAILED, tiers=said)

    async def _into_front(self, front: TierSlot, chunk: NewChunk, deadline: float, tenant: str) -> Outcome:
        """Reserve, fill in a worker thread, commit."""
        size = self._coder.raw_frame_bytes(chunk)
        room = await front.reserve(chunk.key, size, deadline, tenant)
        if isinstance(room, Outcome):
            front.counts[room.value] += 1
            return room
        async with room:
            await self._workers.run_sized(size, self._coder.fill_raw, room.view, chunk)
            outcome = await front.commit(room, deadline)
        if outcome is Outcome.STORED:
            self.arrived(front, [chunk.key])
            front.note_codec(chunk.key, RAW)
            self._back.add(chunk.key, tenant)
        return outcome

    def _send_down(self, key: bytes, tenant: str) -> None:
        """The front has it: every other `through` tier that has not, gets it from there."""
        for slot in self._takers(key):
            self.lanes[slot.name].offer(Copy(key=key, tenant=tenant, source=None, why="stored"))

    def _takers(self, key: bytes) -> list[TierSlot]:
        """Tiers that a save should reach beyond the front: they write, lack the key, and their admission takes it."""
        return [
            slot
            for slot in self._slots
            if slot is not self.front
            and (slot.config.write == "through" or (slot.config.write == "back" and self.front is None))
            and not self._events.holds(slot.name, key)
            and (not slot.config.admit_second_sight or slot.sight.admits(key))
        ]

    async def _stage(self, chunk: NewChunk, tenant: str, said: dict[str, Outcome]) -> SaveResult:
        """No memory tier has it: one copy of our own for all lanes, so that the caller's blocks are free."""
        takers = self._takers(chunk.key)
        size = self._coder.raw_frame_bytes(chunk)
        if not takers:
            return SaveResult(outcome=Saved.FAILED if said else Saved.SKIPPED, tiers=said)
        if self._staged_bytes + size > MAX_STAGED_BYTES:
            return SaveResult(outcome=Saved.DROPPED, tiers=said)
        self._staged_bytes += size
        try:
            frame = await self._workers.run(self._coder.raw_frame, chunk)
        except BaseException:
            self._staged_bytes -= size
            raise

        def release() -> None:
            self._staged_bytes -= size

        source = SharedView(frame, len(takers), release)
        offered = [
            self.lanes[slot.name].offer(Copy(key=chunk.key, tenant=tenant, source=source, why="stored"))
            for slot in takers
        ]
        return SaveResult(outcome=Saved.QUEUED if any(offered) else Saved.DROPPED, tiers=said)

    # ---- promotion and write-back ------------------------------------------------------------------------------------

    def promote(self, source: TierSlot, key: bytes, lease: Lease, tenant: str) -> None:
        """A hit in a slow tier: into every faster one that writes through and lacks it. Takes the lease over."""
        faster = self._slots[: self._slots.index(source)]
        takers = [
            slot
            for slot in faster
            if slot.config.write == "through"
            and not self._events.holds(slot.name, key)
            and (not slot.config.admit_second_sight or slot.sight.admits(key))
        ]
        if not takers:
            lease.release()
            return
        shared = SharedView.of(lease, len(takers))
        for slot in takers:
            lane = self.lanes[slot.name]
            if lane.pending >= MAX_PROMOTIONS:
                slot.counts["dropped"] += 1
                shared.done()
            else:
                lane.offer(Copy(key=key, tenant=tenant, source=shared, origin=source, why="promoted"))

    def arrived(self, slot: TierSlot, keys: Sequence[bytes]) -> None:
        """Values came into a tier. What it evicted before is said first: a key may have left and come back."""
        self.take_evictions(slot)
        self._events.add(slot.name, keys)

    def take_evictions(self, slot: TierSlot) -> None:
        """Note what a tier dropped by itself."""
        evicted = slot.take_evicted()
        if evicted is None:
            self.unlisted.add(slot.name)
        elif evicted:
            self._events.evict(slot.name, evicted)
            if slot is self.front:
                for name, lost in self._back.drop(evicted).items():
                    self.lanes[name].slot.counts["lost"] += lost

    def forget(self, keys: Iterable[bytes]) -> None:
        """They were cleared from memory: not written back any more."""
        self._back.drop(keys)

    def write_back(self, everything: bool = False) -> bool:
        """Give `back` tiers the oldest of what only memory has, while that is fuller than it should be. Whether there
        was something to give, to a tier that takes it now."""
        if self.front is None:
            return False
        is_given = False
        for name in self._back.due(self.front.tier.stats(), everything):
            lane = self.lanes[name]
            for key, tenant in self._back.take(name, min(lane.room, lane.slot.writes_at_once)):
                is_given = True
                if not lane.slot.config.admit_second_sight or lane.slot.sight.admits(key):
                    lane.offer(Copy(key=key, tenant=tenant, source=None, why="written_back"))
        return is_given

    @property
    def num_dirty(self) -> int:
        """Chunks that only memory has and a `back` tier should get."""
        return self._back.num_dirty

    # ---- one copy ----------------------------------------------------------------------------------------------------

    async def _copy(self, slot: TierSlot, copy: Copy) -> None:
        """Work of a lane: the value into its tier, in its codec."""
        deadline = self._clock.now() + slot.config.put_timeout_s
        if copy.source is not None:
            tenant = copy.tenant
            if not tenant and copy.origin is not None and copy.origin.local:
                tenant = await copy.origin.tenant_of(copy.key, deadline)
            outcome = await self.put_frame(slot, copy.key, copy.source.view, deadline, tenant)
        else:
            assert self.front is not None
            lease = await self.front.get(copy.key, deadline)
            if lease is None:
                slot.counts["lost"] += 1
                return
            async with lease:
                outcome = await self.put_frame(slot, copy.key, lease.view, deadline, copy.tenant)
        if outcome is Outcome.STORED and copy.why != "stored":
            slot.counts[copy.why] += 1
        elif copy.why == "written_back" and outcome in (Outcome.FAILED, Outcome.LATE):
            self._keep_dirty(slot, copy)

    def _keep_dirty(self, slot: TierSlot, copy: Copy) -> None:
        """A tier that is stopped gets it when it is back, if memory has it then."""
        is_there = self.front is not None and self._events.holds(self.front.name, copy.key)
        if is_there and slot.writes.state is not BreakerState.CLOSED:
            self._back.put_back(slot.name, copy.key, copy.tenant)

    async def bring(
        self, key: bytes, sources: Sequence[TierSlot], target: TierSlot, deadline: float, tenant: str
    ) -> Outcome | None:
        """Copy one value from the first source that has it intact, and wait for it. None: no source has it, or it is
        another model's."""
        for source in sources:
            lease = await source.get(key, deadline)
            if lease is None:
                continue
            async with lease:
                try:
                    await self._workers.run(self._coder.check, lease.view, key)
                except ForeignFrameError:
                    continue
                except FrameError as error:
                    why = str(error)
                else:
                    whose = tenant or await source.tenant_of(key, deadline)
                    return await self.put_frame(target, key, lease.view, deadline, whose)
            await self._reader.distrust(source, key, why)
        return None

    async def put_frame(self, slot: TierSlot, key: bytes, frame: memoryview, deadline: float, tenant: str) -> Outcome:
        """A frame of any codec into a tier, in that tier's codec."""
        try:
            parts: Sequence[Buffer] = (frame,)
            if read_header(frame).codec != slot.codec:
                parts = await self._workers.run(self._coder.recode, frame, key, slot.codec, slot.config.level)
        except FrameError as error:
            log.warning("store: chunk %s is not copied to tier %s: %s", key.hex()[:12], slot.name, error)
            slot.counts["unreadable"] += 1
            return Outcome.FAILED
        outcome = await slot.put(key, parts, deadline, tenant)
        if outcome in HELD:
            self.arrived(slot, [key])
        if outcome is Outcome.STORED:
            slot.note_codec(key, slot.codec)
        return outcome

    async def quiet(self, deadline: float) -> None:
        """Until what is on its way into tiers now is there, or the deadline: what is cleared then stays away."""
        for lane in self.lanes.values():
            await lane.drain(max(0.0, deadline - self._clock.now()))

    async def drain(self, deadline: float) -> None:
        """Write back everything and wait for the lanes, until the deadline."""
        while self.pending or self.num_dirty:
            if self._clock.now() >= deadline:
                return
            if not self.write_back(everything=True) and not self.pending:
                return  # what is left would go to tiers that take nothing now
            await self.quiet(deadline)
            await asyncio.sleep(0.001 if self._saving else 0)

    async def close(self) -> None:
        """Stop the lanes; what they had queued is dropped. Idempotent."""
        for lane in self.lanes.values():
            await lane.close()


def _held(outcome: Outcome, said: dict[str, Outcome]) -> SaveResult:
    return SaveResult(outcome=Saved.HELD if outcome is Outcome.STORED else Saved.ALREADY, tiers=said)
