"""int8 and fp8 rows in numba."""

from typing import Any

import numpy as np

from pdxfer.codec.kernels.jit_values import (
    HUGE_RANGE,
    ONE,
    TINY,
    U8,
    U16,
    U32,
    jit,
    load,
    quantise,
    range_params,
    span,
    store,
    value,
)


@jit
def int8_encode(words: Any, rows: int, dim: int, dtype: int, params: Any, codes: Any, bad: Any) -> None:
    bits, one_bits = np.empty(dim, U32), np.empty(1, U32)
    floats, one = bits.view(np.float32), one_bits.view(np.float32)
    for r in range(rows):
        load(words, r * dim, dim, dtype, bits, floats)
        lo, hi = span(floats, 0, dim)
        lowest, step, good = range_params(lo, hi, np.float32(255), one, one_bits)
        params[2 * r], params[2 * r + 1], bad[r] = lowest, step, not good
        if not good:
            codes[r * dim : (r + 1) * dim] = 0
            continue
        inverse = ONE / value(step, one, one_bits)
        quantise(floats, 0, dim, value(lowest, one, one_bits), inverse, 255, bits, codes, r * dim)


@jit
def int8_decode(codes: Any, params: Any, rows: int, dim: int, dtype: int, words: Any) -> None:
    bits, one_bits, other_bits = np.empty(dim, U32), np.empty(1, U32), np.empty(dim, U32)
    floats, one, other = bits.view(np.float32), one_bits.view(np.float32), other_bits.view(np.float32)
    for r in range(rows):
        lowest, step = value(params[2 * r], one, one_bits), value(params[2 * r + 1], one, one_bits)
        for i in range(dim):
            floats[i] = np.float32(codes[r * dim + i]) * step + lowest
        store(words, r * dim, dim, dtype, bits, floats, other, other_bits)


@jit
def fp8_encode(words: Any, rows: int, dim: int, dtype: int, params: Any, codes: Any, bad: Any) -> None:
    bits, one_bits, other_bits = np.empty(dim, U32), np.empty(1, U32), np.empty(dim, U32)
    floats, one, other = bits.view(np.float32), one_bits.view(np.float32), other_bits.view(np.float32)
    for r in range(rows):
        load(words, r * dim, dim, dtype, bits, floats)
        most = U32(0)
        for i in range(dim):
            most = max(most, bits[i] & U32(0x7FFFFFFF))
        one_bits[0] = most
        largest = one[0]
        good = largest < HUGE_RANGE
        bad[r] = not good
        if not good:
            params[r] = 0
            codes[r * dim : (r + 1) * dim] = 0
            continue
        one[0] = max(largest / np.float32(448), TINY)
        up = one_bits[0] >> U32(16)
        if (one_bits[0] & U32(0xFFFF)) != U32(0):
            up += U32(1)
        params[r] = U16(up)
        inverse = ONE / value(up, one, one_bits)
        for i in range(dim):
            floats[i] = floats[i] * inverse
        for i in range(dim):
            other_bits[i] = bits[i] & U32(0x7FFFFFFF)
        for i in range(dim):
            other[i] = other[i] + np.float32(16384)
        for i in range(dim):
            u = bits[i]
            rest = u & U32(0x7FFFFFFF)
            normal = ((rest + U32(0x7FFFF) + ((rest >> U32(20)) & U32(1))) >> U32(20)) - U32(960)
            small = other_bits[i] - U32(0x46800000)
            code = min(small if rest < U32(0x3C800000) else normal, U32(0x7E))
            codes[r * dim + i] = U8(code | ((u >> U32(24)) & U32(0x80)))


@jit
def fp8_decode(codes: Any, params: Any, rows: int, dim: int, dtype: int, words: Any) -> None:
    bits, one_bits, other_bits = np.empty(dim, U32), np.empty(1, U32), np.empty(dim, U32)
    floats, one, other = bits.view(np.float32), one_bits.view(np.float32), other_bits.view(np.float32)
    for r in range(rows):
        scale = value(params[r], one, one_bits)
        for i in range(dim):
            other[i] = np.float32(codes[r * dim + i] & U8(0x7F)) * np.float32(2.0**-9)
        for i in range(dim):
            c = U32(codes[r * dim + i])
            rest = c & U32(0x7F)
            normal = (rest << U32(20)) + U32(0x3C000000)
            bits[i] = (other_bits[i] if rest < U32(8) else normal) | ((c & U32(0x80)) << U32(24))
        for i in range(dim):
            floats[i] = floats[i] * scale
        store(words, r * dim, dim, dtype, bits, floats, other, other_bits)
