"""What klt does before entropy coding, in Triton: the arithmetic of codec/planes_numba.py, bit for bit.

P planes, H heads of one, T coded tokens of S in memory after `skip`, D head dim, C = H * D channels, W width of the
matrices. Sums over tokens are made in order, as on the CPU: a program goes through the tokens, others take other
channels. Products are in int32, where order does not matter.
"""

import triton.language as tl

from pdxfer.codec.kernels.gpu.values import ROUND_MAGIC, jit, load


@jit
def value_at(plane, token, channel, heads, dim, skip, stride):
    """Number of a value [.., ..] in [P, H, S, D]."""
    head, inside = channel // dim, channel % dim
    return ((plane.to(tl.int64) * heads + head) * stride + skip + token) * dim + inside


@jit
def rounded(values, LIMIT: tl.constexpr):
    """(nearest integers, float32, 0 where beyond the limit; which are not)."""
    fits = tl.abs(values) <= LIMIT
    return (tl.where(fits, values, 0.0) + ROUND_MAGIC) - ROUND_MAGIC, fits


@jit
def stats(values, mean, deviation, heads, dim, tokens, skip, stride, each, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Mean and mean square distance from it of each channel [P, C]; `each`: 1 / tokens."""
    plane, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = channel < heads * dim
    total = tl.zeros((BLOCK,), tl.float32)
    for t in range(tokens):
        x = load(values, value_at(plane, t, channel, heads, dim, skip, stride), there, DTYPE)
        total += tl.where(tl.abs(x) < 1e18, x, 0.0) * each
    squares = tl.zeros((BLOCK,), tl.float32)
    for t in range(tokens):
        x = load(values, value_at(plane, t, channel, heads, dim, skip, stride), there, DTYPE)
        distance = tl.where(tl.abs(x) < 1e18, x, 0.0) - total
        squares += (distance * distance) * each
    tl.store(mean + plane * heads * dim + channel, total, mask=there)
    tl.store(deviation + plane * heads * dim + channel, squares, mask=there)


@jit
def keep_symbols(scaled, wrong, sym, escaped, first_row, plane, token, tokens, channel, used):
    """Symbols [T, C] of scaled values, rows first_row + channel of `sym`; all 128 in tokens that do not fit."""
    there = (token < tokens)[:, None] & (channel < used)[None, :]
    whole, fits = rounded(scaled, 127.0)
    bad = (tl.max((there & ~fits).to(tl.int32), 1) | wrong) != 0
    found = tl.where(bad[:, None], 128, whole.to(tl.int32) + 128)
    row = (first_row + channel).to(tl.int64)
    tl.store(sym + row[None, :] * tokens + token[:, None], found.to(tl.uint8), mask=there)
    tl.store(escaped + plane * tokens + token, bad.to(tl.uint8), mask=token < tokens)


@jit
def quantise(
    values, mean, inverse, sym, escaped, heads, dim, tokens, skip, stride, DTYPE: tl.constexpr, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Symbols of (x - mean) * inverse."""
    plane, channels = tl.program_id(0), heads * dim
    token, channel = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, CHANNELS)
    there = (token < tokens)[:, None] & (channel < channels)[None, :]
    at = value_at(plane, token[:, None], channel[None, :], heads, dim, skip, stride)
    x = load(values, at, there, DTYPE)
    middle = tl.load(mean + plane * channels + channel, mask=channel < channels, other=0.0)
    scale = tl.load(inverse + plane * channels + channel, mask=channel < channels, other=0.0)
    scaled = (x - middle[None, :]) * scale[None, :]
    wrong = tl.zeros((TOKENS,), tl.int32)
    keep_symbols(scaled, wrong, sym, escaped, plane * channels, plane, token, tokens, channel, channels)


