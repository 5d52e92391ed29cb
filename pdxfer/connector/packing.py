"""How this engine's KV blocks are packed inside, proved by vLLM's own write before anything computes with values."""

from typing import Any

import torch

from pdxfer.codec.form import PackedForm
from pdxfer.core.errors import ConfigError
from pdxfer.kv.pack import Bytes, Packing, check_packing

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def form_of(cache: torch.Tensor, isa: str, block_size: int, num_layers: int) -> PackedForm:
    """The store's ChunkForm of KV tensors like `cache`, vLLM's [B, H, N, 2 D] of one layer. Raises ConfigError where
    the inside of a block is not proved."""
    if cache.is_cuda or isa == "plain":
        raise ConfigError("the inside of KV blocks is proved on CPU only, not yet on this device")
    if cache.dim() != 4 or cache.shape[2] != block_size or cache.shape[3] % 2 or not cache[0].is_contiguous():
        raise ConfigError(
            f"KV tensors of shape {tuple(cache.shape)}, strides {cache.stride()}, are not [B, H, {block_size}, 2 D]"
        )
    dtype = str(cache.dtype).removeprefix("torch.")
    packing = cpu_packing(isa, dtype, cache.shape[1], block_size, cache.shape[3] // 2)
    return PackedForm(packing, dtype, num_layers)


def cpu_isa(config: Any, block_size: int) -> str:
    """The instruction set that vLLM's CPU attention arranges blocks for, under this VllmConfig."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model = config.model_config
    return str(_get_attn_isa(model.dtype, block_size, model.get_head_size(), config.cache_config.cache_dtype))


def form_of_engine(config: Any) -> PackedForm:
    """As form_of, of a CPU engine without tensor parallelism that runs in another process."""
    model, block_size = config.model_config, config.cache_config.block_size
    dtype = str(model.dtype).removeprefix("torch.")
    heads, dim = model.get_num_kv_heads(config.parallel_config), model.get_head_size()
    packing = cpu_packing(cpu_isa(config, block_size), dtype, heads, block_size, dim)
    return PackedForm(packing, dtype, model.get_num_layers(config.parallel_config))


def cpu_packing(isa: str, dtype: str, heads: int, block_size: int, head_dim: int) -> Packing:
    """The packing of vLLM's CPU attention with `isa` (its `_get_attn_isa`). Raises ConfigError if it is not ours."""
    if dtype not in DTYPES:
        raise ConfigError(f"KV of dtype {dtype} is not unpacked; choose codec raw, lossless or zstd")
    item = DTYPES[dtype].itemsize
    packing = Packing(kind=isa, heads=heads, block_size=block_size, head_dim=head_dim, item_bytes=item)

    def write(key: Bytes, value: Bytes, cache: Bytes) -> None:
        try:
            reshape_and_cache(key, value, cache, packing, dtype)
        except (AttributeError, RuntimeError) as error:
            raise ConfigError(f"this vLLM does not write KV blocks of {packing}: {error}") from error

    check_packing(packing, write)
    return packing


def reshape_and_cache(key: Bytes, value: Bytes, cache: Bytes, packing: Packing, dtype: str) -> None:
    """vLLM's write of tokens into slots 0, 1, ... of a CPU cache of its own shape [B, H, N, 2 D]."""
    from vllm import _custom_ops as ops

    def tensor(values: Bytes) -> Any:
        return torch.from_numpy(values).view(DTYPES[dtype])

    blocks = tensor(cache).view(-1, packing.heads, 2 * packing.block_size, packing.head_dim)
    keys, values = blocks.chunk(2, dim=2)
    slots = torch.arange(key.shape[0])
    ops.cpu_attn_reshape_and_cache(tensor(key), tensor(value), keys, values, slots, packing.kind)
