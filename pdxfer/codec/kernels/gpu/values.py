"""What the Triton loops share: values in and out, ranges and steps. Same bits as kernels/reference.py.

Launch everything with EXACT: products and sums must not be fused. Division is div_rn, Triton's `/` rounds otherwise.
Values are pointers to int16 (bfloat16, float16) or int32 (float32) words; DTYPE as in kernels/__init__.py.
"""

from collections.abc import Callable
from typing import Any, cast

import triton
import triton.language as tl

EXACT = {"enable_fp_fusion": False}
"""Launch options."""
TINY = tl.constexpr(2.0**-100)
HUGE_RANGE = tl.constexpr(1e38)
LARGEST = tl.constexpr(3.4028234663852886e38)
ROUND_MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding it rounds to an integer, to nearest even."""


def jit(loop: Callable[..., Any]) -> Any:
    """Compiled at first launch; with TRITON_INTERPRET=1 at import, run by Triton's interpreter."""
    return cast(Any, triton.jit(loop))


@jit
def load(src, at, mask, DTYPE: tl.constexpr):
    """float32 of the values at `at`; 0 where masked."""
    words = tl.load(src + at, mask=mask, other=0)
    if DTYPE == 0:
        values = (words.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == 1:
        values = words.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        values = words.to(tl.float32, bitcast=True)
    return values


@jit
def store(dst, at, mask, values, DTYPE: tl.constexpr):
    """Back, rounded to nearest even; float16 saturates."""
    bits = values.to(tl.int32, bitcast=True)
    if DTYPE == 0:
        tl.store(dst + at, ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16), mask=mask)
    elif DTYPE == 1:
        top = (((bits >> 31) << 31) | 0x477FE000).to(tl.float32, bitcast=True)
        limited = tl.where(tl.abs(values) <= 65504.0, values, top)
        tl.store(dst + at, limited.to(tl.float16).to(tl.int16, bitcast=True), mask=mask)
    else:
        tl.store(dst + at, bits, mask=mask)


@jit
def from_bf16(words):
    """float32 of bfloat16 words."""
    return (words.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@jit
def step_word(step):
    """bfloat16 word not below `step`, which is positive."""
    bits = step.to(tl.int32, bitcast=True)
    return (bits >> 16) + ((bits & 0xFFFF) != 0).to(tl.int32)


@jit
def range_params(lo, hi, STEPS: tl.constexpr):
    """(lowest, step, good): bfloat16 words of values in [lo, hi], which are finite."""
    bits = tl.where(lo == 0.0, 0.0, lo).to(tl.int32, bitcast=True)  # never -0
    lowest = ((bits >> 16) & 0xFFFF) + (((bits & 0xFFFF) != 0) & (bits < 0)).to(tl.int32)
    span = hi - from_bf16(lowest)
    good = (hi - lo < HUGE_RANGE) & (span < HUGE_RANGE)
    step = tl.maximum(tl.div_rn(tl.where(good, span, 0.0), tl.full(span.shape, STEPS, tl.float32)), TINY)
    return tl.where(good, lowest, 0), tl.where(good, step_word(step), 0), good


@jit
def quantise(values, lowest, step, TOP: tl.constexpr):
    """Codes, int32, of finite values; `lowest`, `step`: bfloat16 words of the same shape."""
    width = from_bf16(step)
    inverse = tl.div_rn(tl.full(width.shape, 1.0, tl.float32), width)
    rounded = (values - from_bf16(lowest)) * inverse + ROUND_MAGIC
    return tl.minimum(rounded.to(tl.int32, bitcast=True) & 0x1FF, TOP)
