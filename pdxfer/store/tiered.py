"""The tiered store: chunks by key over all tiers, fastest first. One event loop owns it (runtime.py has a thread).

    save ──► writing.py ──► slots (slot.py: bounded, behind breakers) ──► tiers (base.py)
    lookup, load, get ──► reading.py ──► slots ...          manage.py: the verbs of the management API on top

Never an exception for what a medium does, never a byte that was not verified, never a wait beyond the caller's
deadline (`clock.now()` seconds). Identity is in the keys and in every frame.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from pdxfer.codec.registry import Codecs
from pdxfer.config.redact import redacted
from pdxfer.config.store import StoreConfig
from pdxfer.core.clock import SYSTEM_CLOCK, Clock
from pdxfer.core.errors import ConfigError
from pdxfer.store.base import Outcome, Tier
from pdxfer.store.chunk import Chunk, Loaded, NewChunk, Prefix, SaveResult, Sink, Wanted
from pdxfer.store.events import EventLog, Listener
from pdxfer.store.reading import Reader
from pdxfer.store.slot import TierSlot
from pdxfer.store.stats import StoreStats, slot_stats
from pdxfer.store.transcode import OPAQUE, RAW, ChunkForm, Transcoder
from pdxfer.store.workers import Workers
from pdxfer.store.writing import HELD, Writer

log = logging.getLogger(__name__)

TICK_S = 0.1
"""Events are told, evictions asked for, stopped tiers probed and write-back begun this often."""
RELIST_S = 5.0
"""What other processes added to shared memory is known after this; `lookup` knows at once."""
SCAN_PAGE = 4096
SCAN_TIMEOUT_S = 5.0
CLOSE_TIER_S = 5.0
PREFETCH_AT_ONCE = 4
"""Chunks of one prefetch in flight."""


class TieredStore:
    """`await open()` first, `await close(deadline)` last. Loop thread only, but for `stats`."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        config: StoreConfig,
        identity: bytes,
        *,
        clock: Clock = SYSTEM_CLOCK,
        codecs: Codecs | None = None,
        form: ChunkForm | None = None,
        dtype: str = OPAQUE,
        num_threads: int = 2,
    ) -> None:
        """`tiers` are open, in the order of `config.tiers`, and closed with the store. ConfigError for a codec that
        cannot be made. `form` is needed for lossy codecs, `dtype` for lossless ones to find something."""
        self.config, self.clock = config, clock
        self.slots = _slots(tiers, config, clock)
        self.coder = Transcoder(identity, codecs, form, dtype)
        self.workers = Workers(num_threads)
        self.events = EventLog()
        self.reader = Reader(self.slots, self.coder, self.workers, self.events, clock)
        self.writer = Writer(
            self.slots, self.coder, self.workers, self.events, clock, self.reader, config.max_pending_saves,
            config.save == "second_sight",
        )  # fmt: skip
        self.reader.promote = self.writer.promote
        self._loads = 0
        self._listed: dict[str, float] = {}
        """When each local tier was last looked through."""
        self._cares: dict[str, asyncio.Task[None]] = {}
        """Slow housekeeping, one task a tier: one that hangs does not hold up the others."""
        self._prefetches: dict[str, set[asyncio.Task[int]]] = {}
        self._ticker: asyncio.Task[None] | None = None
        for slot in self.slots:
            self._settle_codec(slot)

    def __repr__(self) -> str:
        tiers = " ".join(f"{slot.name}={self.events.num_held(slot.name)}" for slot in self.slots)
        return f"<TieredStore {tiers} saving={self.writer.pending} loading={self._loads}>"

    async def open(self) -> None:
        """List what local tiers hold, begin to work."""
        self.writer.start()
        await asyncio.gather(*(self._care(slot) for slot in self.slots))
        self._ticker = asyncio.create_task(self._tick_forever())

    async def close(self, deadline: float) -> None:
        """Write back what only memory has, end what runs, close the tiers. Idempotent; ends soon after the deadline."""
        for token in list(self._prefetches):
            self.cancel_prefetch(token)
        if self._ticker is not None:
            running = [self._ticker, *self._cares.values()]
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            self._ticker = None
            await self.writer.drain(deadline)
        await self.writer.close()
        for slot in reversed(self.slots):
            await slot.settle(deadline)
            await self._close_tier(slot)
        self.workers.close()

    async def _close_tier(self, slot: TierSlot) -> None:
        closing = asyncio.ensure_future(slot.tier.close())
        await asyncio.wait((closing,), timeout=CLOSE_TIER_S)
        if not closing.done():
            log.warning("store: tier %s did not close within %g s; left behind", slot.name, CLOSE_TIER_S)
            closing.cancel()
        elif not closing.cancelled() and (error := closing.exception()) is not None:
            log.error("store: tier %s raised %r at close", slot.name, error)

    # ---- reading -----------------------------------------------------------------------------------------------------

    async def lookup(self, keys: Sequence[bytes], deadline: float) -> Prefix:
        """The longest run of `keys`, from the first on, of which some tier has each; per chunk the fastest one."""
        return await self.reader.lookup(keys, deadline)

    async def load(
        self, wanted: Sequence[Wanted], sink: Sink, deadline: float, *, start_chunk: int = 0, tenant: str = ""
    ) -> Loaded:
        """Hand the chunks of wanted[start_chunk:] to `sink`, verified, in any order. Hits in slow tiers are promoted.

        When this returns, raises or is cancelled, no sink call runs or comes any more. An error that `sink` raises ends
        the load and is raised here."""
        if self._loads >= self.config.max_pending_loads:
            self.reader.counts["loads_refused"] += 1
            return Loaded(delivered=frozenset(), tiers={}, num_bytes=0, late=False)
        self._loads += 1
        try:
            return await self.reader.load(wanted, sink, deadline, start_chunk, tenant)
        finally:
            self._loads -= 1

    async def get(self, keys: Sequence[bytes], deadline: float, *, start_chunk: int = 0) -> list[Chunk]:
        """The verified chunks of keys[start_chunk:] up to the first that no tier has. The caller releases each."""
        chunks: list[Chunk] = []
        try:
            for key in keys[start_chunk:]:
                chunk = await self.get_chunk(key, deadline)
                if chunk is None:
                    break
                chunks.append(chunk)
        except BaseException:
            for chunk in chunks:
                chunk.release()
            raise
        return chunks

    async def get_chunk(self, key: bytes, deadline: float, want: Wanted | None = None) -> Chunk | None:
        """One verified chunk, from the fastest tier that has it intact. The caller releases."""
        return await self.reader.chunk(key, deadline, self.slots, want)

    # ---- writing -----------------------------------------------------------------------------------------------------

    async def save(self, chunk: NewChunk, deadline: float, *, tenant: str = "", reserved: bool = False) -> SaveResult:
        """Keep a chunk. When this returns, `chunk.parts` are not read any more; slower tiers follow in the background.

        `reserved` (spill): not subject to policy or queue, waits for room until the deadline, and the answer `held`
        means that a tier which other engines read has the bytes now."""
        return await self.writer.save(chunk, deadline, tenant, reserved)

    # ---- prefetch ----------------------------------------------------------------------------------------------------

    async def prefetch(self, keys: Sequence[bytes], token: str, deadline: float, *, tenant: str = "") -> int:
        """Bring the prefix `keys` into memory before it is asked for; how many of its chunks are there at the end.

        Bounded: beyond `store.max_pending_loads` prefetches at once nothing is done. `cancel_prefetch(token)` ends it
        early, which is no error."""
        if self.writer.front is None or sum(map(len, self._prefetches.values())) >= self.config.max_pending_loads:
            self.reader.counts["prefetches_refused"] += 1
            return 0
        task = asyncio.create_task(self._bring(keys, self.writer.front, deadline, tenant))
        self._prefetches.setdefault(token, set()).add(task)
        task.add_done_callback(lambda done: self._prefetch_ended(token, done))
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            task.cancel()
            raise
        return 0 if task.cancelled() else task.result()

    def cancel_prefetch(self, token: str) -> None:
        """End the prefetches of this token, if there are any."""
        for task in self._prefetches.get(token, ()):
            task.cancel()

    def _prefetch_ended(self, token: str, task: "asyncio.Task[int]") -> None:
        tasks = self._prefetches.get(token, set())
        tasks.discard(task)
        if not tasks:
            self._prefetches.pop(token, None)

    async def _bring(self, keys: Sequence[bytes], front: TierSlot, deadline: float, tenant: str) -> int:
        have = await front.lookup(keys, deadline) or [None] * len(keys)
        slower = [slot for slot in self.slots if slot is not front]
        missing = [key for key, entry in zip(keys, have, strict=True) if entry is None]
        for begin in range(0, len(missing), PREFETCH_AT_ONCE):
            part = missing[begin : begin + PREFETCH_AT_ONCE]
            outcomes = await asyncio.gather(*(self.writer.bring(k, slower, front, deadline, tenant) for k in part))
            if any(outcome not in HELD for outcome in outcomes):
                break
        at_end = await front.lookup(keys, deadline) or []
        return next((i for i, entry in enumerate(at_end) if entry is None), len(at_end))

    # ---- watching ----------------------------------------------------------------------------------------------------

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """A snapshot now, then every change of what tiers hold; called on the loop. Returns what ends it."""
        return self.events.subscribe(listener)

    @property
    def local_tiers(self) -> list[str]:
        """Names of tiers whose keys are all known here: a listener may answer lookups from them."""
        return [slot.name for slot in self.slots if slot.local]

    def stats(self) -> StoreStats:
        """Figures now; cheap, any thread."""
        return StoreStats(
            tiers=[slot_stats(slot, self.writer.lanes[slot.name].pending) for slot in self.slots],
            pending_saves=self.writer.pending,
            staged_bytes=self.writer.staged_bytes,
            dirty_chunks=self.writer.num_dirty,
            loads=self._loads,
            counts={**self.reader.counts, **{f"saves_{k}": v for k, v in dict(self.writer.counts).items()}},
        )

    async def tick(self) -> None:
        """One round of housekeeping, all of it; the store does it by itself every TICK_S."""
        self._quick_round()
        await asyncio.gather(*(self._care(slot) for slot in self.slots))
        self.events.flush()

    def _quick_round(self) -> None:
        for slot in self.slots:
            self.writer.take_evictions(slot)
        self.writer.write_back()
        self.events.flush()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._quick_round()
            except Exception:  # a listener's bug must not end our housekeeping
                log.exception("store: housekeeping failed: please report this")
            for slot in self.slots:
                if slot.name not in self._cares or self._cares[slot.name].done():
                    self._cares[slot.name] = asyncio.create_task(self._care(slot))

    async def _care(self, slot: TierSlot) -> None:
        """What may take time: see whether a stopped tier is back; list what a local one holds."""
        await slot.probe()
        slot.forget_old_pins()
        now = self.clock.now()
        if slot.name in self.writer.unlisted or (slot.shared and now >= self._listed.get(slot.name, now) + RELIST_S):
            self._listed[slot.name] = now
            await self._list(slot)

    async def _list(self, slot: TierSlot) -> None:
        """Learn which keys a tier holds, page by page; saves may go on meanwhile. One that is away shows none, and is
        listed again when it is back."""
        self.writer.unlisted.discard(slot.name)
        before = self.events.keys(slot.name)
        keys: list[bytes] = []
        while True:
            page = await slot.scan(keys[-1] if keys else b"", SCAN_PAGE, self.clock.now() + SCAN_TIMEOUT_S)
            if page is None or not slot.tier.stats().reachable:
                self.writer.unlisted.add(slot.name)
            if page is None:
                return
            keys += [entry.key for entry in page]
            if len(page) < SCAN_PAGE:
                break
        there = set(keys)
        self.events.evict(slot.name, [key for key in before if key not in there])
        self.events.add(slot.name, keys)

    def _settle_codec(self, slot: TierSlot) -> None:
        try:
            usable = self.coder.usable(slot.codec, slot.config.level)
        except ConfigError as error:
            raise ConfigError(f"store.tiers: {redacted(slot.config.url)}: {error}") from error
        if not usable:
            log.warning(
                "store: tier %s keeps raw frames: codec %s needs KV values, and how they are packed here is not known",
                slot.name,
                slot.codec,
            )
            slot.codec = RAW


def _slots(tiers: Sequence[Tier], config: StoreConfig, clock: Clock) -> list[TierSlot]:
    kinds = [tier.kind for tier in tiers]
    before = [kinds[:number].count(kind) for number, kind in enumerate(kinds)]
    names = [kind if not same else f"{kind}-{same + 1}" for kind, same in zip(kinds, before, strict=True)]
    return [
        TierSlot(name, tier, settings, clock) for name, tier, settings in zip(names, tiers, config.tiers, strict=True)
    ]


__all__ = ["Chunk", "Loaded", "NewChunk", "Outcome", "Prefix", "SaveResult", "Sink", "TieredStore", "Wanted"]
