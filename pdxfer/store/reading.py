"""The read half of the tiered store: tier by tier, fastest first, every frame verified before a byte of it is used.

What is wrong in a tier (damaged, cut, swapped, foreign) is counted, removed from that tier, and asked of the next one.
Chunks of one tier are read in runs: all gets of a run are out at once, then one job in a worker thread verifies,
decodes and delivers them.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdxfer.codec.frame import ForeignFrameError, FrameError, FrameHeader
from pdxfer.core.clock import Clock
from pdxfer.store.base import Entry, Lease
from pdxfer.store.chunk import Chunk, Found, Loaded, Prefix, Sink, Wanted
from pdxfer.store.events import EventLog
from pdxfer.store.slot import TierSlot
from pdxfer.store.transcode import Transcoder
from pdxfer.store.workers import Workers

log = logging.getLogger(__name__)

MAX_RUN = 16
"""Chunks of one run ..."""
MAX_RUN_BYTES = 32 << 20
"""... and their bytes."""
RUNS_AT_ONCE = 2
"""While one is verified the next one is read."""
DELETE_TIMEOUT_S = 2.0

Promote = Callable[[TierSlot, bytes, Lease, str], None]
"""(from, key, lease, tenant): takes the lease over."""


@dataclass(slots=True)
class _Load:
    """One load in progress."""

    wanted: Sequence[Wanted]
    sink: Sink
    deadline: float
    tenant: str
    delivered: dict[int, str] = field(default_factory=dict)
    num_bytes: int = 0


class Reader:
    """Lookups and loads over the slots of one store. Loop thread only."""

    def __init__(
        self,
        slots: Sequence[TierSlot],
        coder: Transcoder,
        workers: Workers,
        events: EventLog,
        clock: Clock,
    ) -> None:
        self._slots, self._coder, self._workers = slots, coder, workers
        self._events, self._clock = events, clock
        self.promote: Promote = lambda slot, key, lease, tenant: lease.release()
        """What to do with the lease of a hit in a slow tier; the store puts its writer here."""
        self.counts: Counter[str] = Counter()
        """lookups, loads, chunks_found, chunks_loaded, chunks_missed."""

    # ---- lookup ------------------------------------------------------------------------------------------------------

    async def lookup(self, keys: Sequence[bytes], deadline: float) -> Prefix:
        """Memory first; what it lacks is asked of all other tiers at once."""
        self.counts["lookups"] += 1
        found: list[Found | None] = [None] * len(keys)
        complete = True
        memory = [slot for slot in self._slots if slot.in_memory]
        for slots in (memory, [slot for slot in self._slots if not slot.in_memory]):
            missing = [i for i, have in enumerate(found) if have is None]
            if missing and slots:
                complete &= await self._ask(slots, keys, missing, found, deadline)
        end = next((i for i, have in enumerate(found) if have is None), len(keys))
        self.counts["chunks_found"] += end
        return Prefix(found=tuple(have for have in found[:end] if have is not None), complete=complete)

    async def _ask(
        self,
        slots: Sequence[TierSlot],
        keys: Sequence[bytes],
        missing: Sequence[int],
        found: list[Found | None],
        deadline: float,
    ) -> bool:
        asked = [keys[i] for i in missing]
        answers = await asyncio.gather(*(slot.lookup(asked, deadline) for slot in slots))
        for slot, entries in zip(slots, answers, strict=True):
            if entries is None:
                continue
            for i, entry in zip(missing, entries, strict=True):
                if entry is None:
                    if self._clock.now() < deadline:
                        self._absent(slot, keys[i])
                elif found[i] is None:
                    found[i] = Found(tier=slot.name, entry=entry)
                    self._events.add(slot.name, (keys[i],))
        return all(entries is not None for entries in answers)

    async def where(self, keys: Sequence[bytes], deadline: float) -> dict[str, list[Entry | None] | None]:
        """What each tier says to all keys; None: no answer."""
        answers = await asyncio.gather(*(slot.lookup(keys, deadline) for slot in self._slots))
        return {slot.name: answer for slot, answer in zip(self._slots, answers, strict=True)}

    # ---- load --------------------------------------------------------------------------------------------------------

    async def load(
        self, wanted: Sequence[Wanted], sink: Sink, deadline: float, start_chunk: int, tenant: str
    ) -> Loaded:
        """Deliver as many of wanted[start_chunk:] as the tiers have and the deadline allows."""
        self.counts["loads"] += 1
        load = _Load(wanted, sink, deadline, tenant)
        remaining = list(range(start_chunk, len(wanted)))
        for slot in self._slots:
            if not remaining or self._clock.now() >= deadline:
                break
            if slot.readable:
                await self._pass(load, slot, remaining)
                remaining = [i for i in remaining if i not in load.delivered]
        self.counts["chunks_loaded"] += len(load.delivered)
        self.counts["chunks_missed"] += len(remaining)
        return Loaded(
            delivered=frozenset(load.delivered),
            tiers=load.delivered,
            num_bytes=load.num_bytes,
            late=bool(remaining) and self._clock.now() >= deadline,
        )

    async def _pass(self, load: _Load, slot: TierSlot, indexes: list[int]) -> None:
        """Everything this tier can deliver. Ends, also when cancelled, only after the last sink call."""
        gate = asyncio.Semaphore(RUNS_AT_ONCE)

        async def one(run: list[int]) -> None:
            async with gate:
                if slot.readable and self._clock.now() < load.deadline:
                    await self._run(load, slot, run)

        tasks = [asyncio.create_task(one(run)) for run in _runs(load.wanted, indexes)]
        await _all_ended(tasks)

    async def _run(self, load: _Load, slot: TierSlot, run: list[int]) -> None:
        leases = await self._leases(slot, [load.wanted[i].key for i in run], load.deadline)
        held = [(i, lease) for i, lease in zip(run, leases, strict=True) if lease is not None]
        if held:
            await self._take(load, slot, held)
        missed = [load.wanted[i].key for i, lease in zip(run, leases, strict=True) if lease is None]
        await self._look_for(slot, missed, load.deadline)

    async def _take(self, load: _Load, slot: TierSlot, held: list[tuple[int, Lease]]) -> None:
        """Verify and deliver what came; the leases go back or on."""
        bad: list[tuple[int, str]] = []
        try:
            size = sum(len(lease.view) for _, lease in held)
            delivered, bad = await self._workers.run_sized(size, self._deliver, load, held)
            for i in delivered:
                load.delivered[i] = slot.name
                load.num_bytes += load.wanted[i].raw_bytes
            slot.counts["hits"] += len(delivered)
            if slot is not self._slots[0] and slot.config.promote:
                for i, lease in held:
                    if i in load.delivered:
                        self.promote(slot, load.wanted[i].key, lease, load.tenant)
                held = [(i, lease) for i, lease in held if i not in load.delivered]
        finally:
            for _, lease in held:
                lease.release()
        for i, why in bad:
            await self.distrust(slot, load.wanted[i].key, why)

    def _deliver(self, load: _Load, held: Sequence[tuple[int, Lease]]) -> tuple[list[int], list[tuple[int, str]]]:
        """In a worker thread: open each frame and hand it over. Returns delivered indexes, and bad ones with why."""
        delivered: list[int] = []
        bad: list[tuple[int, str]] = []
        for i, lease in held:
            if self._clock.now() >= load.deadline:
                break
            want = load.wanted[i]
            try:
                header, raw = self._coder.open(lease.view, want.key, want)
            except FrameError as error:
                bad.append((i, str(error)))
                continue
            load.sink(i, header, raw)
            delivered.append(i)
        return delivered, bad

    async def _leases(self, slot: TierSlot, keys: Sequence[bytes], deadline: float) -> list[Lease | None]:
        """One get a key, all at once. If we are cancelled, those that came are given back."""
        if slot.direct:
            return [await slot.get(key, deadline) for key in keys]
        tasks = [asyncio.create_task(slot.get(key, deadline)) for key in keys]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
                task.add_done_callback(_release_result)
            raise

    # ---- single chunks -----------------------------------------------------------------------------------------------

    async def chunk(self, key: bytes, deadline: float, slots: Sequence[TierSlot], want: Wanted | None) -> Chunk | None:
        """The verified chunk from the first of `slots` that has it intact. The caller releases."""
        for slot in slots:
            lease = await slot.get(key, deadline)
            if lease is None:
                continue
            chunk = await self._opened(slot, key, lease, want)
            if chunk is not None:
                slot.counts["hits"] += 1
                return chunk
        return None

    async def _opened(self, slot: TierSlot, key: bytes, lease: Lease, want: Wanted | None) -> Chunk | None:
        try:
            header, raw = await self._workers.run(self._coder.open, lease.view, key, want)
        except FrameError as error:
            lease.release()
            await self.distrust(slot, key, str(error))
            return None
        except BaseException:
            lease.release()
            raise
        return Chunk(header, raw, slot.name, lease.release)

    async def check(self, slot: TierSlot, key: bytes, deadline: float) -> FrameHeader | None:
        """Read and verify one value where it is. None: not there, another model's, or not right and there no more."""
        lease = await slot.get(key, deadline)
        if lease is None:
            return None
        async with lease:
            try:
                return await self._workers.run(self._coder.check, lease.view, key)
            except ForeignFrameError:
                return None
            except FrameError as error:
                why = str(error)
        await self.distrust(slot, key, why)
        return None

    async def _look_for(self, slot: TierSlot, keys: Sequence[bytes], deadline: float) -> None:
        """Values that a get did not bring. They may be there (no time, no buffer): an index of ours says so."""
        keys = [key for key in keys if self._events.holds(slot.name, key)]
        if keys and slot.readable and slot.tier.stats().reachable:
            entries = await slot.lookup(keys, deadline) if slot.indexed else [None] * len(keys)
            for key, entry in zip(keys, entries or (), strict=entries is not None):
                if entry is None and self._clock.now() < deadline:
                    self._absent(slot, key)

    def _absent(self, slot: TierSlot, key: bytes) -> None:
        """The tier says it has no such chunk: whoever believed it had is told. One that is away says nothing."""
        if self._events.holds(slot.name, key) and slot.tier.stats().reachable:
            self._events.evict(slot.name, (key,))

    async def distrust(self, slot: TierSlot, key: bytes, why: str) -> None:
        """A value that is not what it should be: counted, and gone from that tier."""
        slot.counts["corrupt"] += 1
        log.warning("store: chunk %s in tier %s is not usable and is removed: %s", key.hex()[:12], slot.name, why)
        await slot.delete([key], self._clock.now() + DELETE_TIMEOUT_S)
        self._events.evict(slot.name, [key])


def _runs(wanted: Sequence[Wanted], indexes: Sequence[int]) -> list[list[int]]:
    """Cut into runs of bounded count and bytes."""
    runs: list[list[int]] = []
    num_bytes = 0
    for i in indexes:
        if not runs or len(runs[-1]) >= MAX_RUN or num_bytes + wanted[i].raw_bytes > MAX_RUN_BYTES:
            runs.append([])
            num_bytes = 0
        runs[-1].append(i)
        num_bytes += wanted[i].raw_bytes
    return runs


async def _all_ended(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Wait for all; cancelled, cancel them and wait all the same. Raises the first error."""
    cancelled = False
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError:
            cancelled = True
            for task in pending:
                task.cancel()
    if cancelled:
        raise asyncio.CancelledError
    for task in tasks:
        task.result()


def _release_result(task: "asyncio.Task[Lease | None]") -> None:
    if not task.cancelled() and task.exception() is None and (lease := task.result()) is not None:
        lease.release()
