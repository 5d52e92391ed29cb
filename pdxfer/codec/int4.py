"""Codec `int4`: K with a range a channel and 32 tokens, V with one a token and 32 channels, 15 steps each (KIVI's way).

K's wide channels are the same for all tokens, V's values are alike within a token: each goes along its own grain.
"""

from pdxfer.codec.base import Bytes, ChunkSpec, Encoded, Shape
from pdxfer.codec.frame import FrameError, FrameHeader
from pdxfer.codec.kernels import MAX_DIM, TILE, Words
from pdxfer.codec.scaled import Layout, ScaledCodec
from pdxfer.core.errors import ConfigError


class Int4Codec(ScaledCodec):
    """5 bits a value: x3.2 from bfloat16. A unit is a tile of 32 tokens of one head."""

    name = "int4"
    version = 1
    """1: first (2026-11-29)."""

    def encode(self, values: Bytes, spec: ChunkSpec) -> Encoded:
        """See ScaledCodec."""
        if spec.shape[4] > MAX_DIM:
            raise ConfigError(f"codec int4 takes head dims up to {MAX_DIM}, not {spec.shape[4]}; use int8")
        return super().encode(values, spec)

    def decode(self, payload: memoryview, header: FrameHeader, out: Bytes) -> None:
        """See ScaledCodec."""
        if header.shape[4] > MAX_DIM:
            raise FrameError(f"int4 payload of head dim {header.shape[4]}, the limit is {MAX_DIM}")
        super().decode(payload, header, out)

    def layout(self, shape: Shape) -> Layout:
        """See ScaledCodec."""
        layers, _, heads, tokens, dim = shape
        whole, rest = divmod(tokens, TILE)
        tiles = whole + (rest > 0)
        if not dim:
            return Layout(params=0, codes=0, units=0)
        codes = whole * ((TILE * dim + 1) // 2) + (rest * dim + 1) // 2
        groups = -(-dim // TILE)
        return Layout(
            params=2 * layers * heads * (tiles * dim + tokens * groups),
            codes=2 * layers * heads * codes,
            units=2 * layers * heads * tiles,
        )

    def unit(self, values: Bytes, shape: Shape, item: int, number: int) -> Bytes:
        """See ScaledCodec."""
        tokens, token_bytes = shape[3], shape[4] * item
        plane, tile = divmod(number, -(-tokens // TILE))
        first, last = tile * TILE, min(tokens, (tile + 1) * TILE)
        return values[(plane * tokens + first) * token_bytes : (plane * tokens + last) * token_bytes]

    def encode_units(self, values: Bytes, shape: Shape, dtype: int, params: Words, codes: Bytes, bad: Bytes) -> None:
        """See ScaledCodec."""
        layers, _, heads, tokens, dim = shape
        self._kernels.int4_encode(values, 2 * layers * heads, heads, tokens, dim, dtype, params, codes, bad)

    def decode_units(self, codes: Bytes, params: Words, shape: Shape, dtype: int, out: Bytes) -> None:
        """See ScaledCodec."""
        layers, _, heads, tokens, dim = shape
        self._kernels.int4_decode(codes, params, 2 * layers * heads, heads, tokens, dim, dtype, out)
