"""Codec `fp8`: e4m3 of each value over its row's scale. Like vLLM's own fp8 cache in spirit, with a scale a row."""

from pdxfer.codec.base import Bytes, Shape
from pdxfer.codec.int8 import RowCodec, num_rows
from pdxfer.codec.kernels import Words


class Fp8Codec(RowCodec):
    """8.25 bits a value at head dim 64, 8.125 at 128; KL 25 times that of int8: only where fp8 is what is wanted."""

    name = "fp8"
    version = 1
    """1: first (2026-11-29)."""
    params_a_row = 1

    def encode_units(self, values: Bytes, shape: Shape, dtype: int, params: Words, codes: Bytes, bad: Bytes) -> None:
        """See ScaledCodec."""
        self._kernels.fp8_encode(values, num_rows(shape), shape[4], dtype, params, codes, bad)

    def decode_units(self, codes: Bytes, params: Words, shape: Shape, dtype: int, out: Bytes) -> None:
        """See ScaledCodec."""
        self._kernels.fp8_decode(codes, params, num_rows(shape), shape[4], dtype, out)
