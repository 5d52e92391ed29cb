"""Discovery of Redis's topology where nobody answers, or not as redis-py expects: no servers needed."""

import socket
from collections.abc import Iterator

import pytest

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store.base import Outcome
from pdxfer.store.open import open_tier
from pdxfer.store.remote import redis_topology
from pdxfer.store.remote.errors import Reason, ServerError
from pdxfer.store.remote.redis import RedisTier
from pdxfer.store.remote.redis_topology import Discovery
from pdxfer.store.remote.redis_wire import RedisLogin
from pdxfer.store.remote.url import Address
from pdxfer.testing.tier_kit import closing, key_of, until

redis = pytest.importorskip("redis")


@pytest.fixture
def nobody() -> Iterator[int]:
    """A port that refuses connections and is nobody else's meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["cluster=true", "sentinel=mymaster"])
async def test_who_is_away_at_the_start_is_asked_again_and_again(nobody: int, setting: str) -> None:
    """Opening is no error, everything is a miss, and the failures are counted."""
    config = TierConfig(url=f"redis://127.0.0.1:{nobody}?{setting}")
    tier = await open_tier(config, SYSTEM_CLOCK)
    assert isinstance(tier, RedisTier)
    async with closing(tier):
        await until(lambda: tier.stats().failures.get("unreachable", 0) >= 3, "it to be asked again", 10.0)
        assert tier._asking is not None and not tier._asking.done()
        assert set(tier.stats().failures) == {"unreachable"} and not tier.stats().reachable
        assert await tier.put(key_of("k"), [b"x"], SYSTEM_CLOCK.now() + 5) is Outcome.FAILED


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        (redis.exceptions.RedisClusterException("nobody there"), Reason.UNREACHABLE),
        (redis.AuthenticationError("WRONGPASS"), Reason.REFUSED),
        (IndexError("list index out of range"), Reason.UNREACHABLE),
        (TypeError("object of type 'NoneType' has no len()"), Reason.PROTOCOL),
        (OSError("network is down"), Reason.UNREACHABLE),
    ],
)
def test_whatever_redis_py_raises_is_a_failure_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, reason: Reason
) -> None:
    """Also as the cause of what it says in the end."""
    for direct in (True, False):

        def ask(discovery: Discovery, module: object, end: float, direct: bool = direct) -> None:
            if direct:
                raise raised
            raise redis.exceptions.RedisClusterException("cannot be connected") from raised

        monkeypatch.setattr(redis_topology.Discovery, "_ask_cluster", ask)
        address = Address(host="h", port=1)
        discovery = Discovery(addresses=(address,), login=RedisLogin(), tls={}, cluster=True)
        with pytest.raises(ServerError) as caught:
            discovery.ask(SYSTEM_CLOCK.now() + 5)
        expected = reason if direct or reason is Reason.REFUSED else Reason.UNREACHABLE
        assert caught.value.reason is expected and "cluster at h:1" in str(caught.value)
