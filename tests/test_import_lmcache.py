"""LMCache's settings become ours, and every key is accounted for."""

from pathlib import Path

import pytest
import yaml

from pdxfer.cli import main
from pdxfer.config.lmcache import convert, read
from pdxfer.config.load import load
from pdxfer.core.errors import ConfigError

EXAMPLE = """
chunk_size: 512
local_cpu: true
max_local_cpu_size: 20
local_disk: "file:///var/cache/lmcache/"
max_local_disk_size: 100
remote_url: "redis://cache:6379"
remote_serde: "cachegen"
cache_policy: LFU
save_decode_cache: true
save_unfull_chunk: false
use_layerwise: true
pre_caching_hash_algorithm: sha256_cbor
blocking_timeout_secs: 7
enable_blending: true
blend_recompute_ratios: 0.15
enable_async_loading: true
enable_controller: true
controller_pull_url: "h:8300"
lmcache_instance_id: i0
pd_buffer_size: 1000
chnk_size: 5
extra_config: {enable_nixl_storage: true, nixl_backend: GDS_MT, nixl_path: /mnt/nvme/, nixl_pool_size: 64, foo: 1}
"""


def test_a_whole_file() -> None:
    """What has a counterpart, in our words; the rest by name."""
    out = convert(read(EXAMPLE, "f", {}))
    assert out.tree == {
        "store": {
            "enabled": True,
            "tiers": [
                {"url": "dram:", "capacity_gib": 20.0, "eviction": "lfu"},
                {"url": "file:///var/cache/lmcache", "capacity_gib": 100.0, "eviction": "lfu"},
                {"url": "redis://cache:6379", "codec": "cachegen"},
                {"url": "nixl-gds-mt:///mnt/nvme"},
            ],
            "save_decoded": True,
            "partial_chunks": False,
            "hash_scheme": "sha256",
            "load_timeout_s": 7.0,
        },
        "transport": {"chunk_tokens": 512, "layerwise": True},
    }
    noted = [note.partition(":")[0] for note in out.notes]
    assert noted == [
        "enable_blending", "blend_recompute_ratios", "enable_async_loading", "enable_controller", "controller_pull_url",
        "lmcache_instance_id", "pd_buffer_size", "chnk_size", "extra_config.nixl_pool_size", "extra_config.foo",
    ]  # fmt: skip
    assert noted.count("enable_blending") == 1 and "CacheBlend is not built" in out.notes[0]
    assert out.notes[7] == "chnk_size: no counterpart"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("redis-sentinel://a:1,b:2/main", "redis://a:1,b:2?sentinel=main"),
        ("valkey-cluster://a:1,b:2", "redis://a:1,b:2?cluster=true"),
        ("mooncakestore://m:50051", "mooncake://m:50051"),
        ("infinistore://i:12345", "infinistore://i:12345"),
        ("fs://h:0/mnt/kv/", "file:///mnt/kv"),
        ("azure://container/path", "az://container/path"),
        ("s3://bucket/x?region=eu", "s3://bucket/x?region=eu"),
    ],
)
def test_remote_urls(theirs: str, ours: str) -> None:
    """By scheme."""
    out = convert({"local_cpu": False, "remote_url": theirs})
    assert out.tree["store"]["tiers"] == [{"url": ours, "codec": "raw"}] and not out.notes


def test_what_cannot_be_taken_over_is_said() -> None:
    """No tier, no codec, no chunk of that size, no such policy."""
    out = convert({"remote_url": "lm://h:1", "chunk_size": 100, "cache_policy": "MRU", "numa_mode": "auto"})
    assert out.tree == {"store": {"enabled": True, "tiers": [{"url": "dram:", "capacity_gib": 5.0}]}}
    assert [n.partition(":")[0] for n in out.notes] == ["remote_url", "chunk_size", "cache_policy", "numa_mode"]
    out = convert({"remote_url": "redis://h", "remote_serde": "kivi"})
    assert out.tree["store"]["tiers"][1]["codec"] == "raw" and "stub" in out.notes[0]


def test_the_environment_wins_over_the_file() -> None:
    """As in LMCache's code (its documentation says otherwise)."""
    environ = {"LMCACHE_CHUNK_SIZE": "128", "LMCACHE_LOCAL_CPU": "False", "LMCACHE_CONFIG_FILE": "f", "HOME": "/"}
    assert read("chunk_size: 256\nlocal_disk: /d", "f", environ) == {
        "chunk_size": 128, "local_disk": "/d", "local_cpu": False,
    }  # fmt: skip


def test_the_command_prints_a_file_that_our_loader_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """YAML on stdout, the rest on stderr, errors with exit code 2."""
    theirs, ours = tmp_path / "lmcache.yaml", tmp_path / "ours.yaml"
    theirs.write_text(EXAMPLE)
    assert main.run(["config", "import-lmcache", str(theirs)]) == 0
    out, err = capsys.readouterr()
    assert err.count("not taken over: ") == err.count("\n") == 10
    ours.write_text(out)
    config = load([ours], [], {}).config
    assert config.transport.chunk_tokens == 512 and len(config.store.tiers) == 4

    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(theirs))
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "64")
    assert main.run(["config", "import-lmcache"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["transport"]["chunk_tokens"] == 64

    assert main.run(["config", "import-lmcache", str(tmp_path / "no")]) == 2
    theirs.write_text("max_local_cpu_size: -3")
    assert main.run(["config", "import-lmcache", str(theirs)]) == 2
    theirs.write_text("[1]")
    assert main.run(["config", "import-lmcache", str(theirs)]) == 2


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("chunk_size: abc", "chunk_size is 'abc': expected a number"),
        ("chunk_size: .inf", "chunk_size is inf: expected a number"),
        ("max_local_cpu_size: 5GB", "max_local_cpu_size is '5GB': expected a number"),
        ("{local_disk: /d, max_local_disk_size: [1]}", r"max_local_disk_size is \[1\]: expected a number"),
        ("blocking_timeout_secs: soon", "blocking_timeout_secs is 'soon': expected a number"),
        ("save_decode_cache: maybe", "save_decode_cache is 'maybe': expected true or false"),
        ("remote_url: 'redis://[x'", "remote_url is no URL"),
    ],
)
def test_a_value_that_is_none_names_its_key(text: str, error: str) -> None:
    """One line instead of a traceback."""
    with pytest.raises(ConfigError, match=error):
        convert(read(text, "f", {}))


def test_text_can_be_a_truth_and_nothing_is_the_default() -> None:
    """`"false"` in quotes is false, as LMCache reads it; a key without a value was not given."""
    out = convert(read('{local_cpu: "false", local_disk: /d, save_decode_cache: "no"}', "f", {}))
    assert out.tree["store"]["tiers"] == [{"url": "file:///d", "capacity_gib": 0.0, "eviction": "lru"}]
    assert out.tree["store"]["save_decoded"] is False
    out = convert(read("{local_cpu: , max_local_cpu_size: , cache_policy: }", "f", {}))
    assert out.tree["store"]["tiers"] == [{"url": "dram:", "capacity_gib": 5.0, "eviction": "lru"}]
    assert out.notes == []


def test_a_file_that_is_no_text_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As one that is not there."""
    (tmp_path / "f").write_bytes(b"\xff\xfe")
    assert main.run(["config", "import-lmcache", str(tmp_path / "f")]) == 2
    assert capsys.readouterr().err.endswith("it is no text; name LMCache's YAML file\n")
