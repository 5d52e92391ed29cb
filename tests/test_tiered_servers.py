"""The tiered store over real servers: what is wrong there is a miss, what happens to them costs no request its time."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Literal

import pytest
from servers.cloud import S3Server
from servers.memcached import MemcachedServer
from servers.process import ServerProcess
from servers.proxy import FaultyProxy
from servers.redis import RedisServer
from test_tiered_faults import DAMAGES
from tiered_kit import IDENTITY, Rig, chunk, key, until

from pdxfer.config.store import StoreConfig, TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store import scrub
from pdxfer.store.base import Outcome
from pdxfer.store.open import open_tier
from pdxfer.store.tiered import TieredStore
from pdxfer.store.transcode import Transcoder
from pdxfer.testing.faulty_tier import FaultyTier

pytestmark = pytest.mark.slow

SERVERS = {
    "redis": lambda: RedisServer("redis"),
    "valkey": lambda: RedisServer("valkey"),
    "memcached": MemcachedServer,
    "s3": S3Server,
}
LARGE = 300_000
"""Bytes that 1 kB/s does not move in time."""
BACK_S = 20.0
"""A server that is back is used again after this at the latest, also on a busy machine (5 s on one that is not)."""


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with SERVERS[request.param]() as running:
        yield running


@asynccontextmanager
async def over(server: ServerProcess, memory: bool) -> AsyncIterator[Rig]:
    """A store with this server as its last tier, below memory or alone."""
    remote = TierConfig(url=server.url(), get_timeout_s=0.5, put_timeout_s=1.0)  # type: ignore[attr-defined]
    settings = [TierConfig(url="dram:", capacity_gib=0.03125), remote] if memory else [remote]
    tiers = [await open_tier(t, SYSTEM_CLOCK) for t in settings]
    store = TieredStore(tiers, StoreConfig(tiers=settings), IDENTITY)
    await store.open()
    try:
        yield Rig(store, [FaultyTier(t) for t in tiers])
    finally:
        await store.close(store.clock.now() + 5)


async def test_wrong_values_on_the_server(server: ServerProcess) -> None:
    """Each damage: a counted miss, removed, and a fresh save is good again."""
    async with over(server, memory=False) as r:
        tier = r.tiers[0].inner
        good = bytes(Transcoder(IDENTITY).raw_frame(chunk("a")))
        await tier.delete([key("a")], r.soon)
        for number, (name, damage) in enumerate(DAMAGES.items()):
            assert await tier.put(key("a"), [damage(good)], r.soon) is Outcome.STORED, name
            assert await r.load("a") == {}, name
            assert r.store.slots[0].counts["corrupt"] == number + 1, name
        await r.saved("a")
        assert list(await r.load("a")) == ["a"]
        assert [(s.intact, s.broken) for s in await scrub.verify(r.store, lambda *p: None, keys=[key("a")])] == [(1, 0)]
        r.nothing_is_out()


@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_a_server_that_is_away(server: ServerProcess, fault: str) -> None:
    """Saves and loads go on from memory; no request waits beyond its deadline; the server is used again soon."""
    async with over(server, memory=True) as r:
        await r.saved("a", "b")
        server.kill() if fault == "killed" else server.freeze()
        try:
            for name in range(30):
                begin = time.monotonic()
                assert await r.save(name) == ["held"]
                assert (await r.store.lookup([key("a"), key("no")], r.store.clock.now() + 2)).num_chunks == 1
                assert list(await r.load("a", name, "no", within=2)) == ["a", name]
                assert time.monotonic() - begin < 10, "4 s of deadlines, and a busy machine"
            assert not r.store.slots[1].readable
        finally:
            server.start() if fault == "killed" else server.thaw()
        back = time.monotonic()
        await until(lambda: r.store.slots[1].readable, "the server to be used again", BACK_S)
        for count in range(1000):
            await r.saved(f"new {count}")
            if (await r.store.slots[1].lookup([key(f"new {count}")], r.soon) or [None])[0] is not None:
                break
            await asyncio.sleep(0.02)
        assert time.monotonic() - back < BACK_S + 1
        await until(lambda: r.store.slots[1].strays == 0, "given up calls to end")
        r.nothing_is_out()


async def test_two_stores_share_a_server(server: ServerProcess) -> None:
    """What one engine saved, another loads; then from its memory."""
    async with over(server, memory=True) as first, over(server, memory=True) as second:
        await first.saved(*range(10))
        assert len(await second.load(*range(10))) == 10
        await second.settled()
        assert (await second.load(0))[0] == "dram"


# ---- one kind, more faults -------------------------------------------------------------------------------------------


@asynccontextmanager
async def redis_below(url: str) -> AsyncIterator[Rig]:
    """Memory over a Redis at this URL."""
    settings = [
        TierConfig(url="dram:", capacity_gib=0.03125),
        TierConfig(url=url, get_timeout_s=0.3, put_timeout_s=0.5, promote=False),
    ]
    tiers = [await open_tier(t, SYSTEM_CLOCK) for t in settings]
    store = TieredStore(tiers, StoreConfig(tiers=settings), IDENTITY)
    await store.open()
    try:
        yield Rig(store, [FaultyTier(t) for t in tiers])
    finally:
        await store.close(store.clock.now() + 5)


async def forget(r: Rig, *names: object) -> None:
    """Memory drops them."""
    await r.store.slots[0].delete([key(n) for n in names], r.soon)
    r.store.events.evict("dram", [key(n) for n in names])


@pytest.mark.parametrize("mode", ["freeze", "slow", "cut"])
async def test_a_network_that_misbehaves(mode: Literal["freeze", "slow", "cut"]) -> None:
    """Frozen, 1 kB/s, cut: requests end by their deadlines, then by none; afterwards all is as before."""
    with RedisServer("valkey") as server, FaultyProxy(server.port) as proxy:
        async with redis_below(f"redis://127.0.0.1:{proxy.port}") as r:
            await r.saved("far", size=LARGE)
            await forget(r, "far")
            assert await r.load("far", size=LARGE) == {"far": "redis"}
            proxy.set(mode)
            for name in range(10):
                begin = time.monotonic()
                assert await r.save(name, size=LARGE) == ["held"]
                assert await r.load("far", within=0.3, size=LARGE) == {}
                assert await r.load(name, size=LARGE) == {name: "dram"}
                assert time.monotonic() - begin < 10
            proxy.set("pass")
            await until(lambda: r.store.slots[1].readable, "the server to be used again", BACK_S)
            assert await r.load("far", size=LARGE) == {"far": "redis"}
            await r.settled()
            await until(lambda: r.store.slots[1].strays == 0, "given up calls to end")
            r.nothing_is_out()


async def test_a_full_server_still_serves() -> None:
    """It takes no more; what it has is read."""
    with RedisServer("valkey", "--maxmemory", "6mb", "--maxmemory-policy", "noeviction") as server:
        async with redis_below(server.url()) as r:
            await r.saved(*range(40), size=LARGE)
            stored = r.store.slots[1].counts["stored"]
            assert 5 <= stored < 40
            await forget(r, *range(40))
            there = await r.load(*range(40), size=LARGE)
            assert set(there.values()) == {"redis"} and len(there) == stored
            r.nothing_is_out()


async def test_a_server_that_evicts_half_of_our_keys() -> None:
    """Pieces go one by one and nobody tells: whole chunks or misses, and they can be saved again."""
    with RedisServer("valkey", "--maxmemory", "8mb", "--maxmemory-policy", "allkeys-random") as server:
        async with redis_below(server.url()) as r:
            for name in range(40):
                await r.saved(name, size=LARGE)
            await forget(r, *range(40))
            there = await r.load(*range(40), size=LARGE)
            assert 5 <= len(there) < 40
            gone = next(n for n in range(40) if n not in there)
            await r.saved(gone, size=LARGE)
            await forget(r, gone)
            assert list(await r.load(gone, size=LARGE)) == [gone]
            r.nothing_is_out()


async def test_a_wrong_password_is_a_tier_that_is_away() -> None:
    """The store starts and serves from memory."""
    with RedisServer("valkey", "--requirepass", "right") as server:
        async with redis_below(server.url(login=":wrong@")) as r:
            await r.saved("a", "b", "c", "d", size=LARGE)
            assert list(await r.load("a", "b", size=LARGE)) == ["a", "b"]
            assert not r.store.slots[1].tier.stats().reachable
            r.nothing_is_out()
