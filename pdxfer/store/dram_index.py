"""What a DRAM tier holds: values by key, their order of eviction, pins, age, tenants. Pure: no I/O, no waiting.

Every value owns one reference on its piece of the arena; a lease is another one. dram.py drives this on one thread and
adds waiting; the time is always given.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from pdxfer.config.store import Eviction
from pdxfer.memory.arena import Piece
from pdxfer.store.base import Entry
from pdxfer.store.evict import Policy, new_policy
from pdxfer.store.sorted_keys import SortedKeys

NEVER = math.inf


@dataclass(slots=True, kw_only=True)
class Value:
    """One stored value."""

    key: bytes
    piece: Piece
    tenant: str = ""
    created: float
    """By the clock's `now`."""
    created_wall: float
    hits: int = 0
    pinned_until: float = 0.0
    """0: not pinned."""

    @property
    def leased(self) -> bool:
        """Whether somebody reads it now."""
        return self.piece.refs > 1

    def entry(self) -> Entry:
        """As lookup and scan show it."""
        return Entry(
            key=self.key,
            num_bytes=self.piece.num_bytes,
            pinned=self.pinned_until > 0,
            created_wall=self.created_wall,
            hits=self.hits,
            tenant=self.tenant,
        )


class DramIndex:
    """Values and the rules about them. `dropped` hears each value that expired; its piece reference is dropped here."""

    def __init__(
        self,
        *,
        eviction: Eviction,
        ttl_s: float,
        pin_bytes: int,
        limited_tenants: Collection[str] = (),
        dropped: Callable[[Value], None] = lambda value: None,
    ) -> None:
        self._ttl_s = ttl_s
        self._pin_limit = pin_bytes
        self._dropped = dropped
        self._policy = new_policy(eviction)
        self._own_policies: dict[str, Policy] = {tenant: new_policy(eviction) for tenant in limited_tenants}
        self._values: OrderedDict[bytes, Value] = OrderedDict()
        """In order of creation."""
        self._keys = SortedKeys()
        self._pin_ends: list[tuple[float, bytes]] = []
        """Heap of pins with a ttl; entries of pins that were changed since are passed over."""
        self.pinned_bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def tick(self, now: float) -> None:
        """Let values and pins end whose time is over. First thing in every call of the tier."""
        while self._pin_ends and self._pin_ends[0][0] <= now:
            end, key = heapq.heappop(self._pin_ends)
            value = self._values.get(key)
            if value is not None and value.pinned_until == end:
                self.unpin(key)
        while self._ttl_s and self._values:
            oldest = next(iter(self._values.values()))
            if oldest.created + self._ttl_s > now:
                break
            self.remove(oldest.key)
            self._dropped(oldest)

    def find(self, key: bytes) -> Value | None:
        """The value, if it is here."""
        return self._values.get(key)

    def add(self, value: Value) -> None:
        """A value whose key is not here; takes over one reference of its piece."""
        assert value.key not in self._values
        self._values[value.key] = value
        self._keys.add(value.key)
        self._rank(value)

    def use(self, value: Value) -> None:
        """It was read."""
        value.hits += 1
        for policy in self._policies(value.tenant):
            policy.used(value.key)

    def remove(self, key: bytes) -> bool:
        """Forget a value and drop the reference; whether it was here."""
        value = self._values.get(key)
        if value is None:
            return False
        self._unpin(value)
        for policy in self._policies(value.tenant):
            policy.removed(key)
        self._forget(value)
        value.piece.drop()
        return True

    def evict(self, tenant: str | None = None) -> Value | None:
        """Take out the value that goes next, of one limited tenant or of all; None: each is pinned or leased. Its
        reference passes to the caller."""
        chosen = self._policy if tenant is None else self._own_policies[tenant]
        key = chosen.evict(lambda candidate: self._values[candidate].leased)
        if key is None:
            return None
        value = self._values[key]
        for policy in self._policies(value.tenant):
            policy.removed(key)
        self._forget(value)
        return value

    def pin(self, key: bytes, until: float) -> bool:
        """Keep from eviction until then (NEVER: until unpinned). False: not here, or beyond what may be pinned."""
        value = self._values.get(key)
        if value is None:
            return False
        if not value.pinned_until:
            if self.pinned_bytes + value.piece.size > self._pin_limit:
                return False
            self.pinned_bytes += value.piece.size
            for policy in self._policies(value.tenant):
                policy.removed(key)
        value.pinned_until = until
        if until != NEVER:
            heapq.heappush(self._pin_ends, (until, key))
        return True

    def unpin(self, key: bytes) -> bool:
        """Whether it was pinned."""
        value = self._values.get(key)
        if value is None or not value.pinned_until:
            return False
        self._unpin(value)
        self._rank(value)
        return True

    def after(self, key: bytes) -> Iterator[Value]:
        """Values whose keys are greater, in order."""
        return (self._values[found] for found in self._keys.after(key))

    def clear(self) -> None:
        """Forget all."""
        for key in list(self._values):
            self.remove(key)

    def check(self) -> None:
        """Integrity: pins and policies say the same as the values. AssertionError if not."""
        pinned = [value for value in self._values.values() if value.pinned_until]
        assert self.pinned_bytes == sum(value.piece.size for value in pinned) <= self._pin_limit
        assert len(self._policy) == len(self._values) - len(pinned)
        for tenant, policy in self._own_policies.items():
            own = [value for value in self._values.values() if value.tenant == tenant and not value.pinned_until]
            assert len(policy) == len(own)
        assert list(self._keys.after(b"")) == sorted(self._values)
        assert all(value.piece.refs > 0 for value in self._values.values())

    def _policies(self, tenant: str) -> list[Policy]:
        own = self._own_policies.get(tenant)
        return [self._policy] if own is None else [self._policy, own]

    def _rank(self, value: Value) -> None:
        for policy in self._policies(value.tenant):
            policy.added(value.key, value.piece.size)

    def _unpin(self, value: Value) -> None:
        if value.pinned_until:
            self.pinned_bytes -= value.piece.size
            value.pinned_until = 0.0

    def _forget(self, value: Value) -> None:
        del self._values[value.key]
        self._keys.remove(value.key)
