"""Chunks that only memory has and a `write: back` tier should get before memory drops them. Pure; used by writing.py.

The oldest go first and from a fill of BACK_FROM on, so that eviction never waits for a slow tier.
"""

from collections import OrderedDict
from collections.abc import Iterable

from pdxfer.store.base import TierStats

BACK_FROM = 0.75
"""Fill of the front tier from which chunks are written back."""


class WriteBack:
    """One queue a tier, oldest first."""

    def __init__(self, tiers: Iterable[str]) -> None:
        self._dirty: dict[str, OrderedDict[bytes, str]] = {tier: OrderedDict() for tier in tiers}

    @property
    def num_dirty(self) -> int:
        """Chunks that wait, over all tiers."""
        return sum(map(len, self._dirty.values()))

    def add(self, key: bytes, tenant: str) -> None:
        """Memory has it now."""
        for dirty in self._dirty.values():
            dirty[key] = tenant

    def drop(self, keys: Iterable[bytes]) -> dict[str, int]:
        """Memory has them no more; tier → how many it will not get."""
        gone = list(keys)
        return {
            tier: sum(dirty.pop(key, None) is not None for key in gone) for tier, dirty in self._dirty.items() if dirty
        }

    def put_back(self, tier: str, key: bytes, tenant: str) -> None:
        """The tier did not take it, and memory has it still: it is the next one."""
        self._dirty[tier][key] = tenant
        self._dirty[tier].move_to_end(key, last=False)

    def due(self, front: TierStats, everything: bool) -> list[str]:
        """Tiers that should get chunks now."""
        full = not front.capacity_bytes or front.used_bytes >= BACK_FROM * front.capacity_bytes
        return [tier for tier, dirty in self._dirty.items() if dirty and (full or everything)]

    def take(self, tier: str, count: int) -> list[tuple[bytes, str]]:
        """Up to so many of the oldest: key and tenant. They are the caller's now."""
        dirty = self._dirty[tier]
        return [dirty.popitem(last=False) for _ in range(min(count, len(dirty)))]
