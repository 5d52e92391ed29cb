"""The disk tier keeps every promise of tiers; see test_tier_disk_crash.py for what it survives."""

from pathlib import Path

from pdxfer.store.base import Tier
from pdxfer.store.disk import DiskTier
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.testing.tier_kit import MIB, Wanted
from pdxfer.testing.tier_suite import TierSuite


class TestDiskTier(TierSuite):
    """O_DIRECT where the test directory takes it."""

    survives_restart = True
    capacity_bytes = 12 * MIB

    def make(self, where: Path, clock: FakeClock, wanted: Wanted) -> Tier:
        return DiskTier(wanted.config(f"file://{where}/kv"), clock, **wanted.limits())
