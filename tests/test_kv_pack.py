"""Packing: every known layout unpacks to canonical values and back, and vLLM's own write agrees with us."""

import itertools

import numpy as np
import pytest

from pdxfer.codec.form import PackedForm
from pdxfer.codec.kernels.native import NativeKernels
from pdxfer.codec.native import library
from pdxfer.connector.packing import cpu_packing, reshape_and_cache
from pdxfer.core.errors import ConfigError
from pdxfer.kv.pack import KINDS, Bytes, Copy, Packing, canonical_view, check_packing, pack, unpack


def native_copy() -> Copy:
    """The C library's strided copy."""
    found = library()
    assert found is not None
    return NativeKernels(found).strided_copy


def naive_unpack(packing: Packing, packed: Bytes, num_layers: int) -> np.ndarray:
    """Value by value, from the formulas: [L, 2, H, T, D] words."""
    h, n, d, s = packing.heads, packing.block_size, packing.head_dim, 4 // packing.item_bytes
    words = packed.view(f"u{packing.item_bytes}").reshape(num_layers, -1, 2 * h * n * d)
    num_blocks = words.shape[1]
    out = np.empty((num_layers, 2, h, num_blocks * n, d), dtype=words.dtype)
    for b, i, j, k in itertools.product(range(num_blocks), range(h), range(n), range(d)):
        head = i * 2 * n * d
        if packing.kind == "plain":
            at = ((i * n + j) * 2 * d + k, (i * n + j) * 2 * d + d + k)
        elif packing.kind == "plain_n":
            at = ((j * h + i) * 2 * d + k, (j * h + i) * 2 * d + d + k)
        elif packing.kind in ("vec", "vec16"):
            at = (head + k * n + j, head + n * d + j * d + k)
        else:
            key = (j // 16) * 16 * d + (k // s) * 16 * s + (j % 16) * s + k % s
            value = (k // 16) * 16 * n + (j // s) * 16 * s + (k % 16) * s + j % s
            at = (head + key, head + n * d + value)
        out[:, 0, i, b * n + j, k] = words[:, b, at[0]]
        out[:, 1, i, b * n + j, k] = words[:, b, at[1]]
    return out


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_bytes_become_canonical_values_and_back(kind: str, item: int, native: bool) -> None:
    """Equal to the formulas value by value; packing again gives the same bytes; numpy and C alike."""
    packing = Packing(kind=kind, heads=2, block_size=16, head_dim=32, item_bytes=item)
    packed = np.random.default_rng(1).integers(0, 256, 3 * 2 * packing.block_bytes, dtype=np.uint8)
    canonical = canonical_view(packing, np.empty_like(packed), 3)
    copy = native_copy() if native else np.copyto
    unpack(packing, packed, canonical, copy)
    assert np.array_equal(canonical.view(f"u{item}")[..., 0], naive_unpack(packing, packed, 3))
    again = np.zeros_like(packed)
    pack(packing, canonical, again, copy)
    assert np.array_equal(again, packed)


REAL = [
    (isa, dtype, block_size)
    for isa, dtype, block_size in itertools.product(
        ("vec", "vec16", "amx"), ("float32", "bfloat16", "float16"), (16, 32, 128)
    )
    if isa != "amx" or dtype == "float32" or block_size % 32 == 0  # vLLM has no such amx blocks
]


@pytest.mark.slow
@pytest.mark.parametrize(("isa", "dtype", "block_size"), REAL)
def test_vllms_own_write_agrees(isa: str, dtype: str, block_size: int) -> None:
    """The canary on the real operator passes for what we know, and for nothing else."""
    packing = cpu_packing(isa, dtype, 3, block_size, 64)
    for other in KINDS:
        if {other, isa} <= {"vec", "vec16"} or other == isa:
            continue
        wrong = Packing(kind=other, heads=3, block_size=block_size, head_dim=64, item_bytes=packing.item_bytes)
        with pytest.raises(ConfigError, match="elsewhere"):
            check_packing(wrong, lambda k, v, c: reshape_and_cache(k, v, c, packing, dtype))


def test_what_is_not_known_is_refused() -> None:
    """Unknown instruction sets, cache dtypes, and sizes AMX tiles cannot have."""
    with pytest.raises(ConfigError, match="neon"):
        cpu_packing("neon", "bfloat16", 1, 32, 64)
    with pytest.raises(ConfigError, match="float8"):
        cpu_packing("vec", "float8_e4m3", 1, 32, 64)
    with pytest.raises(ConfigError, match="multiples of 16"):
        Packing(kind="amx", heads=1, block_size=24, head_dim=64, item_bytes=2)
    packing = Packing(kind="vec", heads=2, block_size=16, head_dim=32, item_bytes=2)
    with pytest.raises(ValueError, match="whole blocks"):
        packed = np.zeros(packing.block_bytes + 2, dtype=np.uint8)
        unpack(packing, packed, np.zeros((1, 2, 2, 16, 32, 2), dtype=np.uint8))
    with pytest.raises(ValueError, match="do not fit"):
        unpack(packing, np.zeros(packing.block_bytes, np.uint8), np.zeros((1, 2, 1, 32, 32, 2), dtype=np.uint8))


def test_the_form_of_a_chunk_unpacks_and_packs_it() -> None:
    """What the store's transcoder uses: flat bytes both ways, the spec of whole and partial chunks."""
    packing = Packing(kind="amx", heads=2, block_size=32, head_dim=32, item_bytes=2)
    form = PackedForm(packing, "bfloat16", 3)
    raw = np.random.default_rng(2).integers(0, 256, 3 * 2 * packing.block_bytes, dtype=np.uint8)
    values = form.unpack(raw, 64)
    assert values.shape == raw.shape and not np.array_equal(values, raw)
    assert np.array_equal(form.pack(values, 64), raw)
    assert form.spec(50, 256).shape == (3, 2, 2, 64, 32) and form.spec(50, 256).raw_bytes == raw.nbytes
