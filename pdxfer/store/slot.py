"""One tier in its place: every call bounded in time, behind a breaker, counted, and never an exception.

Used by reading.py, writing.py and manage.py instead of the tier itself. Reads have a breaker of their own: a full disk
still serves. A tier whose breaker is open is not asked at all; `probe` (the store's ticker) finds out when it is back.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from msgspec import structs

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import Clock
from pdxfer.store.base import (
    KEY_BYTES,
    Buffer,
    Entry,
    EvictionNotices,
    Lease,
    Outcome,
    Reservation,
    SeveralServers,
    Tier,
)
from pdxfer.store.dram import DramTier
from pdxfer.store.policy import PATIENCE_S, Breaker, BreakerState, SecondSight
from pdxfer.store.shadow import Shadow, ShadowLease
from pdxfer.store.shared import SharedDramTier

log = logging.getLogger(__name__)
T = TypeVar("T")

IN_MEMORY = frozenset({"dram", "gpu"})
"""Kinds whose values are read and written in place."""
LOCAL = frozenset({"dram", "gpu", "disk", "file", "lmdb", "sqlite", "nixl-posix"})
"""Kinds that belong to this host: their keys can be listed and mirrored."""
FOREIGN = frozenset({"peer"})
"""Kinds that only show what is another store's: read, never written, never managed from here."""
GRACE_S = 0.02
"""A tier ends its calls by itself at the deadline; this much later we stop waiting for it."""
PROBE_KEY = bytes(KEY_BYTES)
MAX_NOTES = 1 << 16


