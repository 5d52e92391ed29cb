"""The loops in plain numpy: the definition of what the others do, and the last resort where there is nothing else.

Rounding is to nearest, ties to even, as numpy rounds; no trick of the fast versions is repeated here, except where
an operation's order fixes the bits (comments say so).
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from pdxfer.codec.kernels import BF16, F16, F32, GROUP, TILE, Bytes, Planes, Words

Floats = npt.NDArray[np.float32]

TINY = np.float32(2.0**-100)
"""No scale is smaller, so that its inverse is finite."""
HUGE_RANGE = np.float32(1e38)
"""Units that span more, or hold inf or NaN, are kept raw."""
ITEM_BYTES = {BF16: 2, F16: 2, F32: 4}
F16_MAX = np.float32(65504.0)
ESCAPE = 7

E4M3 = np.concatenate(
    [np.arange(8) * 2.0**-9, [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]]
).astype(np.float32)
"""Value of each code without sign; 127 stands for 480 here (NaN in the standard, never written)."""


def load(src: Bytes, dtype: int) -> Floats:
    """float32 of the values."""
    if dtype == BF16:
        return (src.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == F16:
        return src.view(np.float16).astype(np.float32)
    return src.view(np.float32)


def store(values: Floats, dtype: int, dst: Bytes) -> None:
    """Rounded to nearest even into `dst`; float16 saturates."""
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    if dtype == BF16:
        bits = flat.view(np.uint32)
        with np.errstate(over="ignore"):
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        dst[:] = rounded.astype(np.uint16).view(np.uint8)
    elif dtype == F16:
        top = np.copysign(F16_MAX, flat)
        limited = np.where(np.abs(flat) <= F16_MAX, flat, top)  # NaN too
        dst[:] = limited.astype(np.float16).view(np.uint8)
    else:
        dst[:] = flat.view(np.uint8)


def to_bf16(values: Floats, up: bool) -> Words:
    """bfloat16 not below (`up`, values >= 0) or not above the values."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    cut = (bits >> np.uint32(16)).astype(np.uint16)
    rest = (bits & np.uint32(0xFFFF)) != 0
    away = rest if up else rest & ((bits >> np.uint32(31)) != 0)
    return np.where(away, cut + np.uint16(1), cut)


def from_bf16(words: Words) -> Floats:
    """float32 of bfloat16 words."""
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def range_params(lo: Floats, hi: Floats, steps: float) -> tuple[Words, Words, npt.NDArray[np.bool_]]:
    """(lowest, step, bad) of values in [lo, hi] in so many steps."""
    with np.errstate(over="ignore", invalid="ignore"):
        lowest = to_bf16(lo + np.float32(0), up=False)  # never -0
        span = hi - from_bf16(lowest)
        bad = ~((hi - lo < HUGE_RANGE) & (span < HUGE_RANGE))
        step = np.maximum(np.where(bad, np.float32(0), span) / np.float32(steps), TINY)
    zero = np.uint16(0)
    return np.where(bad, zero, lowest), np.where(bad, zero, to_bf16(step, up=True)), bad


def quantise(values: Floats, lowest: Words, step: Words, bad: npt.NDArray[np.bool_] | np.bool_, top: float) -> Bytes:
    """Nearest step of each value. Multiplies by the step's inverse, as the fast versions do."""
    with np.errstate(all="ignore"):
        inverse = np.float32(1) / from_bf16(step)
        codes = np.minimum(np.rint((values - from_bf16(lowest)) * inverse), np.float32(top))
    return np.where(bad, np.float32(0), codes).astype(np.uint8)


