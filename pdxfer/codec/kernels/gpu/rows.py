"""int8 and fp8 rows in Triton: a row of `dim` values with parameters of its own."""

import triton.language as tl

from pdxfer.codec.kernels.gpu.values import (
    HUGE_RANGE,
    LARGEST,
    ROUND_MAGIC,
    TINY,
    from_bf16,
    jit,
    load,
    quantise,
    range_params,
    step_word,
    store,
)


@jit
def places(rows, dim, ROWS: tl.constexpr, DIM: tl.constexpr):
    """(rows [ROWS] of this program, offsets [ROWS, DIM], which of them are there)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    return row, row[:, None] * dim + column[None, :], (row < rows)[:, None] & (column < dim)[None, :]


@jit
def finite_part(values):
    """(values with 0 for inf and NaN, rows that had any)."""
    odd = ~(tl.abs(values) <= LARGEST)
    return tl.where(odd, 0.0, values), tl.max(odd.to(tl.int32), 1) > 0


@jit
def int8_encode(
    src, params, codes, bad, rows, dim, DTYPE: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    row, at, there = places(rows, dim, ROWS, DIM)
    values, odd = finite_part(load(src, at, there, DTYPE))
    lo = tl.min(tl.where(there, values, LARGEST), 1)
    hi = tl.max(tl.where(there, values, -LARGEST), 1)
    lowest, step, good = range_params(lo, hi, 255.0)
    good = good & ~odd
    lowest, step = tl.where(good, lowest, 0), tl.where(good, step, 0)
    found = quantise(values, lowest[:, None], step[:, None], 255)
    tl.store(codes + at, tl.where(good[:, None], found, 0).to(tl.uint8), mask=there)
    tl.store(params + 2 * row, lowest.to(tl.int16), mask=row < rows)
    tl.store(params + 2 * row + 1, step.to(tl.int16), mask=row < rows)
    tl.store(bad + row, (~good).to(tl.uint8), mask=row < rows)


@jit
def int8_decode(codes, params, dst, rows, dim, DTYPE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr):
    row, at, there = places(rows, dim, ROWS, DIM)
    lowest = from_bf16(tl.load(params + 2 * row, mask=row < rows, other=0))
    step = from_bf16(tl.load(params + 2 * row + 1, mask=row < rows, other=0))
    found = tl.load(codes + at, mask=there, other=0).to(tl.float32)
    store(dst, at, there, found * step[:, None] + lowest[:, None], DTYPE)


@jit
def fp8_encode(
    src, params, codes, bad, rows, dim, DTYPE: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    row, at, there = places(rows, dim, ROWS, DIM)
    values, odd = finite_part(load(src, at, there, DTYPE))
    largest = tl.max(tl.abs(values), 1)
    good = (largest < HUGE_RANGE) & ~odd
    part = tl.div_rn(tl.where(good, largest, 0.0), tl.full(largest.shape, 448.0, tl.float32))
    scale = step_word(tl.maximum(part, TINY))
    inverse = tl.div_rn(tl.full(largest.shape, 1.0, tl.float32), from_bf16(scale))
    scaled = values * inverse[:, None]
    bits = scaled.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    small = (tl.abs(scaled) * 512.0 + ROUND_MAGIC).to(tl.int32, bitcast=True) & 0x1F
    code = tl.minimum(tl.where(size < 0x3C800000, small, normal), 126) | ((bits >> 31) & 0x80)  # 2^-6: least normal
    tl.store(codes + at, tl.where(good[:, None], code, 0).to(tl.uint8), mask=there)
    tl.store(params + row, tl.where(good, scale, 0).to(tl.int16), mask=row < rows)
    tl.store(bad + row, (~good).to(tl.uint8), mask=row < rows)


@jit
def fp8_decode(codes, params, dst, rows, dim, DTYPE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr):
    row, at, there = places(rows, dim, ROWS, DIM)
    scale = from_bf16(tl.load(params + row, mask=row < rows, other=0))
    code = tl.load(codes + at, mask=there, other=0).to(tl.int32)
    size = code & 127
    small = (size.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)  # 2^-9
    bits = tl.where(size < 8, small, (size + 960) << 20) | ((code >> 7) << 31)
    store(dst, at, there, bits.to(tl.float32, bitcast=True) * scale[:, None], DTYPE)
