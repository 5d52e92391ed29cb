"""The mooncake tier on a real master and segment, over TCP. In CI one case; the contract, with a new client a test that
takes half a second to set up, in `full`."""

from collections.abc import Iterator

import pytest
from servers.kit import LARGE, RemoteContract, get, opened, put, soon
from servers.mooncake import MooncakeServer

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.errors import ConfigError
from pdxfer.store.base import Outcome
from pdxfer.store.open import open_tier
from pdxfer.testing.tier_kit import key_of, until, value_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[MooncakeServer]:
    with MooncakeServer() as running:
        yield running


@pytest.mark.full
class TestContract(RemoteContract):
    """The promises of every tier."""

    scans = False

    @pytest.fixture(autouse=True)
    def _on(self, server: MooncakeServer) -> None:
        self.url = server.url()


async def test_a_master_that_is_killed_is_found_again(server: MooncakeServer) -> None:
    async with opened(server.url()) as tier:
        await put(tier, "before", num_bytes=LARGE)
        server.kill()
        assert await tier.get(key_of("before"), SYSTEM_CLOCK.now() + 0.3) is None
        assert not tier.stats().reachable
        server.start()
        await until(lambda: tier.stats().reachable, "the master to be found", 10.0)
        assert await tier.put(key_of("after"), [value_of("after", LARGE)], soon()) is Outcome.STORED
        assert await get(tier, "after") == value_of("after", LARGE)


async def test_a_url_without_the_metadata_server_is_refused() -> None:
    with pytest.raises(ConfigError, match="metadata"):
        await open_tier(TierConfig(url="mooncake://a:1"), SYSTEM_CLOCK)
