"""Codec `int8`: each token of each head with its own range in 255 steps. The safe lossy default (KL 0.00006)."""

from pdxfer.codec.base import Bytes, Shape
from pdxfer.codec.kernels import Words
from pdxfer.codec.scaled import Layout, ScaledCodec


class RowCodec(ScaledCodec):
    """A unit is one token of one head."""

    params_a_row: int

    def layout(self, shape: Shape) -> Layout:
        """See ScaledCodec."""
        rows = num_rows(shape)
        return Layout(params=self.params_a_row * rows, codes=rows * shape[4], units=rows)

    def unit(self, values: Bytes, shape: Shape, item: int, number: int) -> Bytes:
        """See ScaledCodec."""
        size = shape[4] * item
        return values[number * size : (number + 1) * size]


class Int8Codec(RowCodec):
    """8.5 bits a value at head dim 64, 8.25 at 128: x1.88, x1.94 from bfloat16."""

    name = "int8"
    version = 1
    """1: first (2026-11-29)."""
    params_a_row = 2

    def encode_units(self, values: Bytes, shape: Shape, dtype: int, params: Words, codes: Bytes, bad: Bytes) -> None:
        """See ScaledCodec."""
        self._kernels.int8_encode(values, num_rows(shape), shape[4], dtype, params, codes, bad)

    def decode_units(self, codes: Bytes, params: Words, shape: Shape, dtype: int, out: Bytes) -> None:
        """See ScaledCodec."""
        self._kernels.int8_decode(codes, params, num_rows(shape), shape[4], dtype, out)


def num_rows(shape: Shape) -> int:
    """Rows of one token and head; none if they would be empty."""
    return shape[0] * shape[1] * shape[2] * shape[3] if shape[4] else 0
