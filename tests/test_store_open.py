"""Tiers by URL: schemes, plug-ins, the shared memory of the host, and what a wrong URL says."""

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from pdxfer.config.store import StoreConfig, TierConfig
from pdxfer.core.errors import ConfigError
from pdxfer.store import open as opening
from pdxfer.store.base import Tier
from pdxfer.store.dram import DramTier
from pdxfer.store.open import BUILT_IN, find_factory, open_tier, open_tiers
from pdxfer.store.remote.url import without_password
from pdxfer.store.shared import SharedDramTier
from pdxfer.testing.fake_clock import FakeClock


class OwnTier(DramTier):
    """A class of a third party; remembers who was closed."""

    closed: list[str] = []

    async def close(self) -> None:
        self.closed.append(self._config.url)
        await super().close()


def small(url: str) -> TierConfig:
    return TierConfig(url=url, capacity_gib=1 / 1024, options={"populate": "false"})


async def test_dram_is_private_memory_unless_the_host_shares() -> None:
    config = StoreConfig(tiers=[small("dram:")])
    [tier] = await open_tiers(config, FakeClock())
    assert isinstance(tier, DramTier)
    await tier.close()
    shared = StoreConfig(tiers=[small("dram:")], shared_memory="/nonexistent/store.sock")
    [tier] = await open_tiers(shared, FakeClock())
    assert isinstance(tier, SharedDramTier) and not tier.stats().reachable
    await tier.close()


async def test_a_class_of_ones_own_by_module_and_name() -> None:
    """With quotas and the pin fraction of the store section."""
    config = StoreConfig(
        tiers=[small(f"{__name__}:OwnTier")], tenant_quota_gib={"a": 0.5 / 1024}, pin_quota_fraction=0.25
    )
    [tier] = await open_tiers(config, FakeClock())
    assert type(tier).__name__ == "OwnTier"
    assert tier._quota == {"a": 1 << 19} and tier._pin_fraction == 0.25
    await tier.close()


async def test_a_scheme_of_a_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint(name="nvram", group="pdxfer.tiers", value=f"{__name__}:OwnTier")
    monkeypatch.setattr(opening, "entry_points", lambda **wanted: EntryPoints([entry]).select(**wanted))
    tier: Tier = await open_tier(small("nvram://somewhere"), FakeClock())
    assert type(tier).__name__ == "OwnTier"
    await tier.close()
    with pytest.raises(ConfigError, match="did you mean 'nvram'"):
        find_factory("nvrm://somewhere")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("reddis://host", "unknown scheme 'reddis'; did you mean 'redis'"),
        ("nonsense://x", "known schemes: az, disk, dram"),
        ("", "unknown scheme"),
        ("no.such.module:Tier", "needs no.such.module:Tier, which cannot be imported"),
        ("pdxfer.store.dram:NoTier", "cannot be imported"),
    ],
)
def test_a_wrong_url_says_what_to_change(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_factory(url)


async def test_what_was_opened_is_closed_if_a_later_tier_cannot_be() -> None:
    OwnTier.closed.clear()
    own = small(f"{__name__}:OwnTier")
    with pytest.raises(ConfigError, match="unknown scheme"):
        await open_tiers(StoreConfig(tiers=[own, small("nonsense:")]), FakeClock())
    assert OwnTier.closed == [own.url]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lok": "true"}, "'lok' .* did you mean lock"),
        ({"lock": "yes"}, "it must be true or false"),
        ({"numa_node": "-1"}, "number of a NUMA node"),
    ],
)
def test_a_wrong_option_of_the_dram_tier_says_what_it_may_be(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DramTier(TierConfig(url="dram:", options=options), FakeClock())


def test_every_built_in_scheme_leads_to_a_file_of_ours() -> None:
    root = Path(opening.__file__).parents[2]
    missing = [
        path for path in BUILT_IN.values() if not (root / (path.partition(":")[0].replace(".", "/") + ".py")).exists()
    ]
    assert not missing


async def test_errors_do_not_show_the_password_of_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a scheme that is misspelt, a library that is missing, or a codec that is unknown."""
    for url in ("redsi://u:s3cr@et@h", "no.such.module:Tier?secret=s3cr@et"):
        with pytest.raises(ConfigError, match="store.tiers: url") as caught:
            find_factory(url)
        assert "s3cr" not in str(caught.value) and "et@" not in str(caught.value)
    assert without_password("redis://u:s3cr@et@h:1/0?x=y") == "redis://u:***@h:1/0"


async def test_the_socket_may_be_below_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a vLLM server that no launcher started, too."""
    monkeypatch.setenv("HOME", "/nonexistent")
    [tier] = await open_tiers(StoreConfig(tiers=[small("dram:")], shared_memory="~/s.sock"), FakeClock())
    assert "/nonexistent/s.sock" in repr(tier)
    await tier.close()
