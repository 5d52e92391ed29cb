"""The memcached tier on real servers (apt), alone and several side by side."""

import asyncio
from collections.abc import Iterator

import pytest
from servers.kit import LARGE, MIB, RemoteContract, get, opened, put, soon, works
from servers.memcached import MemcachedServer
from servers.proxy import FaultyProxy

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.errors import ConfigError
from pdxfer.store.base import Outcome
from pdxfer.store.open import open_tier
from pdxfer.testing.tier_kit import key_of, until, value_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[MemcachedServer]:
    with MemcachedServer() as running:
        yield running


class TestContract(RemoteContract):
    """The promises of every tier."""

    @pytest.fixture(autouse=True)
    def _on(self, server: MemcachedServer) -> None:
        self.url = server.url()


@pytest.mark.parametrize(("item_size", "num_items"), [("1m", 4), ("8m", 4), ("512k", 7)])
async def test_the_servers_item_size_is_found_out(item_size: str, num_items: int) -> None:
    """Values are cut to it, never above 1 MiB; deleting leaves no piece."""
    with MemcachedServer("-m", "64", "-I", item_size, "-o", "slab_chunk_max=256") as server:
        async with opened(server.url()) as tier:
            await put(tier, "k", num_bytes=LARGE)
            assert server.num_items() == num_items
            assert await get(tier, "k") == value_of("k", LARGE)
            assert await tier.delete([key_of("k")], soon()) == 1
            assert server.num_items() == 0


@pytest.mark.parametrize("damage", ["missing", "foreign head", "short head"])
async def test_a_damaged_value_is_a_counted_miss_and_can_be_stored_again(server: MemcachedServer, damage: str) -> None:
    prefix = f"{damage.replace(' ', '-')}:"
    async with opened(server.url(), prefix=prefix) as tier:
        await put(tier, "k", num_bytes=LARGE)
        head = f"{prefix}{{{key_of('k').hex()}}}"
        match damage:
            case "missing":
                names = [name for name in server.names() if name.startswith(f"{head}:") and name.endswith(":2")]
                assert len(names) == 1 and server.ask(f"md {names[0]}").startswith(b"HD")
            case "foreign head":
                assert server.ask(f"ms {head} 80\r\n{'x' * 80}").startswith(b"HD")
            case _:
                assert server.ask(f"ms {head} 3 F3\r\nabc").startswith(b"HD")
        assert await get(tier, "k") is None
        assert tier.stats().failures == {"damaged": 1}
        await put(tier, "k", num_bytes=LARGE)
        assert await get(tier, "k") == value_of("k", LARGE)


@pytest.mark.parametrize("num_bytes", [2 * MIB + MIB // 2, 3 * MIB])
async def test_what_a_writer_leaves_unfinished_expires(num_bytes: int) -> None:
    """Killed in the middle of the head, whose bytes go last, or just before the end of it."""
    with MemcachedServer() as server, FaultyProxy(server.port) as proxy:
        async with opened(f"memcached://127.0.0.1:{proxy.port}") as tier:
            proxy.hold_after(num_bytes)
            writing = asyncio.ensure_future(tier.put(key_of("k"), [value_of("k", LARGE)], soon()))
            await until(lambda: len(list(server.names())) == 3, "all pieces but the head to be there")
            proxy.set("cut")
            assert await writing is Outcome.FAILED
            names = list(server.names())
            assert len(names) == 3
            assert all(60 < int(server.ask(f"mg {name} t")[4:-2]) < 200 for name in names)
        async with opened(server.url()) as tier:
            await put(tier, "k", num_bytes=LARGE)
            assert await get(tier, "k") == value_of("k", LARGE)
            assert sum(server.ask(f"mg {name} t") == b"HD t-1\r\n" for name in server.names()) == 4


async def test_a_server_that_evicts_gives_whole_values_or_misses() -> None:
    """Forty values where twenty fit, pieces evicted one by one."""
    with MemcachedServer("-m", "64") as server:
        async with opened(server.url()) as tier:
            await put(tier, *range(40), num_bytes=LARGE)
            values = [await get(tier, n) for n in range(40)]
            assert all(value in (None, value_of(n, LARGE)) for n, value in enumerate(values))
            assert 8 <= sum(value is not None for value in values) <= 24
            assert set(tier.stats().failures) <= {"damaged"}


async def test_a_full_server_that_does_not_evict_says_full() -> None:
    with MemcachedServer("-m", "64", "-M") as server:
        async with opened(server.url()) as tier:
            outcome, number = Outcome.STORED, 0
            while outcome is Outcome.STORED and number < 40:
                outcome, number = await tier.put(key_of(number), [value_of(0, LARGE)], soon()), number + 1
            assert outcome is Outcome.FULL and number > 8
            assert await get(tier, 0) == value_of(0, LARGE)
            assert tier.stats().reachable and tier.stats().failures == {"full": 1}


async def test_values_expire(server: MemcachedServer) -> None:
    """Also ttls of more than a month, which memcached takes for a date."""
    for ttl_s in (100.0, 1e7):
        config = TierConfig(url=server.url(), ttl_s=ttl_s, options={"prefix": f"ttl{ttl_s}:"})
        tier = await open_tier(config, SYSTEM_CLOCK)
        await put(tier, "k", num_bytes=2 * MIB)
        answer = server.ask(f"mg ttl{ttl_s}:{{{key_of('k').hex()}}} t")
        assert ttl_s - 3 <= int(answer[4:-2]) <= ttl_s + 1
        await tier.close()


async def test_several_servers_share_the_keys_and_one_may_go() -> None:
    with MemcachedServer() as one, MemcachedServer() as two, MemcachedServer() as three:
        ports = [str(server.port) for server in (one, two, three)]
        async with opened("memcached://" + ",".join(f"127.0.0.1:{port}" for port in ports)) as tier:
            await works(tier)
            await put(tier, *range(48))
            shares = [server.num_items() for server in (one, two, three)]
            assert sum(shares) == 48 and min(shares) >= 6
            assert len(await tier.scan(b"", 100, soon())) == 48
            two.kill()
            entries = await tier.lookup([key_of(n) for n in range(48)], soon())
            assert sum(entry is not None for entry in entries) == 48 - shares[1]
            assert not tier.stats().reachable
            two.start()
            await until(lambda: tier.stats().reachable, "the server to be found again", 5.0)
            assert [await get(tier, n) is not None for n in range(48)].count(True) == 48 - shares[1]


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("memcached://", {}, "names no server"),
        ("memcached://me:pw@a", {}, "no users"),
        ("memcached://a", {"prefix": "x y"}, "blanks"),
        ("memcached://a", {"prefix": "x" * 101}, "at most 100"),
        ("memcached://a", {"perfix": "x"}, "did you mean 'prefix'"),
    ],
)
async def test_settings_that_cannot_work_are_said_at_open(url: str, options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match="store.tiers") as caught:
        await open_tier(TierConfig(url=url, options=options), SYSTEM_CLOCK)
    assert says in str(caught.value)
    assert "pw" not in str(caught.value)
