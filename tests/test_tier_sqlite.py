"""The sqlite tier keeps every promise of tiers, its capacity as du sees it, and its values through kill -9."""

from pathlib import Path

import pytest

from pdxfer.store.base import Tier
from pdxfer.store.sqlite_tier import SqliteTier
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.testing.tier_kit import MIB, Wanted
from pdxfer.testing.tier_suite import TierSuite


@pytest.mark.slow
class TestSqliteTier(TierSuite):
    survives_restart = True
    capacity_bytes = 24 * MIB

    def make(self, where: Path, clock: FakeClock, wanted: Wanted) -> Tier:
        return SqliteTier(wanted.config(f"sqlite://{where}/kv"), clock, **wanted.limits())
