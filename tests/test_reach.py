"""Spills go where other engines find them: which tiers those are, and that the store asks no other."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tiered_kit import IDENTITY, chunk, key, rig, until

from pdxfer.config.store import StoreConfig, TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store.base import Outcome
from pdxfer.store.chunk import SaveResult
from pdxfer.store.open import open_tier
from pdxfer.store.reach import in_reach, others_read
from pdxfer.store.tiered import TieredStore
from pdxfer.testing.faulty_tier import FaultyTier
from pdxfer.testing.memory_tier import MemoryTier


@asynccontextmanager
async def private_memory_and(server: FaultyTier, **settings: bool) -> AsyncIterator[TieredStore]:
    """A store of this engine's own memory (the real tier) and a server."""
    tiers = [
        TierConfig(url="dram:", capacity_gib=4 / 1024, options={"populate": "false"}),
        TierConfig(url="redis:", **settings),  # type: ignore[arg-type]
    ]
    memory = await open_tier(tiers[0], SYSTEM_CLOCK)
    store = TieredStore([memory, server], StoreConfig(tiers=tiers), IDENTITY)
    await store.open()
    try:
        yield store
    finally:
        await store.close(SYSTEM_CLOCK.now() + 5)


async def spill(store: TieredStore, name: str) -> SaveResult:
    return await store.save(chunk(name), SYSTEM_CLOCK.now() + 20, reserved=True)


async def test_a_spill_goes_where_another_engine_finds_it() -> None:
    """Our own memory is nobody else's: that it has room, or has the chunk already, does not count."""
    inner = MemoryTier(TierConfig(url="redis:"), kind="redis")
    server = FaultyTier(inner)
    async with private_memory_and(server, admit_second_sight=True) as store:
        assert (await store.save(chunk("a"), SYSTEM_CLOCK.now() + 20)).held
        await until(lambda: store.writer.pending == 0, "copies to end")
        assert not inner.values
        for name, said in (("a", Outcome.STORED), ("new", Outcome.STORED), ("a", Outcome.ALREADY)):
            result = await spill(store, name)
            assert result.held and result.tiers == {"redis": said}
        assert set(inner.values) == {key("a"), key("new")}
        server.down = True
        assert not (await spill(store, "b")).held


async def test_servers_come_before_memory_that_only_this_host_shares() -> None:
    async with rig() as r:
        assert [slot.name for slot in in_reach(r.store.slots)] == ["redis", "dram"]
        r.tiers[2].down = True
        result = await r.store.save(chunk("a"), r.soon, reserved=True)
        assert result.held and result.tiers == {"redis": Outcome.FAILED, "dram": Outcome.STORED}
    async with rig(kinds=("dram", "disk", "redis", "peer")) as r:
        assert [slot.name for slot in in_reach(r.store.slots)] == ["dram", "disk", "redis"]


@pytest.mark.parametrize(
    ("urls", "shared_memory", "reached"),
    [
        (["dram:", "disk:/d"], "", False),
        (["dram:", "nixl-posix:///d", "nixl-gds:///d"], "", False),
        (["dram:", "redis://h"], "", True),
        (["disk:/d", "my.tiers:Mine"], "", True),
        (["dram:"], "/run/store.sock", True),
        (["disk:/d"], "/run/store.sock", False),
        (["dram:", "peer:"], "", True),
        (["nixl-gds:///d", "peer:"], "", False),
    ],
)
def test_there_are_spills_only_where_another_engine_reads_a_tier(
    urls: list[str], shared_memory: str, reached: bool
) -> None:
    config = StoreConfig(tiers=[TierConfig(url=url) for url in urls], shared_memory=shared_memory)
    assert others_read(config) is reached
