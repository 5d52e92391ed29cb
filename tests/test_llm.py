"""pdxfer.LLM: what `cache` becomes, what is refused, and that naming the package costs nothing."""

import subprocess
import sys

import pytest

from pdxfer.config.load import load_config
from pdxfer.config.offline import store_settings, transfer_config
from pdxfer.core.errors import ConfigError


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


def test_the_connector_is_ours_and_failures_are_recomputed() -> None:
    flags = transfer_config({"config": "cpu-both"})
    assert flags["kv_connector"] == "PdxferConnector" and flags["kv_load_failure_policy"] == "recompute"
    assert flags["kv_connector_extra_config"]["config"] == "cpu-both"


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="local_dsk.*did you mean 'local_disk'"):
        transfer_config({"local_dsk": "/d"})


@pytest.mark.slow
def test_an_engine_that_is_built_cannot_be_wrapped() -> None:
    import pdxfer

    with pytest.raises(ConfigError, match="cannot be wrapped.*when it starts"):
        pdxfer.LLM(object(), cache={})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_transfer_config"):
        pdxfer.LLM("m", cache={}, kv_transfer_config={})
