"""The DRAM tier: the suite, and what is its own."""

from pathlib import Path

from pdxfer.store.base import Tier
from pdxfer.store.dram import DramTier
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.testing.tier_kit import Wanted
from pdxfer.testing.tier_suite import TierSuite


class TestDramTier(TierSuite):
    in_place = True

    def make(self, where: Path, clock: FakeClock, wanted: Wanted) -> Tier:
        return DramTier(wanted.config("dram:"), clock, **wanted.limits())
