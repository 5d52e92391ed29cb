"""The engines of the reuse bench as data: vLLM without and with its prefix cache, pdxfer by tier, LMCache MP.

All compute on core 0 with the same flags. pdxfer's and LMCache's engines run without vLLM's prefix cache, so what they
reuse comes from the tier that is named.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from pdxfer.bench.ttft_arms import Arm
from pdxfer.config.flags import kv_transfer_config
from pdxfer.launcher.spec import ProcessSpec

ARMS = ("none", "prefix-cache", "dram", "disk", "lmcache-mp")
SERVED_NAME = "demo"
MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, KV_CACHE_GIB = 4096, 8, 2048, 1
TIER_GIB = 2
_READY_S = 300.0
_NOT_INHERITED = ("PDXFER_*__*", "VLLM_*", "LMCACHE_*", "OMP_*")
_SILENT = {"DO_NOT_TRACK": "1"}
"""Neither vLLM nor LMCache reports its use to anybody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an engine runs."""

    model: Path
    port: int
    side_port: int
    """Of LMCache's server ..."""
    http_port: int
    """... and where it says that it is ready."""
    directory: Path
    """Of the disk tier."""
    lmcache_python: str = ""


def make_arm(name: str, place: Place, dtype: str = "bfloat16") -> Arm:
    """The arm of this name."""
    url = f"http://127.0.0.1:{place.port}"
    if name == "lmcache-mp":
        return Arm(name=name, processes=(_lmcache_server(place), _lmcache_engine(place, dtype)), urls={"engine": url})
    flags: tuple[str, ...] = ("--enable-prefix-caching",) if name == "prefix-cache" else ("--no-enable-prefix-caching",)
    if name in ("dram", "disk"):
        flags += ("--kv-transfer-config", _store(name, place))
    return Arm(name=name, processes=(_vllm(name, place, dtype, sys.executable, flags),), urls={"engine": url})


def _store(tier: str, place: Place) -> str:
    url = "dram:" if tier == "dram" else f"file://{place.directory}"
    tiers = json.dumps([{"url": url, "capacity_gib": TIER_GIB}])
    sets = ["store.enabled=true", f"store.tiers={tiers}"]
    return kv_transfer_config(role="both", engine_id=f"bench-{tier}", extra={"set": sets})


def _lmcache_server(place: Place) -> ProcessSpec:
    argv = (
        str(Path(place.lmcache_python).with_name("lmcache")), "server",
        "--host", "127.0.0.1", "--port", str(place.side_port),
        "--http-host", "127.0.0.1", "--http-port", str(place.http_port),
        "--l1-size-gb", str(TIER_GIB), "--eviction-policy", "LRU", "--disable-observability",
    )  # fmt: skip
    return ProcessSpec(
        name="lmcache",
        argv=argv,
        env={"PYTHONUNBUFFERED": "1", "LMCACHE_DISABLE_BANNER": "1", **_SILENT},
        unset=_NOT_INHERITED,
        ready_url=f"http://127.0.0.1:{place.http_port}/healthcheck",
        ready_timeout_s=_READY_S,
        stop_order=1,
    )


def _lmcache_engine(place: Place, dtype: str) -> ProcessSpec:
    config = {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": place.side_port,
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
        },
    }
    flags = ("--no-enable-prefix-caching", "--kv-transfer-config", json.dumps(config))
    return _vllm("lmcache-mp", place, dtype, place.lmcache_python, flags, depends_on=("lmcache",))


def _vllm(
    name: str, place: Place, dtype: str, python: str, flags: tuple[str, ...], depends_on: tuple[str, ...] = ()
) -> ProcessSpec:
    argv = (
        python, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(place.model),
        "--served-model-name", SERVED_NAME,
        "--host", "127.0.0.1",
        "--port", str(place.port),
        "--dtype", dtype,
        "--max-model-len", str(MAX_MODEL_LEN),
        "--max-num-seqs", str(MAX_NUM_SEQS),
        "--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS),
        "--enforce-eager",
        *flags,
    )  # fmt: skip
    return ProcessSpec(
        name=name,
        argv=argv,
        env={
            "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": "0",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            **_SILENT,
        },
        unset=_NOT_INHERITED,
        ready_url=f"http://127.0.0.1:{place.port}/health",
        ready_timeout_s=_READY_S,
        depends_on=depends_on,
        stop_timeout_s=30.0,
    )