def v_groups(dim: int) -> int:
    """Groups of 32 channels of one token's V."""
    return -(-dim // TILE)


class ReferenceKernels:
    """See Kernels."""

    name = "numpy"

    def int8_encode(self, src: Bytes, rows: int, dim: int, dtype: int, params: Words, codes: Bytes, bad: Bytes) -> None:
        """See Kernels."""
        values = load(src, dtype).reshape(rows, dim)
        # minimum and maximum pass NaN on, which makes the row bad
        lowest, step, wrong = range_params(values.min(axis=1), values.max(axis=1), 255.0)
        params.reshape(rows, 2)[:] = np.stack((lowest, step), axis=1)
        codes.reshape(rows, dim)[:] = quantise(values, lowest[:, None], step[:, None], wrong[:, None], 255.0)
        bad[:] = wrong

    def int8_decode(self, codes: Bytes, params: Words, rows: int, dim: int, dtype: int, dst: Bytes) -> None:
        """See Kernels."""
        lowest, step = np.split(from_bf16(params.reshape(rows, 2)), 2, axis=1)
        with np.errstate(all="ignore"):
            store(codes.reshape(rows, dim).astype(np.float32) * step + lowest, dtype, dst)

    def fp8_encode(self, src: Bytes, rows: int, dim: int, dtype: int, params: Words, codes: Bytes, bad: Bytes) -> None:
        """See Kernels."""
        values = load(src, dtype).reshape(rows, dim)
        with np.errstate(all="ignore"):
            largest = np.abs(values).max(axis=1)
            wrong = ~(largest < HUGE_RANGE)
            step = np.maximum(np.where(wrong, np.float32(0), largest) / np.float32(448), TINY)
            scale = np.where(wrong, np.uint16(0), to_bf16(step, up=True))
            scaled = np.where(wrong[:, None], np.float32(0), values * (np.float32(1) / from_bf16(scale))[:, None])
        params[:] = scale
        size = np.abs(scaled)
        below = np.clip(np.searchsorted(E4M3[:127], size, side="right") - 1, 0, 125)
        middle = (E4M3[below] + E4M3[below + 1]) / np.float32(2)  # exact: both have four bits
        code = below + ((size > middle) | ((size == middle) & (below % 2 == 1)))
        signed = code.astype(np.uint8) | (np.signbit(scaled).astype(np.uint8) << np.uint8(7))
        codes.reshape(rows, dim)[:] = np.where(wrong[:, None], np.uint8(0), signed)
        bad[:] = wrong

    def fp8_decode(self, codes: Bytes, params: Words, rows: int, dim: int, dtype: int, dst: Bytes) -> None:
        """See Kernels."""
        table = np.concatenate((E4M3, -E4M3))
        with np.errstate(all="ignore"):
            store(table[codes.reshape(rows, dim)] * from_bf16(params)[:, None], dtype, dst)

    def int4_encode(
        self,
        src: Bytes,
        planes: int,
        heads: int,
        tokens: int,
        dim: int,
        dtype: int,
        params: Words,
        codes: Bytes,
        bad: Bytes,
    ) -> None:
        """See Kernels."""
        values = load(src, dtype).reshape(planes, tokens, dim)
        at = code_at = unit = 0
        for plane in range(planes):
            for first in range(0, tokens, TILE):
                tile = values[plane, first : first + TILE]
                count = tile.shape[0]
                if (plane // heads) % 2:
                    starts = np.arange(0, dim, TILE)
                    lo = np.minimum.reduceat(tile, starts, axis=1)
                    hi = np.maximum.reduceat(tile, starts, axis=1)
                    per_value = np.arange(dim) // TILE
                else:
                    lo, hi, per_value = tile.min(axis=0)[None], tile.max(axis=0)[None], np.arange(dim)
                lowest, step, wrong = range_params(lo, hi, 15.0)
                any_bad = wrong.any()
                found = quantise(tile, lowest[:, per_value], step[:, per_value], any_bad, 15.0).reshape(-1)
                pairs = np.stack((lowest, step), axis=-1).reshape(-1)
                params[at : at + pairs.size] = 0 if any_bad else pairs
                half = (found.size + 1) // 2
                upper = np.zeros(half, dtype=np.uint8)
                upper[: found.size - half] = found[half:]
                codes[code_at : code_at + half] = found[:half] | (upper << np.uint8(4))
                bad[unit] = any_bad
                at, code_at, unit = at + pairs.size, code_at + half, unit + 1
                assert count * dim == found.size

    def int4_decode(
        self, codes: Bytes, params: Words, planes: int, heads: int, tokens: int, dim: int, dtype: int, dst: Bytes
    ) -> None:
        """See Kernels."""
        values = np.empty((planes, tokens, dim), dtype=np.float32)
        at = code_at = 0
        for plane in range(planes):
            for first in range(0, tokens, TILE):
                count = min(TILE, tokens - first)
                is_v = (plane // heads) % 2 == 1
                shape = (count, v_groups(dim), 2) if is_v else (1, dim, 2)
                per_value = np.arange(dim) // TILE if is_v else np.arange(dim)
                size = shape[0] * shape[1] * 2
                pairs = from_bf16(params[at : at + size]).reshape(shape)[:, per_value]
                half = (count * dim + 1) // 2
                packed = codes[code_at : code_at + half]
                found = np.concatenate((packed & np.uint8(15), packed >> np.uint8(4)))[: count * dim]
                with np.errstate(all="ignore"):
                    tile = found.reshape(count, dim).astype(np.float32) * pairs[..., 1] + pairs[..., 0]
                values[plane, first : first + count] = tile
                at, code_at = at + size, code_at + half
        store(values, dtype, dst)

    def lossless_encode(
        self,
        src: Words,
        stride: int,
        half: bool,
        base: Bytes,
        planes: Planes,
        extra: Planes,
        rest: Bytes,
        counts: Words,
        escapes: Bytes,
    ) -> int:
        """See Kernels."""
        groups = base.size
        words = src[: groups * GROUP * stride : stride].reshape(groups, GROUP)
        if half:
            exponent, low = (words >> 10) & 31, words & 0xFF
            extra.reshape(groups, 3)[:] = _planes(((words >> 8) & 3) | ((words >> 13) & 4))
        else:
            exponent, low = (words >> 7) & 0xFF, ((words >> 8) & 0x80) | (words & 0x7F)
        rest.reshape(groups, GROUP)[:] = low
        most = exponent.max(axis=1)
        distance = np.minimum(most[:, None] - exponent, ESCAPE)
        base[:] = most
        planes.reshape(groups, 3)[:] = _planes(distance)
        escaped = distance == ESCAPE
        found = exponent[escaped]
        if found.size > escapes.size:
            return -1
        escapes[: found.size] = found
        counts[:] = np.add.reduceat(escaped.sum(axis=1), np.arange(0, groups, GROUP)) if groups else 0
        return int(found.size)

    def lossless_decode(
        self,
        base: Bytes,
        planes: Planes,
        extra: Planes,
        rest: Bytes,
        counts: Words,
        escapes: Bytes,
        half: bool,
        dst: Words,
        stride: int,
    ) -> bool:
        """See Kernels."""
        groups = base.size
        distance = _values(planes.reshape(groups, 3))
        escaped = distance == ESCAPE
        found = np.add.reduceat(escaped.sum(axis=1), np.arange(0, groups, GROUP)) if groups else np.zeros(0)
        if escaped.sum() != escapes.size or not np.array_equal(found, counts):
            return False
        exponent = base[:, None] - distance  # wraps, as bytes do
        exponent[escaped] = escapes
        e, r = exponent.astype(np.uint16), rest.reshape(groups, GROUP).astype(np.uint16)
        if half:
            high = _values(extra.reshape(groups, 3)).astype(np.uint16)
            words = r | (high & 3) << 8 | (e & 31) << 10 | (high & 4) << 13
        else:
            words = (r & 0x80) << 8 | e << 7 | (r & 0x7F)
        dst[: groups * GROUP * stride : stride] = words.reshape(-1)
        return True


def _planes(values: npt.NDArray[Any]) -> Planes:
    """[G, 64] values below 8 → [G, 3] words, bit i of word k being bit k of value i."""
    bits = (values.astype(np.uint16)[:, None, :] >> np.arange(3, dtype=np.uint16)[None, :, None]) & 1
    packed = np.packbits(bits.astype(np.uint8), axis=-1, bitorder="little")
    return packed.reshape(values.shape[0], 3, 8).view(np.uint64)[..., 0]


def _values(planes: Planes) -> Bytes:
    """Back."""
    packed = np.ascontiguousarray(planes).view(np.uint8).reshape(planes.shape[0], 3, 8)
    bits = np.unpackbits(packed, axis=-1, bitorder="little")
    return np.asarray(bits[:, 0] | (bits[:, 1] << np.uint8(1)) | (bits[:, 2] << np.uint8(2)), dtype=np.uint8)
