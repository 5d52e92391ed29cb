"""lossless groups in numba."""

from typing import Any

import numpy as np

from pdxfer.codec.kernels import GROUP
from pdxfer.codec.kernels.jit_values import U8, U16, U32, U64, jit


@jit
def lossless_encode(
    words: Any,
    stride: int,
    half: bool,
    base: Any,
    planes: Any,
    extra: Any,
    rest: Any,
    counts: Any,
    escapes: Any,
) -> int:
    used = 0
    exponent = np.empty(GROUP, U8)
    for g in range(base.size):
        first, most = g * GROUP, U8(0)
        high0, high1, high2 = U64(0), U64(0), U64(0)
        for i in range(GROUP):
            u = U32(words[(first + i) * stride])
            if half:
                exponent[i] = U8((u >> U32(10)) & U32(31))
                rest[first + i] = U8(u & U32(0xFF))
                high0 |= U64((u >> U32(8)) & U32(1)) << U64(i)
                high1 |= U64((u >> U32(9)) & U32(1)) << U64(i)
                high2 |= U64(u >> U32(15)) << U64(i)
            else:
                exponent[i] = U8((u >> U32(7)) & U32(255))
                rest[first + i] = U8(((u >> U32(8)) & U32(0x80)) | (u & U32(0x7F)))
        for i in range(GROUP):
            most = max(most, exponent[i])
        p0, p1, p2 = U64(0), U64(0), U64(0)
        for i in range(GROUP):
            d = min(U64(most) - U64(exponent[i]), U64(7))
            p0 |= (d & U64(1)) << U64(i)
            p1 |= ((d >> U64(1)) & U64(1)) << U64(i)
            p2 |= (d >> U64(2)) << U64(i)
        base[g] = most
        planes[3 * g], planes[3 * g + 1], planes[3 * g + 2] = p0, p1, p2
        if half:
            extra[3 * g], extra[3 * g + 1], extra[3 * g + 2] = high0, high1, high2
        escaped = p0 & p1 & p2
        before = used
        if escaped:
            for i in range(GROUP):
                if (escaped >> U64(i)) & U64(1):
                    if used == escapes.size:
                        return -1
                    escapes[used] = exponent[i]
                    used += 1
        if g % GROUP == 0:
            counts[g // GROUP] = 0
        counts[g // GROUP] += U16(used - before)
    return used


@jit
def lossless_decode(
    base: Any, planes: Any, extra: Any, rest: Any, counts: Any, escapes: Any, half: bool, words: Any, stride: int
) -> bool:
    used = segment = 0
    exponent = np.empty(GROUP, U8)
    for g in range(base.size):
        p0, p1, p2, most = planes[3 * g], planes[3 * g + 1], planes[3 * g + 2], base[g]
        for i in range(GROUP):
            k = U64(i)
            d = ((p0 >> k) & U64(1)) | (((p1 >> k) & U64(1)) << U64(1)) | (((p2 >> k) & U64(1)) << U64(2))
            exponent[i] = U8(U64(most) - d)
        escaped = p0 & p1 & p2
        if escaped:
            for i in range(GROUP):
                if (escaped >> U64(i)) & U64(1):
                    if used == escapes.size:
                        return False
                    exponent[i] = escapes[used]
                    used += 1
                    segment += 1
        first = g * GROUP
        if half:
            h0, h1, h2 = extra[3 * g], extra[3 * g + 1], extra[3 * g + 2]
            for i in range(GROUP):
                k = U64(i)
                high = ((h0 >> k) & U64(1)) << U64(8) | ((h1 >> k) & U64(1)) << U64(9) | ((h2 >> k) & U64(1)) << U64(15)
                words[(first + i) * stride] = U16(U64(rest[first + i]) | high | U64(exponent[i] & U8(31)) << U64(10))
        else:
            for i in range(GROUP):
                r = U32(rest[first + i])
                u = (r & U32(0x80)) << U32(8) | U32(exponent[i]) << U32(7) | (r & U32(0x7F))
                words[(first + i) * stride] = U16(u)
        if g % GROUP == GROUP - 1 or g == base.size - 1:
            if segment != counts[g // GROUP]:
                return False
            segment = 0
    return bool(used == escapes.size)
