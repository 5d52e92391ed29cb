"""The cloud tiers on real servers: s3 on SeaweedFS, gs on fake-gcs-server, az on Azurite."""

import logging
from collections.abc import Iterator

import pytest
from servers.cloud import AzureServer, GcsServer, S3Server
from servers.kit import LARGE, MIB, RemoteContract, get, opened, put, soon, works

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.errors import ConfigError
from pdxfer.store.base import Outcome
from pdxfer.store.open import open_tier
from pdxfer.testing.tier_kit import key_of, value_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


@pytest.fixture(scope="module")
def gcs() -> Iterator[GcsServer]:
    with GcsServer() as running:
        yield running


@pytest.fixture(scope="module")
def azure() -> Iterator[AzureServer]:
    with AzureServer() as running:
        yield running


class TestS3Contract(RemoteContract):
    """The promises of every tier, on S3."""

    @pytest.fixture(autouse=True)
    def _on(self, s3: S3Server) -> None:
        self.url = s3.url()


class TestGcsContract(RemoteContract):
    """The promises of every tier, on Google's store."""

    @pytest.fixture(autouse=True)
    def _on(self, gcs: GcsServer) -> None:
        self.url = gcs.url()


class TestAzureContract(RemoteContract):
    """The promises of every tier, on Azure's store."""

    @pytest.fixture(autouse=True)
    def _on(self, azure: AzureServer) -> None:
        self.url = azure.url()


async def test_a_wrong_azure_key_is_refused(azure: AzureServer) -> None:
    async with opened(azure.url(key="d3Jvbmc=")) as tier:
        assert not tier.stats().reachable and "refused" in tier.stats().failures


async def test_values_lie_under_the_path_and_are_listed(s3: S3Server) -> None:
    """Two paths of one bucket know nothing of each other; foreign objects are no values."""
    async with opened(s3.url(path="/a/b")) as one, opened(s3.url(path="/a/c")) as two:
        await put(one, *range(5))
        await put(two, 7, num_bytes=LARGE)
        s3.write("a/b/pdxfer/something else", b"x")
        assert [entry.key for entry in await one.scan(b"", 10, soon())] == sorted(key_of(n) for n in range(5))
        assert [entry.num_bytes for entry in await two.scan(b"", 10, soon())] == [LARGE]


async def test_reads_do_not_need_to_know_the_length(s3: S3Server) -> None:
    """Longer and shorter than the one before."""
    async with opened(s3.url(path="/sizes")) as tier:
        sizes = [100, 5 * MIB, 3, 9 * MIB + 1, MIB, MIB + 1]
        for size in sizes:
            await put(tier, size, num_bytes=size)
        for size in [*sizes, *reversed(sizes)]:
            assert await get(tier, size) == value_of(size, size)


@pytest.mark.parametrize("login", [{"secret": "wrong"}, {"key": "nobody"}, {"bucket": "nosuchbucket"}], ids=str)
async def test_what_the_store_refuses_is_said_clearly(
    s3: S3Server, login: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(s3.url(**login)) as tier:
        assert not tier.stats().reachable and "refused" in tier.stats().failures
        assert await tier.put(key_of("k"), [b"x"], soon()) is Outcome.FAILED
        assert await get(tier, "k") is None
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 1
    assert any(word in said[0] for word in ("SignatureDoesNotMatch", "InvalidAccessKeyId", "NoSuchBucket"))
    assert "testsecret" not in caplog.text and "wrong@" not in caplog.text


async def test_a_path_style_login_in_the_options(s3: S3Server) -> None:
    url = f"s3://pdxfer/opt?endpoint=http://127.0.0.1:{s3.port}"
    options = {"access_key_id": "testkey", "secret_access_key": "testsecret12", "region": "us-east-1"}
    async with opened(url, **options) as tier:
        await works(tier)


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("s3://", {}, "must name one bucket"),
        ("s3://a:80/x", {}, "must name one bucket"),
        ("gs://me:pw@b", {}, "credential_path"),
        ("az://c", {}, "needs the account"),
        ("s3://b", {"regoin": "x"}, "did you mean 'region'"),
        ("s3://b", {"anonymous": "perhaps"}, "true or false"),
    ],
)
async def test_settings_that_cannot_work_are_said_at_open(url: str, options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match="store.tiers") as caught:
        await open_tier(TierConfig(url=url, options=options), SYSTEM_CLOCK)
    assert says in str(caught.value)
