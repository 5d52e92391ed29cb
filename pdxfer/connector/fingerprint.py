"""The engine's fingerprint: every fact two engines must share before KV may move between them.

Fields are compared one by one by the router, so a refusal names the first that differs. The layout version of vLLM's
fused [B, H, N, C] cache and the CPU's block packing are part of it: blocks travel as opaque bytes.
"""

import json
from pathlib import Path

import torch
from blake3 import blake3

from pdxfer.connector.compat import VllmConfig, check_version
from pdxfer.connector.identity import digest_weights, snapshot
from pdxfer.connector.packing import cpu_isa
from pdxfer.kv.layout import KvLayout

VOLATILE = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures"}
"""Config keys that do not change KV (dtype is a field of its own)."""


def fingerprint(config: VllmConfig, layout: KvLayout, num_layers: int) -> dict[str, str]:
    """Field → value, all text. Shown in `pdxfer nodes` and in refusals."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    shape = {k: v for k, v in model.hf_config.to_dict().items() if k not in VOLATILE}
    return {
        "vllm": check_version(),
        "model_config": blake3(json.dumps(shape, sort_keys=True, default=str).encode()).hexdigest(length=8),
        "weights": _weights(str(model.model), str(model.revision)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "tensor_parallel": str(parallel.tensor_parallel_size),
        "num_layers": str(num_layers),
        "block_size": str(layout.block_size),
        "block_bytes": str(layout.block_bytes),
        "kv_layout": str(cache.get_resolved_kv_cache_layout()),
        "packing": _packing(config, layout),
        "max_model_len": str(model.max_model_len),
    }


def store_identity(fingerprint: dict[str, str], rank: int, world_size: int) -> dict[str, str]:
    """What a stored chunk of this rank depends on: the fingerprint without what only pairs must share; its slice."""
    return {k: v for k, v in fingerprint.items() if k != "max_model_len"} | {"rank": f"{rank}/{world_size}"}


def _weights(model: str, revision: str) -> str:
    directory = Path(model)
    if not directory.is_dir():
        directory = snapshot(model, revision)
    digest = digest_weights(directory) if directory.is_dir() else ""
    return digest or f"{model}@{revision}"


def _packing(config: VllmConfig, layout: KvLayout) -> str:
    """How a block is arranged inside: on CPU it depends on the instruction set vLLM picked."""
    if layout.memory != "DRAM" or torch.cuda.is_available():
        return "plain"
    return cpu_isa(config, layout.block_size)
