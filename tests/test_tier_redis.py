"""The redis tier on real servers: Redis (apt) and Valkey (wheel), with users, TLS, a cluster and a sentinel."""

import asyncio
import logging
from collections.abc import Iterator

import pytest
from servers.kit import LARGE, MIB, RemoteContract, get, opened, put, soon, works
from servers.process import free_port
from servers.proxy import FaultyProxy
from servers.redis import Certificates, RedisServer, Sentinel, cluster, move_all_slots

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.errors import ConfigError
from pdxfer.store.base import Outcome
from pdxfer.store.open import open_tier
from pdxfer.store.remote.pieces import PIECE_BYTES
from pdxfer.store.remote.redis import RedisTier
from pdxfer.testing.tier_kit import key_of, until, value_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["redis", "valkey"])
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with RedisServer(request.param) as running:
        yield running


@pytest.fixture(scope="module")
def valkey() -> Iterator[RedisServer]:
    with RedisServer("valkey") as running:
        running.ask("ACL", "SETUSER", "kv", "on", ">secret", "~*", "+@all")
        yield running


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


class TestContract(RemoteContract):
    """The promises of every tier."""

    @pytest.fixture(autouse=True)
    def _on(self, server: RedisServer) -> None:
        self.url = server.url()


# -- pieces -----------------------------------------------------------------------------------------------------------


async def test_a_value_lies_in_pieces_of_at_most_a_mebibyte_and_delete_leaves_none(server: RedisServer) -> None:
    server.ask("FLUSHALL")
    async with opened(server.url()) as tier:
        await put(tier, "k", num_bytes=LARGE)
        assert server.ask("DBSIZE") == b":4\r\n"
        name = "pdxfer:{" + key_of("k").hex() + "}"
        assert server.ask("STRLEN", name) == b":%d\r\n" % PIECE_BYTES
        assert server.ask("TTL", name) == b":-1\r\n"
        assert await tier.delete([key_of("k")], soon()) == 1
        assert server.ask("DBSIZE") == b":0\r\n"


@pytest.mark.parametrize("damage", ["missing", "short", "flipped", "swapped", "foreign head", "short head"])
async def test_a_damaged_value_is_a_counted_miss_and_can_be_stored_again(server: RedisServer, damage: str) -> None:
    server.ask("FLUSHALL")
    async with opened(server.url()) as tier:
        await put(tier, "k", "other", num_bytes=LARGE)
        head = "pdxfer:{" + key_of("k").hex() + "}"
        names = sorted(name for name in _names(server) if name.startswith(head + ":"))
        match damage:
            case "missing":
                server.ask("DEL", names[1])
            case "short":
                server.ask("SETRANGE", names[2], "20000", "x" * 10)
            case "flipped":
                server.ask("SETRANGE", names[0], "12", "?!?")
            case "swapped":
                server.ask("RENAME", names[0], "t"), server.ask("RENAME", names[1], names[0])
                server.ask("RENAME", "t", names[1])
            case "foreign head":
                server.ask("COPY", "pdxfer:{" + key_of("other").hex() + "}", head, "REPLACE")
            case _:
                server.ask("SET", head, "something else")
        assert await get(tier, "k") is None
        assert tier.stats().failures == {"damaged": 1}
        assert await get(tier, "other") == value_of("other", LARGE)
        assert await tier.put(key_of("k"), [value_of("k", LARGE)], soon()) is Outcome.STORED
        assert await get(tier, "k") == value_of("k", LARGE)


def _names(server: RedisServer) -> list[str]:
    lines = server.ask("KEYS", "*").decode().split("\r\n")
    return [line for line in lines if line.startswith("pdxfer:")]


