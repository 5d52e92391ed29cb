"""The memory tier of the tests keeps the contract it stands in for."""

from pathlib import Path

from pdxfer.store.base import Tier
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.testing.memory_tier import MemoryTier
from pdxfer.testing.tier_kit import Wanted
from pdxfer.testing.tier_suite import TierSuite


class TestMemoryTier(TierSuite):
    """Least recently used, in place, forgotten at close; no quotas, no ages."""

    capacity_bound = False
    pins = False
    expires = False

    def make(self, where: Path, clock: FakeClock, wanted: Wanted) -> Tier:
        return MemoryTier(wanted.config("memory:"), clock, **wanted.limits())
