"""The index of a local tier in DRAM: which values there are, pins, quotas, age; who goes first by evict.py.

Pure and single-threaded: used by disk_local.py on the event loop, no I/O. The medium (slab, LMDB, SQLite) keeps the
same facts durably and rebuilds this at open.
"""

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import xxhash

from pdxfer.config.store import Eviction
from pdxfer.store.base import Entry
from pdxfer.store.disk_space import Extent
from pdxfer.store.evict import new_policy

TENANT_BYTES = 32
"""Of a tenant's name as it is kept; longer ones end in a digest."""
FOREVER = math.inf


@dataclass(slots=True, eq=False, kw_only=True)
class Record:
    """One value: where it is and what is known of it."""

    key: bytes
    num_bytes: int
    tenant: str = ""
    created_wall: float = 0.0
    pin_until: float = 0.0
    """Wall seconds; 0: not pinned, inf: until unpinned."""
    digest: int = 0
    """xxh3-64 of the value."""
    generation: int = 0
    """Counts up with every value written to this place; tells a reused slot from the old one."""
    slot: int = -1
    extents: tuple[Extent, ...] = ()
    hits: int = 0
    readers: int = 0
    """Threads reading the place now; it is not reused before they end."""
    errors: int = 0
    """Reads in a row that the medium refused."""
    epoch: int = 0
    """Which attachment of the medium gave it its place."""
    dead: bool = False
    """Evicted, deleted, late or replaced: its entry must not be written any more."""


def kept_tenant(tenant: str) -> str:
    """The tenant's name as it is kept with the value."""
    if len(tenant.encode()) <= TENANT_BYTES:
        return tenant
    head = tenant.encode()[: TENANT_BYTES - 17].decode("utf-8", "ignore")
    return f"{head}~{xxhash.xxh3_64_hexdigest(tenant.encode())}"


