"""A tier in plain Python memory: small, whole, obvious. Keeps the contract of store/base.py for tests of what is above.

Eviction is least recently used; `take_evicted` tells. No quotas and no ages. `kind` can be chosen, so that it stands in
for any tier.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK, Clock
from pdxfer.store.base import Buffer, Entry, Outcome, TierStats
from pdxfer.store.counters import TierCounters
from pdxfer.store.lease import Once, copy_parts, total_bytes


class _Value:
    """Bytes under a key, or on their way there."""

    def __init__(self, num_bytes: int, tenant: str, wall: float) -> None:
        self.data = bytearray(num_bytes)
        self.tenant, self.created_wall = tenant, wall
        self.leases, self.hits = 0, 0
        self.pinned = False


class _Lease:
    def __init__(self, value: _Value, counters: TierCounters) -> None:
        self.view = memoryview(value.data).toreadonly()
        self._value, self._counters, self._once = value, counters, Once()
        value.leases += 1
        counters.lease_opened()

    def release(self) -> None:
        if self._once.first():
            self._value.leases -= 1
            self._counters.lease_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class _Reservation:
    def __init__(self, value: _Value, counters: TierCounters, commit: Callable[[], Outcome], end: Callable[[], None]):
        self.view = memoryview(value.data)
        self._counters, self._commit, self._end, self._once = counters, commit, end, Once()
        counters.reservation_opened()

    async def commit(self) -> Outcome:
        assert self._once.first(), "commit of a reservation that has ended"
        self._counters.reservation_closed()
        self._end()
        return self._commit()

    def abort(self) -> None:
        if self._once.first():
            self._counters.reservation_closed()
            self._end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class MemoryTier:
    """Implements base.Tier and base.EvictionNotices."""

    def __init__(
        self,
        config: TierConfig,
        clock: Clock = SYSTEM_CLOCK,
        *,
        tenant_quota: Mapping[str, int] | None = None,
        pin_fraction: float = 0.5,
        kind: str = "dram",
    ) -> None:
        self.kind = kind
        self.values: OrderedDict[bytes, _Value] = OrderedDict()
        """Least recently used first; tests may damage them."""
        self._capacity = int(config.capacity_gib * (1 << 30)) or 1 << 30
        self._clock = clock
        self._counters = TierCounters()
        self._reserved = 0
        self._evicted: list[bytes] = []
        self._closed = False

    async def open(self) -> None:
        self._closed = False

    async def lookup(self, keys: Sequence[bytes], deadline: float) -> list[Entry | None]:
        if self._refuses(deadline):
            return [None] * len(keys)
        return [self._entry(key) if key in self.values else None for key in keys]

    async def reserve(self, key: bytes, num_bytes: int, deadline: float, tenant: str = "") -> _Reservation | Outcome:
        if self._refuses(deadline):
            return Outcome.FAILED if self._closed else Outcome.LATE
        if key in self.values:
            return Outcome.ALREADY
        if num_bytes > self._capacity:
            return Outcome.TOO_LARGE
        if not self._make_room(num_bytes):
            return Outcome.FULL
        value = _Value(num_bytes, tenant, self._clock.wall())
        self._reserved += num_bytes

        def end() -> None:
            self._reserved -= num_bytes

        def commit() -> Outcome:
            if self._closed:
                return Outcome.FAILED
            if key in self.values:
                return Outcome.ALREADY
            self.values[key] = value
            return self._counters.put_ended(Outcome.STORED)

        return _Reservation(value, self._counters, commit, end)

    async def put(self, key: bytes, parts: Sequence[Buffer], deadline: float, tenant: str = "") -> Outcome:
        room = await self.reserve(key, total_bytes(parts), deadline, tenant)
        if isinstance(room, Outcome):
            return room
        async with room:
            copy_parts(room.view, parts)
            return await room.commit()

    async def get(self, key: bytes, deadline: float) -> _Lease | None:
        value = None if self._refuses(deadline) else self.values.get(key)
        self._counters.got(value is not None)
        if value is None:
            return None
        value.hits += 1
        self.values.move_to_end(key)
        return _Lease(value, self._counters)

    async def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        if self._refuses(deadline):
            return 0
        return sum(self.values.pop(key, None) is not None for key in keys)

    async def pin(self, keys: Sequence[bytes], ttl_s: float | None, deadline: float) -> int:
        return 0 if self._refuses(deadline) else self._set_pinned(keys, True)

    async def unpin(self, keys: Sequence[bytes], deadline: float) -> int:
        if self._refuses(deadline):
            return 0
        return self._set_pinned([key for key in keys if key in self.values and self.values[key].pinned], False)

    async def scan(self, after: bytes, limit: int, deadline: float) -> list[Entry]:
        if self._refuses(deadline):
            return []
        return [self._entry(key) for key in sorted(k for k in self.values if k > after)[:limit]]

    def stats(self) -> TierStats:
        return self._counters.stats(
            self.kind,
            used_bytes=self._used(),
            capacity_bytes=self._capacity,
            num_values=len(self.values),
            pinned_bytes=sum(len(v.data) for v in list(self.values.values()) if v.pinned),
        )

    def take_evicted(self) -> list[bytes] | None:
        taken, self._evicted = self._evicted, []
        return taken

    async def close(self) -> None:
        self._closed = True

    def _refuses(self, deadline: float) -> bool:
        return self._closed or self._clock.now() >= deadline

    def _entry(self, key: bytes) -> Entry:
        value = self.values[key]
        return Entry(
            key=key, num_bytes=len(value.data), pinned=value.pinned, created_wall=value.created_wall,
            hits=value.hits, tenant=value.tenant,
        )  # fmt: skip

    def _set_pinned(self, keys: Sequence[bytes], pinned: bool) -> int:
        there = [self.values[key] for key in keys if key in self.values]
        for value in there:
            value.pinned = pinned
        return len(there)

    def _used(self) -> int:
        return self._reserved + sum(len(value.data) for value in list(self.values.values()))

    def _make_room(self, num_bytes: int) -> bool:
        for key in [k for k, v in self.values.items() if not v.leases and not v.pinned]:
            if self._used() + num_bytes <= self._capacity:
                break
            del self.values[key]
            self._evicted.append(key)
            self._counters.evicted()
        return self._used() + num_bytes <= self._capacity