@pytest.mark.parametrize("num_bytes", [2 * MIB + MIB // 2, 3 * MIB])
async def test_what_a_writer_leaves_unfinished_expires(server: RedisServer, num_bytes: int) -> None:
    """Killed in the middle of the head, whose bytes go last, or just before the end of it: nothing stays for ever that
    no head leads to. The next writer of the key is not hindered."""
    server.ask("FLUSHALL")
    with FaultyProxy(server.port) as proxy:
        async with opened(f"redis://127.0.0.1:{proxy.port}") as tier:
            proxy.hold_after(num_bytes)
            writing = asyncio.ensure_future(tier.put(key_of("k"), [value_of("k", LARGE)], soon()))
            await until(lambda: len(_names(server)) == 3, "all pieces but the head to be there")
            proxy.set("cut")
            assert await writing is Outcome.FAILED
            names = _names(server)
            assert len(names) == 3
            assert all(60 < int(server.ask("TTL", name)[1:-2]) < 200 for name in names)
    async with opened(server.url()) as tier:
        await put(tier, "k", num_bytes=LARGE)
        assert await get(tier, "k") == value_of("k", LARGE)
        lasting = [name for name in _names(server) if server.ask("TTL", name) == b":-1\r\n"]
        assert len(lasting) == 4


async def test_values_expire_as_a_whole(server: RedisServer) -> None:
    server.ask("FLUSHALL")
    tier = await open_tier(TierConfig(url=server.url(), ttl_s=100.0), SYSTEM_CLOCK)
    await put(tier, "k", num_bytes=LARGE)
    left = {int(server.ask("TTL", name)[1:-2]) for name in _names(server)}
    assert len(_names(server)) == 4 and left <= {98, 99, 100}
    await tier.close()


async def test_a_full_server_says_full_and_keeps_no_part_of_the_value(server: RedisServer) -> None:
    server.ask("FLUSHALL")
    server.ask("CONFIG", "SET", "maxmemory", "8mb")
    try:
        async with opened(server.url()) as tier:
            outcome, number = Outcome.STORED, 0
            while outcome is Outcome.STORED and number < 20:
                outcome, number = await tier.put(key_of(number), [value_of(0, LARGE)], soon()), number + 1
            assert outcome is Outcome.FULL
            assert number >= 2
            assert tier.stats().reachable and tier.stats().failures == {"full": 1}
            assert len(_names(server)) == 4 * (number - 1)
            assert await get(tier, 0) == value_of(0, LARGE)
    finally:
        server.ask("CONFIG", "SET", "maxmemory", "0")


# -- who may come in --------------------------------------------------------------------------------------------------


async def test_user_password_and_database(valkey: RedisServer) -> None:
    async with opened(valkey.url(login="kv:secret@", rest="/3")) as tier:
        await works(tier)
        await put(tier, "k")
        assert b"db3:keys=1" in valkey.ask("INFO", "keyspace")


async def test_a_wrong_password_is_said_clearly_and_not_shown(
    valkey: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with opened(valkey.url(login="kv:wr0ng@")) as tier:
        assert await tier.lookup([key_of("k")], soon()) == [None]
        assert await get(tier, "k") is None
        assert await tier.put(key_of("k"), [b"x"], soon()) is Outcome.FAILED
        assert not tier.stats().reachable and "refused" in tier.stats().failures
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 1 and "WRONGPASS" in said[0] and "'kv'" in said[0]
    assert "wr0ng" not in caplog.text and "wr0ng" not in repr(tier)


async def test_the_tier_is_back_when_the_password_is_right(valkey: RedisServer) -> None:
    valkey.ask("ACL", "SETUSER", "late", "on", ">before", "~*", "+@all")
    async with opened(valkey.url(login="late:after@")) as tier:
        assert not tier.stats().reachable
        valkey.ask("ACL", "SETUSER", "late", ">after")
        await until(lambda: tier.stats().reachable, "the tier to log in", 5.0)
        assert await tier.put(key_of("late"), [b"x"], soon()) is Outcome.STORED


async def test_rights_that_are_missing_are_refusals(valkey: RedisServer) -> None:
    valkey.ask("ACL", "SETUSER", "reader", "on", ">r", "~*", "+ping", "+getrange", "+get")
    async with opened(valkey.url(login="reader:r@")) as tier:
        assert await tier.put(key_of("never"), [b"x"], soon()) is Outcome.FAILED
        assert tier.stats().failures == {"refused": 1}


async def test_tls(certificates: Certificates) -> None:
    """Trusted authority; a certificate nobody vouches for is refused; and trusted anyway if told so."""
    with RedisServer("redis", tls=certificates) as server:
        async with opened(server.url("rediss"), tls_ca=str(certificates.ca)) as tier:
            await works(tier)
        async with opened(server.url("rediss")) as tier:
            assert not tier.stats().reachable and tier.stats().failures == {"refused": 1}
        async with opened(server.url("rediss"), tls_verify="false") as tier:
            await works(tier)


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("redis://", {}, "names no server"),
        ("redis://a:99999", {}, "HOST:PORT"),
        ("redis://a:1/zero", {}, "'zero'"),
        ("redis://a?clustre=true", {}, "did you mean 'cluster'"),
        ("redis://a?cluster=maybe", {}, "true or false"),
        ("redis://a", {"connections": "0"}, ">= 1"),
        ("redis://a/1?cluster=true", {}, "neither sentinels nor databases"),
        ("rediss://a", {"tls_ca": "/no/such/file"}, "/no/such/file"),
    ],
)
async def test_settings_that_cannot_work_are_said_at_open(url: str, options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match="store.tiers") as caught:
        await open_tier(TierConfig(url=url, options=options), SYSTEM_CLOCK)
    assert says in str(caught.value)


# -- several servers --------------------------------------------------------------------------------------------------


async def test_several_servers_share_the_keys(server: RedisServer, valkey: RedisServer) -> None:
    server.ask("FLUSHALL")
    valkey.ask("FLUSHALL")
    async with opened(f"redis://127.0.0.1:{server.port},127.0.0.1:{valkey.port}") as tier:
        await put(tier, *range(32))
        assert min(int(one.ask("DBSIZE")[1:-2]) for one in (server, valkey)) >= 8
        entries = await tier.lookup([key_of(n) for n in range(32)], soon())
        assert all(entry is not None for entry in entries)
        assert await tier.delete([key_of(n) for n in range(32)], soon()) == 32


async def test_a_cluster() -> None:
    """Keys lie on all three nodes, each value on one; when slots move, the tier follows."""
    with cluster() as nodes:
        async with opened(nodes[0].url(rest="?cluster=true")) as tier:
            await works(tier)
            await put(tier, *range(24), num_bytes=LARGE)
            held = [int(node.ask("DBSIZE")[1:-2]) // 4 for node in nodes]
            assert min(held) >= 1 and sum(held) == 24
            assert len(await tier.scan(b"", 100, soon())) == 24
            move_all_slots(nodes[0], nodes[1], nodes)
            deadline = SYSTEM_CLOCK.now() + 5.0
            missing = list(range(24))
            while missing and SYSTEM_CLOCK.now() < deadline:
                outcomes = [await tier.put(key_of(n), [value_of(n, LARGE)], soon()) for n in missing]
                missing = [n for n, outcome in zip(missing, outcomes, strict=True) if outcome is Outcome.FAILED]
                await asyncio.sleep(0.01)
            assert [await get(tier, n) for n in range(24)] == [value_of(n, LARGE) for n in range(24)]
            assert set(tier.stats().failures) == {"moved"}
            assert nodes[0].ask("DBSIZE") == b":0\r\n"


async def test_a_cluster_that_is_away_at_the_start_is_found_when_it_comes() -> None:
    with cluster() as nodes, FaultyProxy(nodes[0].port) as proxy:
        proxy.set("cut")
        async with opened(f"redis://127.0.0.1:{proxy.port}?cluster=true") as tier:
            assert await tier.put(key_of("k"), [b"x"], soon()) is Outcome.FAILED and not tier.stats().reachable
            proxy.set("pass")
            await until(lambda: tier.stats().reachable, "the cluster to be found", 5.0)
            assert set(tier.stats().failures) == {"unreachable"}
            await put(tier, *range(24))


async def test_a_cluster_that_refuses_us_or_serves_nothing_yet_is_asked_until_it_does() -> None:
    """A wrong password is said to be one; a node without slots, and one with half of them, may get more."""
    node = RedisServer("valkey", "--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    with node:
        node.ask("CONFIG", "SET", "cluster-require-full-coverage", "no")
        node.ask("ACL", "SETUSER", "kv", "on", ">secret", "~*", "+@all")
        async with opened(node.url(login="kv:wr0ng@", rest="?cluster=true")) as tier:
            await until(lambda: tier.stats().failures.get("refused", 0) >= 2, "it to be asked again", 10.0)
            assert set(tier.stats().failures) == {"refused"}
        async with opened(node.url(login="kv:secret@", rest="?cluster=true")) as tier:
            await until(lambda: tier.stats().failures.get("unreachable", 0) >= 2, "it to be asked again", 10.0)
            node.ask("CLUSTER", "ADDSLOTSRANGE", "0", "8191")
            await until(lambda: tier.stats().reachable, "the first slots to be found", 5.0)
            assert isinstance(tier, RedisTier)
            names = [n for n in range(24) if tier.place(key_of(n)) is None]
            assert 0 < len(names) < 24
            node.ask("CLUSTER", "ADDSLOTSRANGE", "8192", "16383")
            await until(lambda: all(map(tier.place, map(key_of, names))), "the other slots to be found", 5.0)
            await until(lambda: b"cluster_state:ok" in node.ask("CLUSTER", "INFO"), "the cluster to take writes")
            await put(tier, *names)


async def test_a_sentinel_names_the_master_also_after_a_failover() -> None:
    with RedisServer("redis") as master, RedisServer("redis", "--replicaof", f"127.0.0.1 {master.port}") as replica:
        with Sentinel(master) as sentinel:
            async with opened(f"redis://127.0.0.1:{sentinel.port}?sentinel=mymaster") as tier:
                await put(tier, "before", num_bytes=LARGE)
                assert await get(tier, "before") == value_of("before", LARGE)
                deadline = SYSTEM_CLOCK.now() + 15.0
                while b"slave0" not in master.ask("INFO", "replication") and SYSTEM_CLOCK.now() < deadline:
                    await asyncio.sleep(0.02)
                master.kill()
                while SYSTEM_CLOCK.now() < deadline:
                    if await tier.put(key_of("after"), [b"x"], soon()) is Outcome.STORED:
                        break
                    await asyncio.sleep(0.02)
                assert await get(tier, "after") == b"x"
                assert int(replica.ask("DBSIZE")[1:-2]) > 0
