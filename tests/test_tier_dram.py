"""The DRAM tier: the suite, and what is its own."""

from pathlib import Path

from pdxfer.config.store import TierConfig
from pdxfer.store.base import Outcome, Tier
from pdxfer.store.disk_index import kept_tenant
from pdxfer.store.dram import DramTier
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.testing.tier_kit import MIB, Wanted, key_of
from pdxfer.testing.tier_suite import TierSuite


class TestDramTier(TierSuite):
    in_place = True

    def make(self, where: Path, clock: FakeClock, wanted: Wanted) -> Tier:
        return DramTier(wanted.config("dram:"), clock, **wanted.limits())


async def test_a_long_named_tenants_quota_holds_for_what_comes_from_a_disk() -> None:
    """There its name is kept shortened."""
    name = "a tenant whose name is longer than disks keep names"
    config = TierConfig(url="dram:", capacity_gib=4 * MIB / (1 << 30), options={"populate": "false"})
    tier = DramTier(config, FakeClock(), tenant_quota={name: MIB})
    await tier.open()
    try:
        for number in range(4):
            whose = kept_tenant(name) if number % 2 else name
            assert await tier.put(key_of(number), [bytes(MIB // 2)], 2000.0, whose) is Outcome.STORED
        assert tier.stats().num_values == 2
        tier.check()
    finally:
        await tier.close()
