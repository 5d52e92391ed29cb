"""int4 tiles in Triton. A unit is a tile of 32 tokens of a plane; programs are units, then blocks of one."""

import triton.language as tl

from pdxfer.codec.kernels.gpu.values import LARGEST, from_bf16, jit, load, quantise, range_params, store


@jit
def unit_place(unit, heads, tokens, dim):
    """(is V, first value, number of tokens, first parameter, first byte of codes) of a unit."""
    tiles, groups = (tokens + 31) // 32, (dim + 31) // 32
    plane, tile = (unit // tiles).to(tl.int64), unit % tiles
    layer, rest = plane // (2 * heads), plane % (2 * heads)
    is_v = rest // heads
    num_k = layer * heads + tl.where(is_v == 1, heads, rest)
    num_v = layer * heads + tl.where(is_v == 1, rest - heads, 0)
    inside = tl.where(is_v == 1, tile * 32 * groups, tile * dim)
    params_at = 2 * (num_k * tiles * dim + num_v * tokens * groups + inside)
    plane_bytes = (tokens // 32) * 16 * dim + ((tokens % 32) * dim + 1) // 2
    codes_at = plane * plane_bytes + tile * 16 * dim
    return is_v == 1, (plane * tokens + tile * 32) * dim, tl.minimum(tokens - tile * 32, 32), params_at, codes_at


@jit
def keep(params, at, used, lowest, step, good, num_odd):
    """Parameters of one unit, 0 if it is bad; 1 if it is."""
    num_bad = tl.sum(tl.ravel((used & ~good).to(tl.int32)), 0) + num_odd
    tl.store(params + at, tl.where(num_bad == 0, lowest, 0).to(tl.int16), mask=used)
    tl.store(params + at + 1, tl.where(num_bad == 0, step, 0).to(tl.int16), mask=used)
    return (num_bad != 0).to(tl.uint8)


@jit
def keep_k(params, at, low, high, num_odd, dim, DIM: tl.constexpr):
    """Of a tile of K: a pair a channel."""
    column = tl.arange(0, DIM)
    lowest, step, good = range_params(tl.min(low, 0), tl.max(high, 0), 15.0)
    return keep(params, at + 2 * column, column < dim, lowest, step, good, num_odd)


@jit
def keep_v(params, at, low, high, num_odd, count, dim, DIM: tl.constexpr):
    """Of a tile of V: a pair a token and 32 channels."""
    token, group, groups = tl.arange(0, 32), tl.arange(0, DIM // 32), (dim + 31) // 32
    lo = tl.min(tl.reshape(low, (32, DIM // 32, 32)), 2)
    hi = tl.max(tl.reshape(high, (32, DIM // 32, 32)), 2)
    lowest, step, good = range_params(lo, hi, 15.0)
    used = (token < count)[:, None] & (group < groups)[None, :]
    return keep(params, at + 2 * (token[:, None] * groups + group[None, :]), used, lowest, step, good, num_odd)


@jit
def params_of(src, params, bad, heads, tokens, dim, DTYPE: tl.constexpr, DIM: tl.constexpr):
    """First part of encoding: parameters and `bad`."""
    unit = tl.program_id(0)
    is_v, first, count, params_at, _ = unit_place(unit, heads, tokens, dim)
    token, column = tl.arange(0, 32), tl.arange(0, DIM)
    there = (token < count)[:, None] & (column < dim)[None, :]
    values = load(src, first + token[:, None] * dim + column[None, :], there, DTYPE)
    odd = ~(tl.abs(values) <= LARGEST)
    num_odd = tl.sum(tl.sum(odd.to(tl.int32), 1), 0)
    low, high = tl.where(there & ~odd, values, LARGEST), tl.where(there & ~odd, values, -LARGEST)
    if is_v:
        wrong = keep_v(params, params_at, low, high, num_odd, count, dim, DIM)
    else:
        wrong = keep_k(params, params_at, low, high, num_odd, dim, DIM)
    tl.store(bad + unit, wrong)


@jit
def pair_of(value, is_v, params_at, dim):
    """Where the parameters of values (numbered inside their unit) are."""
    groups = (dim + 31) // 32
    return params_at + 2 * tl.where(is_v, (value // dim) * groups + (value % dim) // 32, value % dim)


@jit
def codes_of(
    src, params, bad, codes, heads, tokens, dim, DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Second part: packed codes; byte i holds values i and i + half."""
    unit = tl.program_id(0)
    is_v, first, count, params_at, codes_at = unit_place(unit, heads, tokens, dim)
    size = count * dim
    half = (size + 1) // 2
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    fine = tl.load(bad + unit) == 0
    packed = tl.zeros((BLOCK,), tl.int32)
    for upper in tl.static_range(2):
        value = byte + upper * half
        there = (byte < half) & (value < size)
        pair = pair_of(value, is_v, params_at, dim)
        lowest = tl.load(params + pair, mask=there, other=0)
        step = tl.load(params + pair + 1, mask=there, other=1)
        found = quantise(load(src, first + value, there, DTYPE), lowest, step, 15)
        packed = packed | (tl.where(there & fine, found, 0) << (4 * upper))
    tl.store(codes + codes_at + byte, packed.to(tl.uint8), mask=byte < half)


@jit
def int4_decode(codes, params, dst, heads, tokens, dim, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    is_v, first, count, params_at, codes_at = unit_place(tl.program_id(0), heads, tokens, dim)
    size = count * dim
    half = (size + 1) // 2
    value = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = value < size
    upper = value >= half
    packed = tl.load(codes + codes_at + tl.where(upper, value - half, value), mask=there, other=0).to(tl.int32)
    pair = pair_of(value, is_v, params_at, dim)
    lowest = from_bf16(tl.load(params + pair, mask=there, other=0))
    step = from_bf16(tl.load(params + pair + 1, mask=there, other=0))
    found = tl.where(upper, packed >> 4, packed & 15).to(tl.float32)
    store(dst, first + value, there, found * step + lowest, DTYPE)
