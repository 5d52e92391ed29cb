"""int4 tiles in numba."""

from typing import Any

import numpy as np

from pdxfer.codec.kernels import TILE
from pdxfer.codec.kernels.jit_values import (
    ONE,
    ROUND_MAGIC,
    U8,
    U32,
    ZERO,
    jit,
    load,
    quantise,
    range_params,
    span,
    store,
    value,
)


@jit
def int4_encode(
    words: Any, planes: int, heads: int, tokens: int, dim: int, dtype: int, params: Any, codes: Any, bad: Any
) -> None:
    bits, one_bits = np.empty(TILE * dim, U32), np.empty(1, U32)
    floats, one = bits.view(np.float32), one_bits.view(np.float32)
    wide = np.zeros(TILE * dim + 1, U8)
    lo, hi, odd = np.empty(dim, np.float32), np.empty(dim, np.float32), np.empty(dim, np.float32)
    at, code_at, unit, word_at = 0, 0, 0, 0
    for p in range(planes):
        is_v = (p // heads) % 2 == 1
        groups = (dim + TILE - 1) // TILE
        for first in range(0, tokens, TILE):
            count = min(TILE, tokens - first)
            size = count * dim
            load(words, word_at, size, dtype, bits, floats)
            pairs = count * groups if is_v else dim
            good = True
            if is_v:
                for t in range(count):
                    for g in range(groups):
                        start, stop = t * dim + g * TILE, t * dim + min(dim, (g + 1) * TILE)
                        least, most = span(floats, start, stop)
                        lowest, step, fine = range_params(least, most, np.float32(15), one, one_bits)
                        good = good and fine
                        params[at + 2 * (t * groups + g)], params[at + 2 * (t * groups + g) + 1] = lowest, step
                        if fine:
                            inverse = ONE / value(step, one, one_bits)
                            base = value(lowest, one, one_bits)
                            quantise(floats, start, stop, base, inverse, 15, bits, wide, start)
            else:
                for d in range(dim):
                    lo[d], hi[d], odd[d] = floats[d], floats[d], ZERO
                for t in range(count):
                    for d in range(dim):
                        v = floats[t * dim + d]
                        lo[d] = v if v < lo[d] else lo[d]
                        hi[d] = v if v > hi[d] else hi[d]
                        odd[d] += v * ZERO
                for d in range(dim):
                    lowest, step, fine = range_params(lo[d] + odd[d], hi[d] + odd[d], np.float32(15), one, one_bits)
                    good = good and fine
                    params[at + 2 * d], params[at + 2 * d + 1] = lowest, step
                    lo[d] = value(lowest, one, one_bits)
                    hi[d] = ONE / value(step, one, one_bits)
                for t in range(count):
                    for d in range(dim):
                        floats[t * dim + d] = (floats[t * dim + d] - lo[d]) * hi[d] + ROUND_MAGIC
                for i in range(size):
                    wide[i] = U8(min(bits[i] & U32(0x1FF), U32(15)))
            half = (size + 1) // 2
            if good:
                wide[size] = 0
                for i in range(half):
                    codes[code_at + i] = wide[i] | (wide[i + half] << U8(4))
            else:
                params[at : at + 2 * pairs] = 0
                codes[code_at : code_at + half] = 0
            bad[unit] = not good
            at, code_at, unit, word_at = at + 2 * pairs, code_at + half, unit + 1, word_at + size


@jit
def int4_decode(
    codes: Any, params: Any, planes: int, heads: int, tokens: int, dim: int, dtype: int, words: Any
) -> None:
    bits, one_bits, other_bits = np.empty(dim, U32), np.empty(1, U32), np.empty(dim, U32)
    floats, one, other = bits.view(np.float32), one_bits.view(np.float32), other_bits.view(np.float32)
    wide = np.empty(TILE * dim + 1, U8)
    lowest, step = np.empty(dim, np.float32), np.empty(dim, np.float32)
    groups = (dim + TILE - 1) // TILE
    at, code_at, word_at = 0, 0, 0
    for p in range(planes):
        is_v = (p // heads) % 2 == 1
        for first in range(0, tokens, TILE):
            count = min(TILE, tokens - first)
            half = (count * dim + 1) // 2
            for i in range(half):
                c = codes[code_at + i]
                wide[i] = c & U8(15)
                wide[i + half] = c >> U8(4)
            for t in range(count):
                if is_v or t == 0:
                    for d in range(dim):
                        pair = at + 2 * (t * groups + d // TILE if is_v else d)
                        lowest[d] = value(params[pair], one, one_bits)
                        step[d] = value(params[pair + 1], one, one_bits)
                for d in range(dim):
                    floats[d] = np.float32(wide[t * dim + d]) * step[d] + lowest[d]
                store(words, word_at + t * dim, dim, dtype, bits, floats, other, other_bits)
            at += 2 * (count * groups if is_v else dim)
            code_at, word_at = code_at + half, word_at + count * dim