class Index:
    """Values by key. `unit_bytes` is what room is given out in."""

    def __init__(
        self,
        *,
        capacity_bytes: int,
        unit_bytes: int,
        tenant_quota: Mapping[str, int],
        pin_fraction: float,
        ttl_s: float,
        eviction: Eviction,
    ) -> None:
        self.used_bytes = 0
        self._unit_bytes = unit_bytes
        self._pin_bytes = int(capacity_bytes * pin_fraction)
        self._quota = {kept_tenant(tenant): quota for tenant, quota in tenant_quota.items()}
        self._ttl_s = ttl_s
        self._values: dict[bytes, Record] = {}
        self._policy = new_policy(eviction)
        self._ages: list[tuple[float, bytes]] = []
        """When each was made, and its key, in this order (the wall clock may step back); with a ttl only."""
        self._pinned: dict[bytes, Record] = {}
        """Known neither to the policy nor to the ages."""
        self._pinned_room = 0
        """Of all in `_pinned`."""
        self._next_unpin = FOREVER
        self._tenants: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._values.values())

    def room_of(self, num_bytes: int) -> int:
        """Bytes of the medium a value occupies."""
        return -(-num_bytes // self._unit_bytes) * self._unit_bytes

    def find(self, key: bytes, wall: float) -> Record | None:
        """The value, unless it is too old."""
        record = self._values.get(key)
        return None if record is None or self._too_old(record, wall) else record

    def placed(self, record: Record) -> None:
        """Room was given to it."""
        self._count(record, self.room_of(record.num_bytes))

    def freed(self, record: Record) -> None:
        """Its room came back."""
        self._count(record, -self.room_of(record.num_bytes))

    def add(self, record: Record) -> None:
        """A placed value has become visible."""
        assert record.key not in self._values and not record.dead, record
        self._values[record.key] = record
        if record.pin_until:
            self._keep(record)
        else:
            self._rank(record)

    def remove(self, record: Record) -> None:
        """It is not visible any more."""
        del self._values[record.key]
        record.dead = True
        self._unrank(record)
        self._let_go(record)

    def used(self, record: Record) -> None:
        """It was read."""
        record.hits += 1
        self._policy.used(record.key)

    def expired(self, wall: float) -> list[Record]:
        """Values beyond their ttl: all that are there and that `find` does not show at this time."""
        if not self._ttl_s:
            return []
        self._end_pins(wall)
        num_gone = bisect_right(self._ages, wall, key=lambda age: age[0] + self._ttl_s)
        return [self._values[key] for _, key in self._ages[:num_gone]]

    def victim(self, wall: float, tenant: str | None = None) -> Record | None:
        """Who goes first, of this tenant or of all, to be removed by the caller; None: all are pinned or being read."""
        self._end_pins(wall)

        def stays(key: bytes) -> bool:
            record = self._values[key]
            return bool(record.readers) or (tenant is not None and record.tenant != tenant)

        key = self._policy.evict(stays)
        return None if key is None else self._values[key]

    # -- pins and quotas ----------------------------------------------------------------------------------------------

    def pinned_bytes(self, wall: float) -> int:
        """Room of the values that are pinned now. Changes nothing; any thread."""
        if wall < self._next_unpin:
            return self._pinned_room
        return sum(self.room_of(record.num_bytes) for record in list(self._pinned.values()) if record.pin_until > wall)

    def pin(self, record: Record, until: float, wall: float) -> bool:
        """Whether the quota allows it; a later call replaces the time."""
        self._end_pins(wall)
        if record.key not in self._pinned and self._pinned_room + self.room_of(record.num_bytes) > self._pin_bytes:
            return False
        record.pin_until = until
        self._unrank(record)
        self._keep(record)
        return True

    def unpin(self, record: Record) -> None:
        """It may go again."""
        record.pin_until = 0.0
        if self._let_go(record):
            self._rank(record)

    def over_quota(self, tenant: str, num_bytes: int) -> bool:
        """Whether the tenant has no room left for a value of this size."""
        quota = self._quota.get(tenant)
        return quota is not None and self._tenants.get(tenant, 0) + self.room_of(num_bytes) > quota

    def never_fits(self, tenant: str, num_bytes: int) -> bool:
        """Whether one such value exceeds all that the tenant may keep."""
        return tenant in self._quota and self.room_of(num_bytes) > self._quota[tenant]

    # -- showing ----------------------------------------------------------------------------------------------------

    def entry(self, record: Record, wall: float) -> Entry:
        """As lookup and scan show it."""
        return Entry(
            key=record.key,
            num_bytes=record.num_bytes,
            pinned=record.pin_until > wall,
            created_wall=record.created_wall,
            hits=record.hits,
            tenant=record.tenant,
        )

    def scan(self, after: bytes, limit: int, wall: float) -> list[Entry]:
        """The first `limit` entries beyond `after`; fewer: there are no more."""
        shown = (key for key, record in self._values.items() if key > after and not self._too_old(record, wall))
        return [self.entry(self._values[key], wall) for key in heapq.nsmallest(limit, shown)]

    def _rank(self, record: Record) -> None:
        """It may go."""
        self._policy.added(record.key, record.num_bytes)
        if self._ttl_s:
            insort(self._ages, (record.created_wall, record.key))

    def _unrank(self, record: Record) -> None:
        """It may not, or went."""
        self._policy.removed(record.key)
        age = (record.created_wall, record.key)
        place = bisect_left(self._ages, age)
        if self._ages[place : place + 1] == [age]:
            del self._ages[place]

    def _keep(self, record: Record) -> None:
        if record.key not in self._pinned:
            self._pinned[record.key] = record
            self._pinned_room += self.room_of(record.num_bytes)
        self._next_unpin = min(self._next_unpin, record.pin_until)

    def _let_go(self, record: Record) -> bool:
        """Whether it was pinned."""
        if self._pinned.pop(record.key, None) is None:
            return False
        self._pinned_room -= self.room_of(record.num_bytes)
        return True

    def _end_pins(self, wall: float) -> None:
        """Pins whose time is over."""
        if wall < self._next_unpin:
            return
        for record in [record for record in self._pinned.values() if record.pin_until <= wall]:
            self.unpin(record)
        self._next_unpin = min((record.pin_until for record in self._pinned.values()), default=FOREVER)

    def _too_old(self, record: Record, wall: float) -> bool:
        return bool(self._ttl_s) and record.created_wall + self._ttl_s <= wall and record.pin_until <= wall

    def _count(self, record: Record, room: int) -> None:
        self.used_bytes += room
        left = self._tenants.get(record.tenant, 0) + room
        if left:
            self._tenants[record.tenant] = left
        else:
            self._tenants.pop(record.tenant, None)
