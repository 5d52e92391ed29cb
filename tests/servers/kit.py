"""Short ways to use a remote tier in tests: opened, with a deadline that comes only if something hangs."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store.base import Outcome, Tier
from pdxfer.store.open import find_factory, open_tier
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.testing.tier_kit import Wanted, key_of, value_of
from pdxfer.testing.tier_suite import TierSuite

MIB = 1 << 20
LARGE = 3 * MIB + 17
"""Four pieces where values are cut at 1 MiB."""


class RemoteContract(TierSuite):
    """What a tier promises whose room is its server's. Subclasses set `url` and `options` in a fixture."""

    survives_restart = True
    capacity_bound = False
    pins = False
    expires = False
    url = ""
    options: dict[str, str] = {}

    def make(self, where: Path, clock: FakeClock, wanted: Wanted) -> Tier:
        config = TierConfig(url=self.url, ttl_s=wanted.ttl_s, options={**self.options, "prefix": prefix_of(where)})
        return find_factory(self.url)(config, clock, **wanted.limits())


def prefix_of(where: Path) -> str:
    """Keeps tests that share a server apart."""
    return hashlib.sha256(str(where).encode()).hexdigest()[:12] + ":"


@asynccontextmanager
async def opened(url: str, **options: str) -> AsyncIterator[Tier]:
    """An opened tier that is closed at the end, with nothing lent."""
    tier = await open_tier(TierConfig(url=url, options=options), SYSTEM_CLOCK)
    try:
        yield tier
    finally:
        await tier.close()
    stats = tier.stats()
    assert (stats.leases, stats.reservations) == (0, 0), stats


def soon() -> float:
    """A deadline that is not the point of the test."""
    return SYSTEM_CLOCK.now() + 10.0


async def put(tier: Tier, *names: object, num_bytes: int = 1000) -> None:
    """Store the values of these names and insist."""
    for name in names:
        assert await tier.put(key_of(name), [value_of(name, num_bytes)], soon()) is Outcome.STORED, tier.stats()


async def get(tier: Tier, name: object) -> bytes | None:
    """A copy of a name's value, or None."""
    lease = await tier.get(key_of(name), soon())
    if lease is None:
        return None
    async with lease:
        return bytes(lease.view)


async def works(tier: Tier) -> None:
    """A small and a large value go and come, and nothing fails."""
    for name, num_bytes in (("small", 100), ("large", LARGE)):
        await put(tier, name, num_bytes=num_bytes)
        assert await get(tier, name) == value_of(name, num_bytes)
    assert await tier.delete([key_of("small"), key_of("large")], soon()) == 2
    assert tier.stats().failures == {}


__all__ = ["LARGE", "MIB", "RemoteContract", "get", "opened", "prefix_of", "put", "soon", "works"]
