"""The lmdb tier keeps every promise of tiers, its capacity as du sees it, and its values through kill -9."""

from pathlib import Path

import pytest

from pdxfer.store.base import Tier
from pdxfer.store.lmdb_tier import LmdbTier
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.testing.tier_kit import MIB, Wanted
from pdxfer.testing.tier_suite import TierSuite


@pytest.mark.slow
class TestLmdbTier(TierSuite):
    survives_restart = True
    capacity_bytes = 24 * MIB

    def make(self, where: Path, clock: FakeClock, wanted: Wanted) -> Tier:
        return LmdbTier(wanted.config(f"lmdb://{where}/kv"), clock, **wanted.limits())
