"""lossless groups of 64 values in Triton. `starts`: how many escapes are before each group."""

import triton.language as tl

from pdxfer.codec.kernels.gpu.values import jit


@jit
def places(groups, GROUPS: tl.constexpr):
    """(groups of this program, their values' numbers [GROUPS, 64], which are there)."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    item = tl.arange(0, 64)
    return group, group[:, None] * 64 + item[None, :], (group < groups)[:, None] & (item >= 0)[None, :]


@jit
def word_of(bits):
    """[GROUPS, 64] of 0 or 1 → [GROUPS] words."""
    return tl.sum(bits.to(tl.int64) << tl.arange(0, 64).to(tl.int64)[None, :], 1)


@jit
def bits_of(words, group, part, there):
    """[GROUPS, 64] of 0 or 1 of the part-th of three words a group."""
    found = tl.load(words + 3 * group[:, None] + part + tl.zeros_like(there.to(tl.int64)), mask=there, other=0)
    return ((found >> tl.arange(0, 64).to(tl.int64)[None, :]) & 1).to(tl.int32)


@jit
def exponents(src, at, there, stride, HALF: tl.constexpr):
    """(words, exponents)."""
    words = tl.load(src + at * stride, mask=there, other=0).to(tl.int32) & 0xFFFF
    if HALF:
        found = (words >> 10) & 31
    else:
        found = (words >> 7) & 255
    return words, found


@jit
def split(
    src, base, planes, extra, rest, counts, groups, stride, HALF: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """First part of encoding: all but the escapes; `counts`: escapes of each group."""
    group, at, there = places(groups, GROUPS)
    words, exponent = exponents(src, at, there, stride, HALF)
    most = tl.max(exponent, 1)
    distance = tl.minimum(most[:, None] - exponent, 7)
    for part in tl.static_range(3):
        tl.store(planes + 3 * group + part, word_of((distance >> part) & 1), mask=group < groups)
    if HALF:
        low = words & 255
        high = ((words >> 8) & 3) | ((words >> 13) & 4)
        for part in tl.static_range(3):
            tl.store(extra + 3 * group + part, word_of((high >> part) & 1), mask=group < groups)
    else:
        low = ((words >> 8) & 128) | (words & 127)
    tl.store(rest + at, low.to(tl.uint8), mask=there)
    tl.store(base + group, most.to(tl.uint8), mask=group < groups)
    tl.store(counts + group, tl.sum((distance == 7).to(tl.int32), 1), mask=group < groups)


@jit
def escape(src, base, starts, escapes, groups, stride, HALF: tl.constexpr, GROUPS: tl.constexpr):
    """Second part: the escaped exponents, in order."""
    group, at, there = places(groups, GROUPS)
    _, exponent = exponents(src, at, there, stride, HALF)
    most = tl.load(base + group, mask=group < groups, other=0).to(tl.int32)
    escaped = (there & (most[:, None] - exponent >= 7)).to(tl.int32)
    before = tl.cumsum(escaped, 1) - escaped
    start = tl.load(starts + group, mask=group < groups, other=0)
    tl.store(escapes + start[:, None] + before, exponent.to(tl.uint8), mask=escaped != 0)


@jit
def count(planes, counts, groups, GROUPS: tl.constexpr):
    """First part of decoding: escapes of each group."""
    group, _, there = places(groups, GROUPS)
    escaped = bits_of(planes, group, 0, there) & bits_of(planes, group, 1, there) & bits_of(planes, group, 2, there)
    tl.store(counts + group, tl.sum(escaped, 1), mask=group < groups)


@jit
def join(
    base, planes, extra, rest, starts, escapes, dst, groups, stride,
    HALF: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Second part: words; the number of escapes has been checked."""
    group, at, there = places(groups, GROUPS)
    b0, b1 = bits_of(planes, group, 0, there), bits_of(planes, group, 1, there)
    distance = b0 | (b1 << 1) | (bits_of(planes, group, 2, there) << 2)
    escaped = (distance == 7).to(tl.int32)
    before = tl.cumsum(escaped, 1) - escaped
    start = tl.load(starts + group, mask=group < groups, other=0)
    kept = tl.load(escapes + start[:, None] + before, mask=there & (escaped != 0), other=0).to(tl.int32)
    most = tl.load(base + group, mask=group < groups, other=0).to(tl.int32)
    exponent = tl.where(escaped != 0, kept, (most[:, None] - distance) & 255)
    low = tl.load(rest + at, mask=there, other=0).to(tl.int32)
    if HALF:
        h0, h1 = bits_of(extra, group, 0, there), bits_of(extra, group, 1, there)
        sign = bits_of(extra, group, 2, there) << 15
        words = low | (h0 << 8) | (h1 << 9) | ((exponent & 31) << 10) | sign
    else:
        words = ((low & 128) << 8) | (exponent << 7) | (low & 127)
    tl.store(dst + at * stride, words.to(tl.int16), mask=there)
