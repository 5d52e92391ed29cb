"""pdxfer.LLM: what `cache` becomes, what is refused, and that naming the package costs nothing."""

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pdxfer.config.load import find_config, load_config
from pdxfer.config.offline import as_tokens, store_settings, transfer_config
from pdxfer.config.store import StoreConfig, TierConfig
from pdxfer.connector import rpc
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.errors import ConfigError
from pdxfer.node.store_side import StoreSettings, _own
from pdxfer.store.chunk import NewChunk
from pdxfer.store.disk_options import read_options
from pdxfer.store.open import open_tiers
from pdxfer.store.runtime import StoreThread
from pdxfer.store.tiered import TieredStore
from pdxfer.testing.tier_kit import key_of


def test_importing_the_package_imports_neither_torch_nor_vllm() -> None:
    code = "import sys, pdxfer; print({'torch', 'vllm'} & set(sys.modules)); pdxfer.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()" and "no attribute 'nothing'" in done.stderr


def test_cache_becomes_tiers_fastest_first() -> None:
    cache = {"chunk_size": 512, "local_cpu": 2, "local_disk": "/d", "remote_url": "redis://h", "compression": "int8"}
    config = load_config([], store_settings(cache))
    tiers = [(tier.url, tier.capacity_gib, tier.codec) for tier in config.store.tiers]
    assert tiers == [("dram:", 2.0, "raw"), ("file:///d", 0.0, "int8"), ("redis://h", 0.0, "int8")]
    assert config.store.enabled and config.transport.chunk_tokens == 512


def test_nothing_said_keeps_kv_in_memory() -> None:
    assert [tier.url for tier in load_config([], store_settings({})).store.tiers] == ["dram:"]


def test_without_memory_only_the_disk() -> None:
    config = load_config([], store_settings({"local_cpu": False, "local_disk": "/d", "max_local_disk_size": 3}))
    assert [(tier.url, tier.capacity_gib) for tier in config.store.tiers] == [("file:///d", 3.0)]


@pytest.mark.parametrize("name", ["a,b", "50%41", "what?", "k#v", "with blank"])
def test_a_directory_may_have_any_name(name: str) -> None:
    """It is not read as a URL."""
    config = load_config([], store_settings({"local_disk": f"/kv/{name}"}))
    options = read_options(config.store.tiers[1])
    assert options.directories == (f"/kv/{name}",)
    own = _own(StoreSettings(config=config.store, identity={}, subdirectory="rank1", shares=2))
    assert read_options(own.tiers[1]).directories == (f"/kv/{name}/rank1",)


async def test_get_brings_more_chunks_than_a_tier_has_buffers_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is given back before the next one is read."""
    tier = TierConfig(url=f"file://{tmp_path}/kv?buffers_mib=1", capacity_gib=0.05, get_timeout_s=0.2)
    config = StoreConfig(tiers=[tier])

    async def make() -> TieredStore:
        return TieredStore(await open_tiers(config, SYSTEM_CLOCK), config, bytes(16))

    thread = StoreThread(make)
    thread.start(20)
    keys, size = [key_of(number) for number in range(6)], 300 << 10

    async def save(store: TieredStore) -> None:
        for key in keys:
            chunk = NewChunk(key=key, num_tokens=16, parts=[key[:1] * size])
            await store.save(chunk, store.clock.now() + 20)
            await store.writer.quiet(store.clock.now() + 20)

    node = SimpleNamespace(store=SimpleNamespace(thread=thread), chunk_keys=lambda args: keys)
    monkeypatch.setattr(rpc, "_node", lambda: node)
    try:
        await asyncio.wrap_future(thread.submit(save))
        got = await asyncio.to_thread(rpc.StoreRpc().pdxfer_get, [], "", 1)
        assert got == [key[:1] * size for key in keys[1:]]
    finally:
        await asyncio.to_thread(thread.close, 1)


def test_the_connector_is_ours_and_failures_are_recomputed() -> None:
    flags = transfer_config({"config": "cpu-both"})
    assert flags["kv_connector"] == "PdxferConnector" and flags["kv_load_failure_policy"] == "recompute"
    assert flags["kv_connector_extra_config"]["config"] == "cpu-both"


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="local_dsk.*did you mean 'local_disk'"):
        transfer_config({"local_dsk": "/d"})


@pytest.mark.parametrize(
    ("cache", "error"),
    [
        (True, "cache is True: write cache={...} with chunk_size, local_cpu"),
        ({"chunk_size": 100}, "cache: --set transport.chunk_tokens: .*expected int that's a multiple of 16"),
        ({"chunk_size": "many"}, "transport.chunk_tokens: expected int, got str 'many'"),
        ({"local_cpu": "yes"}, "local_cpu is 'yes': expected a number of GiB"),
        ({"local_cpu": -1}, "capacity_gib: expected float >= 0.0"),
        ({"local_disk": True}, "local_disk is True: name a directory"),
        ({"local_disk": "/d", "max_local_disk_size": "10GB"}, "max_local_disk_size is '10GB': expected a number"),
        ({"max_local_disk_size": 10}, "max_local_disk_size without local_disk"),
        ({"compression": "int8"}, "compression is of local_disk and remote_url"),
        ({"local_cpu": False}, "local_cpu is off, and there is no local_disk and no remote_url"),
        ({"config": "cpu-bth"}, "did you mean 'cpu-both'"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_before_the_engine_starts(cache: dict[str, Any], error: str) -> None:
    """Not minutes later, in the log of another process, and not silently."""
    with pytest.raises(ConfigError, match=f"^pdxfer.LLM: .*{error}"):
        transfer_config(cache)


def test_a_path_is_as_good_as_text() -> None:
    """For the configuration and the disk."""
    flags = transfer_config({"config": find_config("cpu-both"), "local_disk": Path("/d")})
    assert flags["kv_connector_extra_config"]["config"] == str(find_config("cpu-both"))
    assert "file:///d" in flags["kv_connector_extra_config"]["set"][1]


def test_token_ids_are_numbers() -> None:
    """Of any library; text is said to need a tokenizer."""
    assert as_tokens(np.array([1, 2])) == [1, 2] and as_tokens((3,)) == [3]
    for wrong in ("hello", 5, [[1, 2]], [1.5]):
        with pytest.raises(ConfigError, match="give a list of token ids"):
            as_tokens(wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_chunk_before_the_first_is_refused() -> None:
    """It would be the last one."""
    import pdxfer

    with pytest.raises(ConfigError, match="start_chunk is -1: chunks are counted from 0"):
        pdxfer.LLM.get(pdxfer.LLM.__new__(pdxfer.LLM), [1], start_chunk=-1)


@pytest.mark.slow
def test_an_engine_that_is_built_cannot_be_wrapped() -> None:
    import pdxfer

    with pytest.raises(ConfigError, match="cannot be wrapped.*when it starts"):
        pdxfer.LLM(object(), cache={})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_transfer_config"):
        pdxfer.LLM(Path("m"), cache={}, kv_transfer_config={})