@jit
def prepare(
    values, mean, in_scale, turned, angles, whole, bad, heads, dim, tokens, skip, stride, rotary, DTYPE: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """whole [P, T, C] int16 = round((x - mean) * in_scale), x with RoPE off; bad [P, T]."""
    plane, channels = tl.program_id(0), heads * dim
    token, channel = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, CHANNELS)
    there = (token < tokens)[:, None] & (channel < channels)[None, :]
    x = load(values, value_at(plane, token[:, None], channel[None, :], heads, dim, skip, stride), there, DTYPE)
    half, inside = rotary // 2, channel % dim
    lower, turns = inside < half, inside < tl.load(turned + plane).to(tl.int32) * rotary
    other = tl.where(turns, tl.where(lower, channel + half, channel - half), channel)
    y = load(values, value_at(plane, token[:, None], other[None, :], heads, dim, skip, stride), there, DTYPE)
    angle = token[:, None] * rotary + tl.where(lower, inside, inside - half)[None, :]
    cosine = tl.load(angles + angle, mask=there & turns[None, :], other=1.0)
    sine = -tl.load(angles + angle + half, mask=there & turns[None, :], other=0.0)
    straight, across = x * cosine, y * sine
    x = tl.where(turns[None, :], tl.where(lower[None, :], straight - across, straight + across), x)
    middle = tl.load(mean + plane * channels + channel, mask=channel < channels, other=0.0)
    scale = tl.load(in_scale + plane * channels + channel, mask=channel < channels, other=0.0)
    found, fits = rounded((x - middle[None, :]) * scale[None, :], 8191.0)
    at = (plane.to(tl.int64) * tokens + token[:, None]) * channels + channel[None, :]
    tl.store(whole + at, found.to(tl.int16), mask=there)
    wrong = tl.max((there & ~fits).to(tl.int32), 1)
    tl.store(bad + plane * tokens + token, wrong.to(tl.uint8), mask=token < tokens)


@jit
def products(whole, forward, sums, tokens, channels, width, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """sums [P, T, W] = whole · forward, which is pair matrices [P, C / 2, W, 2]."""
    plane = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((TOKENS, COLUMNS), tl.int32)
    for k in range(channels):
        x = tl.load(whole + (plane * tokens + token) * channels + k, mask=token < tokens, other=0).to(tl.int32)
        at = ((plane * (channels // 2) + k // 2) * width + column) * 2 + k % 2
        weight = tl.load(forward + at, mask=column < width, other=0).to(tl.int32)
        total += x[:, None] * weight[None, :]
    there = (token < tokens)[:, None] & (column < width)[None, :]
    tl.store(sums + (plane * tokens + token[:, None]) * width + column[None, :], total, mask=there)


@jit
def shifts_of(sums, out_scale, bad, kept, starts, shifts, tokens, width, COLUMNS: tl.constexpr):
    """Mean of each kept coefficient over the tokens that are not bad, in eighths."""
    plane = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < tl.load(kept + plane)
    scale = tl.load(out_scale + plane * width + column, mask=there, other=0.0)
    total, num_good = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.int32)
    for t in range(tokens):
        good = tl.load(bad + plane * tokens + t) == 0
        found = tl.load(sums + (plane * tokens + t) * width + column, mask=there, other=0).to(tl.float32) * scale
        total += tl.where(good, found, 0.0)
        num_good += tl.where(good, 1, 0)
    each = tl.div_rn(tl.full((COLUMNS,), 8.0, tl.float32), tl.maximum(num_good, 1).to(tl.float32))
    eighths = tl.minimum(tl.maximum(total * each, -16000.0), 16000.0)
    whole = (eighths + ROUND_MAGIC) - ROUND_MAGIC
    tl.store(shifts + tl.load(starts + plane) + column, whole.to(tl.int16), mask=there)


@jit
def symbols_of(
    sums, out_scale, bad, kept, starts, shifts, sym, escaped, tokens, width, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Symbols of the coefficients without their shifts."""
    plane, token = tl.program_id(0), tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    column, used, start = tl.arange(0, COLUMNS), tl.load(kept + plane).to(tl.int32), tl.load(starts + plane)
    scale = tl.load(out_scale + plane * width + column, mask=column < used, other=0.0)
    shift = tl.load(shifts + start + column, mask=column < used, other=0).to(tl.float32) * 0.125
    at = (plane.to(tl.int64) * tokens + token[:, None]) * width + column[None, :]
    there = (token < tokens)[:, None] & (column < used)[None, :]
    scaled = tl.load(sums + at, mask=there, other=0).to(tl.float32) * scale[None, :]
    wrong = tl.load(bad + plane * tokens + token, mask=token < tokens, other=0).to(tl.int32)
    keep_symbols(scaled - shift[None, :], wrong, sym, escaped, start, plane, token, tokens, column, used)
