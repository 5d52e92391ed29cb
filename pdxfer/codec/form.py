"""A chunk's raw bytes ↔ canonical values for one engine: kv/pack.py with the fast copy. The store's ChunkForm."""

import numpy as np

from pdxfer.codec.base import Bytes, ChunkSpec
from pdxfer.codec.kernels.native import NativeKernels
from pdxfer.codec.native import library
from pdxfer.kv.pack import Copy, Packing, canonical_view, pack, unpack


class PackedForm:
    """Made by the connector from a packing that the canary has proved. Any thread."""

    def __init__(self, packing: Packing, dtype: str, num_layers: int) -> None:
        self._packing, self._dtype, self._num_layers = packing, dtype, num_layers
        found = library()
        self._copy: Copy = NativeKernels(found).strided_copy if found else np.copyto

    def of_layers(self, num_layers: int) -> "PackedForm":
        """The same for units of so many layers."""
        return PackedForm(self._packing, self._dtype, num_layers)

    def spec(self, num_tokens: int, first_token: int) -> ChunkSpec:
        """Of the whole blocks that hold so many tokens."""
        p = self._packing
        tokens = -(-num_tokens // p.block_size) * p.block_size
        shape = (self._num_layers, 2, p.heads, tokens, p.head_dim)
        return ChunkSpec(dtype=self._dtype, shape=shape, first_token=first_token)

    def unpack(self, raw: Bytes, num_tokens: int) -> Bytes:
        """Canonical values, a new array as long as `raw`."""
        values = np.empty(raw.nbytes, dtype=np.uint8)
        unpack(self._packing, raw, canonical_view(self._packing, values, self._num_layers), self._copy)
        return values

    def pack(self, values: Bytes, num_tokens: int) -> Bytes:
        """Raw bytes, a new array as long as `values`."""
        raw = np.empty(values.nbytes, dtype=np.uint8)
        pack(self._packing, canonical_view(self._packing, values, self._num_layers), raw, self._copy)
        return raw
