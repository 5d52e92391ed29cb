"""The DRAM tier: values in one registered arena, read and written in place, evicted by policy when room is needed.

Private to this process (open.py), or run by the store process for all engines of a host (server.py). The arena stays
mapped for life; `arena.segment` is what a transport registers to move values without a copy.

Options: `lock` (true: never swap), `numa_node` (bind the memory there), `populate` (false: pages come at first touch
instead of at start, and are not pinned for a GPU).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import Clock
from pdxfer.memory.arena import Arena, Piece
from pdxfer.memory.freelist import piece_bytes
from pdxfer.memory.limits import default_capacity_bytes
from pdxfer.memory.populate import Populating, prepare
from pdxfer.memory.segment import Segment
from pdxfer.store.base import Buffer, Entry, Lease, Outcome, Reservation, TierStats
from pdxfer.store.bell import Bell
from pdxfer.store.counters import TierCounters
from pdxfer.store.disk_index import kept_tenant
from pdxfer.store.dram_index import NEVER, DramIndex, Value
from pdxfer.store.dram_options import DramOptions
from pdxfer.store.lease import total_bytes
from pdxfer.store.piece_lease import PieceLease, PieceReservation, fill

log = logging.getLogger(__name__)

MOST_NOTICES = 1 << 16
"""Evicted keys remembered for `take_evicted`."""


class DramTier:
    """Implements base.Tier and base.EvictionNotices. Loop thread only, except stats and giving leases back."""

    kind = "dram"

    def __init__(
        self,
        config: TierConfig,
        clock: Clock,
        *,
        tenant_quota: Mapping[str, int] | None = None,
        pin_fraction: float = 0.5,
        make_segment: Callable[[int], Segment] = Segment.private,
    ) -> None:
        self._config = config
        self._options = DramOptions.of(config)
        self._clock = clock
        self._quota = {kept_tenant(tenant): quota for tenant, quota in (tenant_quota or {}).items()}
        self._pin_fraction = pin_fraction
        self._make_segment = make_segment
        self._counters = TierCounters()
        self._news = Bell()
        """Room became free, or a writer ended."""
        self._writing: set[bytes] = set()
        self._evicted: deque[bytes] = deque(maxlen=MOST_NOTICES + 1)
        self._populating: Populating | None = None
        self._arena: Arena | None = None
        self._index = DramIndex(eviction=config.eviction, ttl_s=config.ttl_s, pin_bytes=0)

    def __repr__(self) -> str:
        return f"<DramTier {self._arena!r} values={len(self._index)} reservations={self._counters.reservations}>"

    @property
    def arena(self) -> Arena:
        """The memory; between open and close."""
        assert self._arena is not None, "the tier is not open"
        return self._arena

    async def open(self) -> None:
        """Map the memory; its pages are populated in the background."""
        wanted = int(self._config.capacity_gib * (1 << 30)) or default_capacity_bytes()
        segment = self._make_segment(wanted)
        prepare(segment, numa_node=self._options.numa_node, lock=self._options.lock)
        if self._options.populate:
            self._populating = Populating(segment)
        self._arena = Arena(segment, on_free=self._news.ring)
        self._index = DramIndex(
            eviction=self._config.eviction,
            ttl_s=self._config.ttl_s,
            pin_bytes=int(self._pin_fraction * self._arena.capacity_bytes),
            limited_tenants=self._quota.keys(),
            dropped=self._gone,
        )
        log.info("dram tier: %r, eviction %s", segment, self._config.eviction)

    # -- reading --------------------------------------------------------------------------------------------------

    async def lookup(self, keys: Sequence[bytes], deadline: float) -> list[Entry | None]:
        """From the index; does not count as use."""
        return self.entries(keys) if self._in_time(deadline) else [None] * len(keys)

    async def get(self, key: bytes, deadline: float) -> Lease | None:
        """The value in place; no copy."""
        return self.lend(key) if self._in_time(deadline) else None

    async def scan(self, after: bytes, limit: int, deadline: float) -> list[Entry]:
        """One page of entries, in key order."""
        return self.page(after, limit) if self._in_time(deadline) else []

    def entries(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """As lookup, without waiting or deadline; so are those below."""
        self._tick()
        found = (self._index.find(key) for key in keys)
        return [value.entry() if value else None for value in found]

    def lend(self, key: bytes) -> PieceLease | None:
        """As get."""
        self._tick()
        value = self._index.find(key)
        self._counters.got(value is not None)
        if value is None:
            return None
        self._index.use(value)
        value.piece.hold()
        return PieceLease(value.piece, self._counters, self._news.ring)

    def page(self, after: bytes, limit: int) -> list[Entry]:
        """As scan."""
        self._tick()
        return [value.entry() for value in islice(self._index.after(after), limit)]

    # -- writing --------------------------------------------------------------------------------------------------

    async def put(self, key: bytes, parts: Sequence[Buffer], deadline: float, tenant: str = "") -> Outcome:
        """Reserve, copy once, commit."""
        reservation = await self.reserve_piece(key, total_bytes(parts), deadline, tenant)
        if isinstance(reservation, Outcome):
            return reservation
        async with reservation:
            await fill(reservation.view, parts)
            return await reservation.commit()

    async def reserve(self, key: bytes, num_bytes: int, deadline: float, tenant: str = "") -> Reservation | Outcome:
        """Room in the arena, to be filled in place."""
        return await self.reserve_piece(key, num_bytes, deadline, tenant)

    async def reserve_piece(
        self, key: bytes, num_bytes: int, deadline: float, tenant: str = ""
    ) -> PieceReservation | Outcome:
        """As reserve. Waits while another writer has the key, or leases and other writers have the room."""
        if self._arena is not None and self._clock.now() >= deadline:
            return Outcome.LATE
        while True:
            rung = self._news.rung
            now = self.try_reserve(key, num_bytes, tenant)
            if now is not None:
                return now
            if not await self._news.after(rung, deadline - self._clock.now()):
                return Outcome.LATE if key in self._writing else Outcome.FULL

    def try_reserve(self, key: bytes, num_bytes: int, tenant: str = "") -> PieceReservation | Outcome | None:
        """As reserve, if it can be said now; None: it depends on others who write or read."""
        if self._arena is None:
            return Outcome.FAILED
        self._tick()
        tenant = kept_tenant(tenant)
        if piece_bytes(num_bytes) > min(self._arena.capacity_bytes, self._quota.get(tenant, NEVER)):
            return Outcome.TOO_LARGE
        if self._index.find(key) is not None:
            return Outcome.ALREADY
        if key in self._writing:
            return None
        if (piece := self._take(num_bytes, tenant)) is not None:
            return self._reservation(key, piece, tenant)
        return None if self._counters.leases or self._counters.reservations else Outcome.FULL

    async def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        """Out of the index at once; the room comes back with the last lease."""
        return self.remove(keys) if self._in_time(deadline) else 0

    def remove(self, keys: Sequence[bytes]) -> int:
        """As delete."""
        self._tick()
        return sum(self._index.remove(key) for key in keys)

    # -- pins, eviction -------------------------------------------------------------------------------------------

    async def pin(self, keys: Sequence[bytes], ttl_s: float | None, deadline: float) -> int:
        """Take values out of eviction, up to the pin quota."""
        return self.hold(keys, ttl_s) if self._in_time(deadline) else 0

    async def unpin(self, keys: Sequence[bytes], deadline: float) -> int:
        """Back into eviction, as if just stored."""
        return self.let_go(keys) if self._in_time(deadline) else 0

    def hold(self, keys: Sequence[bytes], ttl_s: float | None) -> int:
        """As pin."""
        self._tick()
        until = NEVER if ttl_s is None else self._clock.now() + ttl_s
        return sum(self._index.pin(key, until) for key in keys)

    def let_go(self, keys: Sequence[bytes]) -> int:
        """As unpin."""
        self._tick()
        return sum(self._index.unpin(key) for key in keys)

    def take_evicted(self) -> list[bytes] | None:
        """Keys that went by eviction or age since the last call; None: more than are remembered."""
        keys = list(self._evicted)
        self._evicted.clear()
        return keys if len(keys) <= MOST_NOTICES else None

    # -- state ------------------------------------------------------------------------------------------------------

    def stats(self) -> TierStats:
        """Figures now; used and pinned bytes include what pieces waste."""
        arena = self._arena
        return self._counters.stats(
            self.kind,
            used_bytes=arena.used_bytes if arena else 0,
            capacity_bytes=arena.capacity_bytes if arena else 0,
            num_values=len(self._index),
            pinned_bytes=self._index.pinned_bytes,
            reachable=arena is not None,
        )

    def check(self) -> None:
        """Integrity of arena and index. AssertionError if a byte, pin or reference is lost."""
        self.arena.check()
        self._index.check()
        stats = self._counters
        held = stats.leases + stats.reservations
        pieces = self.arena.num_pieces
        assert len(self._index) <= pieces <= len(self._index) + held, (len(self._index), pieces, held)

    async def close(self) -> None:
        """Forget all values and unmap, once the last lease is back; idempotent."""
        arena, self._arena = self._arena, None
        if arena is None:
            return
        self._index.clear()
        self._news.ring()
        if self._populating is not None:
            await asyncio.to_thread(self._populating.stop)
        arena.segment.close()

    # -- how --------------------------------------------------------------------------------------------------------

    def _in_time(self, deadline: float) -> bool:
        return self._arena is not None and self._clock.now() < deadline

    def _tick(self) -> None:
        self._index.tick(self._clock.now())

    def _reservation(self, key: bytes, piece: Piece, tenant: str) -> PieceReservation:
        self._writing.add(key)
        publish = partial(self._publish, key, tenant)
        return PieceReservation(piece, self._counters, publish, partial(self._written, key))

    def _publish(self, key: bytes, tenant: str, piece: Piece) -> Outcome:
        if self._arena is None:
            return Outcome.FAILED
        now, wall = self._clock.now(), self._clock.wall()
        self._index.add(Value(key=key, piece=piece, tenant=tenant, created=now, created_wall=wall))
        return Outcome.STORED

    def _written(self, key: bytes) -> None:
        self._writing.discard(key)
        self._news.ring()

    def _take(self, num_bytes: int, tenant: str) -> Piece | None:
        """A piece, after evicting what has to go for it: of the tenant down to its quota, then of all."""
        size = piece_bytes(num_bytes)
        quota = self._quota.get(tenant, NEVER)
        while self.arena.used_by(tenant) + size > quota:
            if not self._evict(tenant):
                return None
        while (piece := self.arena.reserve(num_bytes, tenant)) is None:
            if not self._evict():
                return None
        return piece

    def _evict(self, tenant: str | None = None) -> bool:
        """One value less; False: none may go."""
        value = self._index.evict(tenant)
        if value is None:
            return False
        self._counters.evicted()
        self._gone(value)
        value.piece.drop()
        return True

    def _gone(self, value: Value) -> None:
        self._evicted.append(value.key)
