"""The disk tier: `file:///DIR[,/DIR...]`. Several directories (one a disk) share the values by key.

Each directory is a LocalTier over a Slab of its own, with its share of capacity and quotas: one that fails costs its
own values only. Which directory a key belongs to depends on the number of directories: with one more at the end of the
list one value in n has a new home, and is dropped at open.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from heapq import merge
from itertools import islice

import xxhash

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import Clock
from pdxfer.store.base import Buffer, Entry, Outcome, TierStats
from pdxfer.store.disk_files import FileLayer, OsFiles
from pdxfer.store.disk_local import LocalTier
from pdxfer.store.disk_options import DiskOptions, read_options
from pdxfer.store.disk_place import plan_slab
from pdxfer.store.disk_reservation import LocalReservation
from pdxfer.store.disk_slab import Slab
from pdxfer.store.lease import BufferLease


def home_of(key: bytes, num_directories: int) -> int:
    """Number of the directory that keeps `key` (highest random weight: adding one moves only what it gets)."""
    return max(range(num_directories), key=lambda number: xxhash.xxh3_64_intdigest(key, number))


class DiskTier:
    """Implements base.Tier and EvictionNotices. `files` is for tests that make the disk fail."""

    kind = "disk"

    def __init__(
        self,
        config: TierConfig,
        clock: Clock,
        *,
        tenant_quota: Mapping[str, int] | None = None,
        pin_fraction: float = 0.5,
        files: FileLayer | None = None,
    ) -> None:
        options = read_options(config)
        count = len(options.directories)
        self._parts = [
            LocalTier(
                self.kind,
                _slab(options, number, files or OsFiles()),
                config,
                clock,
                capacity_bytes=options.capacity_bytes // count,
                buffer_bytes=options.buffer_bytes,
                tenant_quota={tenant: quota // count for tenant, quota in (tenant_quota or {}).items()},
                pin_fraction=pin_fraction,
            )
            for number in range(count)
        ]

    def __repr__(self) -> str:
        return f"<DiskTier {self._parts}>"

    async def open(self) -> None:
        """Open every directory; one that is away now is no error. ConfigError closes those already open."""
        try:
            for part in self._parts:
                await part.open()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        for part in reversed(self._parts):
            await part.close()

    # -- one key: its home -------------------------------------------------------------------------------------------

    async def reserve(
        self, key: bytes, num_bytes: int, deadline: float, tenant: str = ""
    ) -> LocalReservation | Outcome:
        return await self._home(key).reserve(key, num_bytes, deadline, tenant)

    async def put(self, key: bytes, parts: Sequence[Buffer], deadline: float, tenant: str = "") -> Outcome:
        return await self._home(key).put(key, parts, deadline, tenant)

    async def get(self, key: bytes, deadline: float) -> BufferLease | None:
        """Where there are others, a directory that hangs is not asked; the only one is the store's to leave alone."""
        home = self._home(key)
        return None if home.hangs and len(self._parts) > 1 else await home.get(key, deadline)

    # -- many keys: each at its home ---------------------------------------------------------------------------------

    async def lookup(self, keys: Sequence[bytes], deadline: float) -> list[Entry | None]:
        found: list[Entry | None] = [None] * len(keys)
        for part, places in self._by_home(keys):
            entries = await part.lookup([keys[place] for place in places], deadline)
            for place, entry in zip(places, entries, strict=True):
                found[place] = entry
        return found

    async def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        return await self._sum(keys, lambda part, own: part.delete(own, deadline))

    async def pin(self, keys: Sequence[bytes], ttl_s: float | None, deadline: float) -> int:
        return await self._sum(keys, lambda part, own: part.pin(own, ttl_s, deadline))

    async def unpin(self, keys: Sequence[bytes], deadline: float) -> int:
        return await self._sum(keys, lambda part, own: part.unpin(own, deadline))

    # -- all ---------------------------------------------------------------------------------------------------------

    async def scan(self, after: bytes, limit: int, deadline: float) -> list[Entry]:
        pages = [await part.scan(after, limit, deadline) for part in self._parts]
        return list(islice(merge(*pages, key=lambda entry: entry.key), limit))

    def stats(self) -> TierStats:
        """Sums; reachable as long as one directory is."""
        return _sum_stats([part.stats() for part in self._parts])

    def take_evicted(self) -> list[bytes] | None:
        """See base.EvictionNotices."""
        taken = [part.take_evicted() for part in self._parts]
        known = [keys for keys in taken if keys is not None]
        return [key for keys in known for key in keys] if len(known) == len(taken) else None

    # -- steps -------------------------------------------------------------------------------------------------------

    def _home(self, key: bytes) -> LocalTier:
        return self._parts[home_of(key, len(self._parts))]

    def _by_home(self, keys: Sequence[bytes]) -> list[tuple[LocalTier, list[int]]]:
        """Directories, and the places in `keys` of what belongs there."""
        if len(self._parts) == 1:
            return [(self._parts[0], list(range(len(keys))))]
        places: dict[int, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(home_of(key, len(self._parts)), []).append(place)
        return [(self._parts[number], own) for number, own in places.items()]

    async def _sum(self, keys: Sequence[bytes], call: "Callable[[LocalTier, list[bytes]], Awaitable[int]]") -> int:
        calls = (call(part, [keys[place] for place in places]) for part, places in self._by_home(keys))
        return sum(await asyncio.gather(*calls))


def _slab(options: DiskOptions, number: int, files: FileLayer) -> Slab:
    path, count = options.directories[number], len(options.directories)
    return Slab(
        path,
        plan_slab(path, options.capacity_bytes // count, options.value_bytes),
        files,
        threads=options.threads,
        direct=options.direct,
        durable=options.durable,
        is_ours=partial(_is_home, number=number, count=count),
    )


def _is_home(key: bytes, *, number: int, count: int) -> bool:
    return home_of(key, count) == number


def _sum_stats(parts: list[TierStats]) -> TierStats:
    failures: Counter[str] = Counter()
    for part in parts:
        failures.update(part.failures)
    return TierStats(
        kind=parts[0].kind,
        used_bytes=sum(part.used_bytes for part in parts),
        capacity_bytes=sum(part.capacity_bytes for part in parts),
        num_values=sum(part.num_values for part in parts),
        pinned_bytes=sum(part.pinned_bytes for part in parts),
        leases=sum(part.leases for part in parts),
        reservations=sum(part.reservations for part in parts),
        hits=sum(part.hits for part in parts),
        misses=sum(part.misses for part in parts),
        puts=sum(part.puts for part in parts),
        evictions=sum(part.evictions for part in parts),
        failures=dict(failures),
        reachable=any(part.reachable for part in parts),
    )
