"""Packed bytes of a chunk ↔ canonical values [L, 2, H, T, D]: how vLLM arranges a block inside, written down.

Packed order is that of runs.py: layer by layer, block by block. What a block looks like depends on the KV layout and,
on CPU, on the instruction set vLLM's attention picked. `check_packing` lets vLLM write known values into a tiny cache
and compares: a layout that is not what we think is refused, and only codecs that take bytes as they are may be used.

Legend: L layers, B blocks, H heads, N tokens a block, T = B * N tokens, D head dim, s values in 4 bytes.

    plain    [H, N, K D | V D]                               GPU, heads first
    plain_n  [N, H, K D | V D]                               GPU, tokens first
    vec      H x { K [D, N], V [N, D] }                      CPU; vec16 is the same
    amx      H x { K [N/16, D/s, 16, s], V [D/16, N/s, 16, s] }    CPU with AMX tiles
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pdxfer.core.errors import ConfigError

Bytes = npt.NDArray[np.uint8]
View = npt.NDArray[Any]
Copy = Callable[[View, View], None]
"""(destination, source), views of equal shape; numpy's copyto, or the C library's (codec/kernels)."""

KINDS = ("plain", "plain_n", "vec", "vec16", "amx")
AMX_TILE = 16
"""Tokens of K, and channels of V, side by side in an AMX tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The inside of one block of one layer."""

    kind: str
    """One of KINDS."""
    heads: int
    """KV heads of this rank."""
    block_size: int
    """Tokens a block."""
    head_dim: int
    item_bytes: int
    """Bytes of one value: 2 or 4 (1 only for the plain kinds)."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"KV packing {self.kind!r} is unknown; known are {', '.join(KINDS)}")
        step = 4 // self.item_bytes
        if self.kind == "amx" and (
            self.block_size % AMX_TILE or self.block_size % step or self.head_dim % AMX_TILE or self.head_dim % step
        ):
            raise ConfigError(f"amx packing needs block size and head dim in multiples of {AMX_TILE}: {self}")

    @property
    def block_bytes(self) -> int:
        """Of one layer's block, K and V."""
        return 2 * self.heads * self.block_size * self.head_dim * self.item_bytes


def unpack(packing: Packing, packed: Bytes, canonical: Bytes, copy: Copy = np.copyto) -> None:
    """`packed` [L * B * block_bytes] → `canonical` [L, 2, H, T, D, item] (see canonical_view). One copy."""
    num_layers, num_blocks = _counts(packing, packed, canonical)
    for theirs, ours in _views(packing, packed, canonical, num_layers, num_blocks):
        copy(ours, theirs)


def pack(packing: Packing, canonical: Bytes, packed: Bytes, copy: Copy = np.copyto) -> None:
    """Back. One copy."""
    num_layers, num_blocks = _counts(packing, packed, canonical)
    for theirs, ours in _views(packing, packed, canonical, num_layers, num_blocks):
        copy(theirs, ours)


def _counts(packing: Packing, packed: Bytes, canonical: Bytes) -> tuple[int, int]:
    """(layers, blocks a layer) of arrays that fit each other and the packing; else ValueError."""
    blocks, rest = divmod(packed.nbytes, packing.block_bytes)
    if rest or canonical.nbytes != packed.nbytes or canonical.ndim != 6:
        raise ValueError(
            f"{packed.nbytes} packed bytes and canonical values {canonical.shape} are no whole blocks of "
            f"{packing.block_bytes}"
        )
    num_layers, two, heads, tokens, dim, item = canonical.shape
    expected = (2, packing.heads, packing.head_dim, packing.item_bytes)
    if (two, heads, dim, item) != expected or tokens % packing.block_size:
        raise ValueError(f"canonical values {canonical.shape} do not fit {packing}")
    return num_layers, blocks // num_layers


def canonical_view(packing: Packing, values: Bytes, num_layers: int) -> Bytes:
    """Flat uint8 [raw_bytes] seen as [L, 2, H, T, D, item]; no copy."""
    return values.reshape(num_layers, 2, packing.heads, -1, packing.head_dim, packing.item_bytes)


def _views(
    packing: Packing, packed: Bytes, canonical: Bytes, num_layers: int, num_blocks: int
) -> list[tuple[View, View]]:
    """Pairs (packed, canonical) of views with equal shapes that together hold all values."""
    word = np.dtype(f"u{packing.item_bytes}")
    h, n, d, b = packing.heads, packing.block_size, packing.head_dim, num_blocks
    ours = canonical.view(word).reshape(num_layers, 2, h, b, n, d)
    theirs = packed.view(word)
    if packing.kind == "plain":
        return [(theirs.reshape(num_layers, b, h, n, 2, d).transpose(0, 4, 2, 1, 3, 5), ours)]
    if packing.kind == "plain_n":
        return [(theirs.reshape(num_layers, b, n, h, 2, d).transpose(0, 4, 3, 1, 2, 5), ours)]
    halves = theirs.reshape(num_layers, b, h, 2, n * d)
    k, v = halves[:, :, :, 0], halves[:, :, :, 1]
    if packing.kind in ("vec", "vec16"):
        return [
            (k.reshape(num_layers, b, h, d, n).transpose(0, 2, 1, 4, 3), ours[:, 0]),
            (v.reshape(num_layers, b, h, n, d).transpose(0, 2, 1, 3, 4), ours[:, 1]),
        ]
    s, t = 4 // packing.item_bytes, AMX_TILE
    return [
        (
            k.reshape(num_layers, b, h, n // t, d // s, t, s).transpose(0, 2, 1, 3, 5, 4, 6),
            ours[:, 0].reshape(num_layers, h, b, n // t, t, d // s, s),
        ),
        (
            v.reshape(num_layers, b, h, d // t, n // s, t, s).transpose(0, 2, 1, 4, 6, 3, 5),
            ours[:, 1].reshape(num_layers, h, b, n // s, s, d // t, t),
        ),
    ]


Write = Callable[[Bytes, Bytes, Bytes], None]
"""vLLM's own write: (key, value, cache). key, value: uint8 [T, H, D * item] of tokens in slots 0, 1, ...; cache: uint8
[B, block_bytes], zeros before."""


def check_packing(packing: Packing, write: Write) -> None:
    """The canary: raise ConfigError unless vLLM's own write of known values reads back through `packing`.

    Every value of two blocks is different where the item allows it, so that no other arrangement can pass.
    """
    tokens, row = 2 * packing.block_size, packing.head_dim * packing.item_bytes
    count = tokens * packing.heads * packing.head_dim
    numbers = np.arange(2 * count, dtype=np.uint32)
    if packing.item_bytes == 4:
        words = numbers + np.uint32(0x3F800000)
        known = words.view(np.uint8)
    else:
        known = (numbers * np.uint32(40503)).astype(f"u{packing.item_bytes}").view(np.uint8)
    key, value = known.reshape(2, tokens, packing.heads, row)
    cache = np.zeros((2, packing.block_bytes), dtype=np.uint8)
    write(key, value, cache)
    found = np.empty((1, 2, packing.heads, tokens, packing.head_dim, packing.item_bytes), dtype=np.uint8)
    unpack(packing, cache.reshape(-1), found)
    wanted = np.stack((key, value)).transpose(0, 2, 1, 3).reshape(found.shape)
    if not np.array_equal(found, wanted):
        wrong = int((found != wanted).any(axis=-1).sum())
        raise ConfigError(
            f"vLLM arranges KV blocks differently from {packing}: {wrong} of {2 * count} values written by it are "
            "elsewhere. Codecs that compute with values cannot be used here; choose raw, lossless or zstd"
        )
