"""What the numba loops share: values in and out, ranges and steps. Same bits as kernels/reference.py, no fast-math.

Floats and their bits are two views of one small array, which LLVM turns into plain vector code.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

from pdxfer.codec.kernels import BF16, F16

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
TINY = np.float32(2.0**-100)
HUGE_RANGE = np.float32(1e38)
ROUND_MAGIC = np.float32(12582912.0)
"""1.5 * 2^23: adding it rounds to an integer, to nearest even."""
ZERO, ONE = np.float32(0), np.float32(1)

Loop = TypeVar("Loop", bound=Callable[..., Any])


def jit(loop: Loop) -> Loop:
    """Compiled at first call without the GIL, cached on disk."""
    return cast(Loop, numba.njit(loop, cache=True, nogil=True, boundscheck=False, error_model="numpy"))


@jit
def load(words: Any, first: int, dim: int, dtype: int, bits: Any, floats: Any) -> None:
    """`dim` values from `first` into `floats` (whose bits are `bits`)."""
    if dtype == BF16:
        for i in range(dim):
            bits[i] = U32(words[first + i]) << U32(16)
    elif dtype == F16:
        for i in range(dim):
            bits[i] = (U32(words[first + i]) & U32(0x7FFF)) << U32(13)
        for i in range(dim):
            floats[i] = floats[i] * np.float32(2.0**112)
        for i in range(dim):
            u = U32(words[first + i])
            rest = u & U32(0x7FFF)
            special = U32(0x7F800000) | (rest << U32(13))
            bits[i] = (special if rest >= U32(0x7C00) else bits[i]) | ((u & U32(0x8000)) << U32(16))
    else:
        for i in range(dim):
            bits[i] = U32(words[first + i])


@jit
def store(words: Any, first: int, dim: int, dtype: int, bits: Any, floats: Any, other: Any, other_bits: Any) -> None:
    """Back, rounded to nearest even; float16 saturates. `other` is scratch, with its bits."""
    if dtype == BF16:
        for i in range(dim):
            u = bits[i]
            words[first + i] = U16((u + U32(0x7FFF) + ((u >> U32(16)) & U32(1))) >> U32(16))
    elif dtype == F16:
        for i in range(dim):
            other_bits[i] = bits[i] & U32(0x7FFFFFFF)
        for i in range(dim):
            other[i] = other[i] + np.float32(0.5)
        for i in range(dim):
            u = bits[i]
            rest = u & U32(0x7FFFFFFF)
            normal = (rest + U32(0xFFF) + ((rest >> U32(13)) & U32(1)) - U32(0x38000000)) >> U32(13)
            small = other_bits[i] - U32(0x3F000000)
            half = small if rest < U32(0x38800000) else normal
            if half > U32(0x7BFF) or rest >= U32(0x47800000):
                half = U32(0x7BFF)
            words[first + i] = U16(half | ((u >> U32(16)) & U32(0x8000)))
    else:
        for i in range(dim):
            words[first + i] = bits[i]


@jit
def range_params(lo: Any, hi: Any, steps: Any, one: Any, one_bits: Any) -> Any:
    """(lowest, step, good): bfloat16 words of values in [lo, hi]."""
    one[0] = lo + ZERO
    bits = one_bits[0]
    lowest = bits >> U32(16)
    if (bits >> U32(31)) != U32(0) and (bits & U32(0xFFFF)) != U32(0):
        lowest += U32(1)
    one_bits[0] = lowest << U32(16)
    span = hi - one[0]
    if not (hi - lo < HUGE_RANGE and span < HUGE_RANGE):
        return U16(0), U16(0), False
    step = span / steps
    one[0] = max(step, TINY)
    bits = one_bits[0]
    up = bits >> U32(16)
    if (bits & U32(0xFFFF)) != U32(0):
        up += U32(1)
    return U16(lowest), U16(up), True


@jit
def span(floats: Any, first: int, last: int) -> Any:
    """(lowest, highest) of values; NaN in either if there is one."""
    lo, hi = floats[first], floats[first]
    odd = ZERO
    for i in range(first, last):
        v = floats[i]
        lo = v if v < lo else lo
        hi = v if v > hi else hi
        odd += v * ZERO  # NaN for NaN and inf
    return lo + odd, hi + odd


@jit
def value(word: Any, one: Any, one_bits: Any) -> Any:
    """float32 of a bfloat16 word."""
    one_bits[0] = U32(word) << U32(16)
    return one[0]


@jit
def quantise(
    floats: Any, first: int, last: int, lowest: Any, inverse: Any, top: int, bits: Any, codes: Any, at: int
) -> None:
    """Codes of floats[first:last] at codes[at:]; overwrites the floats."""
    for i in range(first, last):
        floats[i] = (floats[i] - lowest) * inverse + ROUND_MAGIC
    for i in range(first, last):
        codes[at + i - first] = U8(min(bits[i] & U32(0x1FF), U32(top)))