class TierSlot:
    """A tier, its settings and its state. Loop thread only."""

    def __init__(self, name: str, tier: Tier, config: TierConfig, clock: Clock) -> None:
        self.name = name
        """The tier's kind; a second one of that kind is `kind-2`."""
        self.tier = tier
        self.foreign = tier.kind in FOREIGN
        self.config = structs.replace(config, write="none") if self.foreign else config
        self.codec = config.codec
        """How values are kept here (tiered.py falls back to raw where a codec cannot be used)."""
        self.in_memory = tier.kind in IN_MEMORY
        self.local = tier.kind in LOCAL
        self.sight = SecondSight()
        self.codecs: OrderedDict[bytes, str] = OrderedDict()
        """Codec of values that were written or looked at lately; the tier itself does not know."""
        self.pin_ends: dict[bytes, float | None] = {}
        """When pins end that were made through here; who replaces a value pins it for the rest."""
        self.shadows: dict[bytes, Shadow] = {}
        """Values that are being replaced: shown until the new ones are in place and verified."""
        self.counts: Counter[str] = Counter()
        """hits, misses, stored, corrupt, late, raised, skipped, dropped, lost, promoted, written_back."""
        self.direct = isinstance(tier, DramTier)
        """Memory of this process: calls end by themselves, mostly at once."""
        self.shared = self.in_memory and not self.direct
        """Other processes write here, too: what they add is learnt by listing."""
        self.indexed = self.local and not self.shared
        """We know what it holds: its lookup asks nobody."""
        self._shared_dram = tier if isinstance(tier, SharedDramTier) else None
        """Its calls end by themselves, at their deadline."""
        self._notices = tier if isinstance(tier, EvictionNotices) else None
        self._servers = tier if isinstance(tier, SeveralServers) else None
        self._clock = clock
        self.reads, self.writes = Breaker(), Breaker()
        self._strays: set[asyncio.Future[Any]] = set()

    def __repr__(self) -> str:
        return f"<TierSlot {self.name} reads={self.reads.state} writes={self.writes.state} {dict(self.counts)}>"

    @property
    def readable(self) -> bool:
        """Whether reads go to it now."""
        return self.reads.state is BreakerState.CLOSED

    @property
    def writes_at_once(self) -> int:
        """How many writes make sense now: one where it is to be seen whether a stopped tier is back."""
        if not self.writes.would_allow(self._clock.now()):
            return 0
        return MAX_NOTES if self.writes.state is BreakerState.CLOSED else 1

    @property
    def strays(self) -> int:
        """Calls that we stopped waiting for and that have not ended."""
        return len(self._strays)

    # ---- calls -------------------------------------------------------------------------------------------------------

    async def lookup(self, keys: Sequence[bytes], deadline: float) -> list[Entry | None] | None:
        """As Tier.lookup; None: no answer."""
        if not keys:
            return []
        entries = await self._read(lambda until: self.tier.lookup(keys, until), deadline)
        if entries is not None and self.shadows:
            shown = [self.shadows.get(key) for key in keys]
            return [s.entry if entry is None and s else entry for s, entry in zip(shown, entries, strict=True)]
        return entries

    async def get(self, key: bytes, deadline: float) -> Lease | None:
        """As Tier.get. The caller releases."""
        if key in self.shadows:
            return ShadowLease(self.shadows[key])
        lease = await self._read(lambda until: self.tier.get(key, until), deadline, _release)
        if lease is None:
            self.counts["misses"] += 1
        return lease

    async def put(self, key: bytes, parts: Sequence[Buffer], deadline: float, tenant: str = "") -> Outcome:
        """As Tier.put."""
        outcome = await self._write(lambda until: self.tier.put(key, parts, until, tenant), deadline)
        return self._stored(outcome)

    async def reserve(self, key: bytes, num_bytes: int, deadline: float, tenant: str = "") -> Reservation | Outcome:
        """As Tier.reserve."""
        work = await self._write(lambda until: self.tier.reserve(key, num_bytes, until, tenant), deadline, _abort)
        return Outcome.LATE if work is None else work

    async def commit(self, reservation: Reservation, deadline: float) -> Outcome:
        """As Reservation.commit."""
        return self._stored(await self._write(lambda _: reservation.commit(), deadline))

    async def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        """As Tier.delete."""
        return await self._write(lambda until: self.tier.delete(keys, until), deadline) or 0

    async def pin(self, keys: Sequence[bytes], ttl_s: float | None, deadline: float) -> int:
        """As Tier.pin."""
        end = None if ttl_s is None else self._after(ttl_s)
        self.pin_ends |= dict.fromkeys(keys, end)
        return await self._write(lambda until: self.tier.pin(keys, ttl_s, until), deadline) or 0

    async def unpin(self, keys: Sequence[bytes], deadline: float) -> int:
        """As Tier.unpin."""
        for key in keys:
            self.pin_ends.pop(key, None)
        return await self._write(lambda until: self.tier.unpin(keys, until), deadline) or 0

    async def scan(self, after: bytes, limit: int, deadline: float) -> list[Entry] | None:
        """As Tier.scan; None: no answer. A tier that had no time lists nothing, too."""
        end = min(deadline, self._after(self.config.get_timeout_s))
        page = await self._read(lambda until: self.tier.scan(after, limit, until), end)
        return page if page or self._clock.now() < end else None

    async def probe(self) -> None:
        """If reads are stopped and a pause is over: ask for nothing in particular; an answer opens the tier again."""
        now = self._clock.now()
        if self.readable or not self.reads.allows(now):
            return
        deadline = now + self.config.get_timeout_s
        await self._bounded(lambda until: self.tier.lookup((PROBE_KEY,), until), self.reads, deadline, None)
        if self.readable:
            self.writes.succeeded()
            log.info("store: tier %s answers again", self.name)

    def pin_left_s(self, key: bytes) -> float | None:
        """For how long a pinned value stays pinned; None: until it is unpinned, or nobody here knows."""
        end = self.pin_ends.get(key)
        return None if end is None else max(0.001, end - self._clock.now())

    async def tenant_of(self, key: bytes, deadline: float) -> str:
        """Whose value it is, as far as the tier knows."""
        [entry] = await self.lookup([key], deadline) or [None]
        return entry.tenant if entry is not None else ""

    def forget_old_pins(self) -> None:
        """Pins that are over."""
        now = self._clock.now()
        for key in [key for key, end in self.pin_ends.items() if end is not None and end <= now]:
            del self.pin_ends[key]

    def note_codec(self, key: bytes, codec: str) -> None:
        """Remember what a value is kept in."""
        self.codecs[key] = codec
        self.codecs.move_to_end(key)
        if len(self.codecs) > MAX_NOTES:
            self.codecs.popitem(last=False)

    def take_evicted(self) -> list[bytes] | None:
        """Keys the tier dropped by itself; None: too many, or it cannot tell."""
        return self._notices.take_evicted() if self._notices is not None else []

    async def settle(self, deadline: float) -> None:
        """Wait for calls that were given up. Before close."""
        if self._strays:
            await asyncio.wait(set(self._strays), timeout=max(0.0, deadline - self._clock.now()))

    # ---- how ---------------------------------------------------------------------------------------------------------

    async def _read(
        self,
        work: Callable[[float], Awaitable[T]],
        deadline: float,
        dispose: Callable[[T], None] | None = None,
    ) -> T | None:
        if not self.readable:
            self.counts["skipped"] += 1
            return None
        return await self._bounded(work, self.reads, min(deadline, self._after(self.config.get_timeout_s)), dispose)

    async def _write(
        self,
        work: Callable[[float], Awaitable[T]],
        deadline: float,
        dispose: Callable[[T], None] | None = None,
    ) -> T | None:
        if not self.writes.allows(self._clock.now()):
            self.counts["skipped"] += 1
            return None
        return await self._bounded(work, self.writes, min(deadline, self._after(self.config.put_timeout_s)), dispose)

    def _after(self, seconds: float) -> float:
        return self._clock.now() + seconds

    async def _bounded(
        self,
        work: Callable[[float], Awaitable[T]],
        breaker: Breaker,
        until: float,
        dispose: Callable[[T], None] | None,
    ) -> T | None:
        """The call's result, or None: it failed, or did not end in time. What arrives later is disposed of."""
        budget = until - self._clock.now()
        if budget <= 0:
            return None
        if self.direct or self._shared_dram is not None:
            return await self._trusted(work, breaker, until)
        task = asyncio.ensure_future(work(until))
        try:
            await asyncio.wait((task,), timeout=budget + GRACE_S)
        except asyncio.CancelledError:
            self._abandon(task, dispose)
            raise
        if not task.done():
            self._abandon(task, dispose)
            self.counts["late"] += 1
            if budget >= PATIENCE_S:
                self._failed(breaker, "no answer in time")
            return None
        return self._result(task, breaker, budget >= PATIENCE_S)

    async def _trusted(self, work: Callable[[float], Awaitable[T]], breaker: Breaker, until: float) -> T | None:
        """The call without a task and a timer around it (100 us): memory does not hang, a link has its own timer."""
        try:
            result = await work(until)
        except Exception as error:  # a bug of ours must not end a request
            self.counts["raised"] += 1
            log.exception("store: tier %s raised %r; treated as a miss", self.name, error)
            if not self.direct:
                self._failed(breaker, "it raised")
            return None
        return result if self.direct else self._judged(result, breaker)

    def _result(self, task: "asyncio.Future[T]", breaker: Breaker, patient: bool) -> T | None:
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            # The contract forbids it; a plug-in's bug must not end a request.
            self.counts["raised"] += 1
            log.error("store: tier %s raised %r; treated as a miss", self.name, error)
            self._failed(breaker, "it raised")
            return None
        return self._judged(task.result(), breaker, patient)

    def _judged(self, result: T | None, breaker: Breaker, patient: bool = False) -> T | None:
        """The result, after the breaker has heard of it. `patient`: the call had time enough, LATE is the tier's."""
        bad = result is Outcome.FAILED or (patient and result is Outcome.LATE)
        others_serve = self._servers is not None and self._servers.partly_away
        if bad and others_serve:  # it may be of the server that is away
            return result
        if bad or not (others_serve or self._reachable()):
            self._failed(breaker, "its server or medium does not answer")
        else:
            breaker.succeeded()
        return result

    def _reachable(self) -> bool:
        return self._shared_dram.reachable if self._shared_dram is not None else self.tier.stats().reachable

    def _failed(self, breaker: Breaker, why: str) -> None:
        before = breaker.state
        breaker.failed(self._clock.now())
        if before is BreakerState.CLOSED and breaker.state is BreakerState.OPEN:
            kind = "reads from" if breaker is self.reads else "writes to"
            log.warning("store: %s tier %s stopped: %s; it is probed until it is back", kind, self.name, why)

    def _stored(self, outcome: Outcome | None) -> Outcome:
        if outcome is None:
            return Outcome.LATE
        self.counts[outcome.value] += 1
        return outcome

    def _abandon(self, task: "asyncio.Future[T]", dispose: Callable[[T], None] | None) -> None:
        """Cancel; whatever it still returns is given back."""

        def ended(done: "asyncio.Future[T]") -> None:
            self._strays.discard(done)
            if not done.cancelled() and done.exception() is None and dispose is not None:
                dispose(done.result())

        self._strays.add(task)
        task.add_done_callback(ended)
        task.cancel()


def _release(lease: Lease | None) -> None:
    if lease is not None:
        lease.release()


def _abort(work: Reservation | Outcome) -> None:
    if not isinstance(work, Outcome):
        work.abort()
