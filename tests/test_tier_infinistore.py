"""The infinistore tier on the real server, over TCP; a pretend RDMA device lets server and client start here."""

from collections.abc import Iterator

import pytest
from servers.infinistore import InfiniStoreServer, pretend_rdma
from servers.kit import LARGE, RemoteContract, get, opened, put, soon

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.errors import ConfigError
from pdxfer.store.base import Outcome
from pdxfer.store.open import open_tier
from pdxfer.testing.tier_kit import key_of, until, value_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[InfiniStoreServer]:
    with InfiniStoreServer() as running:
        pretend_rdma()
        yield running


class TestContract(RemoteContract):
    """The promises of every tier."""

    scans = False

    @pytest.fixture(autouse=True)
    def _on(self, server: InfiniStoreServer) -> None:
        self.url = server.url()


async def test_a_server_that_is_killed_is_found_again(server: InfiniStoreServer) -> None:
    async with opened(server.url()) as tier:
        await put(tier, "before", num_bytes=LARGE)
        server.kill()
        assert await tier.get(key_of("before"), SYSTEM_CLOCK.now() + 0.3) is None
        assert not tier.stats().reachable
        server.start()
        await until(lambda: tier.stats().reachable, "the server to be found", 5.0)
        assert await tier.put(key_of("after"), [value_of("after", LARGE)], soon()) is Outcome.STORED
        assert await get(tier, "after") == value_of("after", LARGE)


async def test_a_url_without_a_server_is_refused() -> None:
    with pytest.raises(ConfigError, match="one server"):
        await open_tier(TierConfig(url="infinistore://"), SYSTEM_CLOCK)
