"""The plane kernels of native/klt.c in numba, bit for bit, where there is no C library. Called by planes.py only.

Arrays: values [P, H, S, D] uint16 (bfloat16 bits) or float32; angles [T, rotary] cosines then sines.
"""

import numba
import numpy as np

from pdxfer.codec import rans_numba

MAGIC = np.float32(12582912.0)
FORWARD_LIMIT = np.float32(8191.0)
SYMBOL_LIMIT = np.float32(127.0)
SHIFT_LIMIT = np.float32(16000.0)
FINITE_LIMIT = np.float32(1e18)

_jit = numba.njit(cache=True, nogil=True, error_model="numpy")


@_jit
def load_token(plane, t, wide, x):  # type: ignore[no-untyped-def]
    """x [C] float32 of token t of plane [H, S, D]."""
    heads, _, dim = plane.shape
    if wide:
        for h in range(heads):
            for d in range(dim):
                x[h * dim + d] = plane[h, t, d]
    else:
        bits = x.view(np.uint32)
        for h in range(heads):
            for d in range(dim):
                bits[h * dim + d] = np.uint32(plane[h, t, d]) << np.uint32(16)


@_jit
def store_token(plane, t, wide, x):  # type: ignore[no-untyped-def]
    """The reverse, rounded to nearest even."""
    heads, _, dim = plane.shape
    if wide:
        for h in range(heads):
            for d in range(dim):
                plane[h, t, d] = x[h * dim + d]
    else:
        bits = x.view(np.uint32)
        for h in range(heads):
            for d in range(dim):
                u = bits[h * dim + d]
                rounded = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
                plane[h, t, d] = np.uint16(rounded)


@_jit
def turn(x, heads, dim, angles, sign):  # type: ignore[no-untyped-def]
    """RoPE on (sign 1) or off (-1) in place."""
    half = angles.size // 2
    for h in range(heads):
        at = h * dim
        for i in range(half):
            a = x[at + i]
            b = x[at + i + half]
            s = sign * angles[half + i]
            left = a * angles[i]
            right = b * s
            up = b * angles[i]
            down = a * s
            x[at + i] = left - right
            x[at + i + half] = up + down


@_jit
def stats(values, skip, tokens, wide, mean, deviation):  # type: ignore[no-untyped-def]
    """As klt_stats."""
    planes, heads, _, dim = values.shape
    channels = heads * dim
    each = np.float32(1) / np.float32(tokens)
    x = np.empty(channels, np.float32)
    for p in range(planes):
        mean[p] = 0
        deviation[p] = 0
        for phase in range(2):
            for t in range(tokens):
                load_token(values[p], skip + t, wide, x)
                for c in range(channels):
                    v = x[c] if abs(x[c]) < FINITE_LIMIT else np.float32(0)
                    if phase == 0:
                        mean[p, c] += v * each
                    else:
                        d = v - mean[p, c]
                        square = d * d
                        deviation[p, c] += square * each


@_jit
def _symbols(scaled, q):  # type: ignore[no-untyped-def]
    """128 + round(scaled) into q; True, and 128 throughout, if one does not fit."""
    bad = False
    for k in range(q.size):
        v = scaled[k]
        fits = abs(v) <= SYMBOL_LIMIT
        bad |= not fits
        r = (v if fits else np.float32(0)) + MAGIC
        q[k] = np.uint8(np.int32(r - MAGIC) + 128)
    if bad:
        q[:] = 128
    return bad


@_jit
def quantise(values, skip, tokens, wide, mean, inverse, sym, escaped):  # type: ignore[no-untyped-def]
    """As klt_quantise."""
    planes, heads, _, dim = values.shape
    channels = heads * dim
    x = np.empty(channels, np.float32)
    q = np.empty(channels, np.uint8)
    for p in range(planes):
        rows = sym[p * channels : (p + 1) * channels]
        for t in range(tokens):
            load_token(values[p], skip + t, wide, x)
            for c in range(channels):
                x[c] = (x[c] - mean[p, c]) * inverse[p, c]
            escaped[p, t] = _symbols(x, q)
            for c in range(channels):
                rows[c, t] = q[c]


@_jit
def prepare(plane, skip, wide, mean, in_scale, turned, angles, whole, bad):  # type: ignore[no-untyped-def]
    """First part of klt_forward for one plane: whole [T, C] = round((x - mean) * in_scale), bad [T]."""
    heads, _, dim = plane.shape
    x = np.empty(heads * dim, np.float32)
    for t in range(whole.shape[0]):
        load_token(plane, skip + t, wide, x)
        if turned:
            turn(x, heads, dim, angles[t], np.float32(-1))
        wrong = False
        for c in range(x.size):
            v = (x[c] - mean[c]) * in_scale[c]
            fits = abs(v) <= FORWARD_LIMIT
            wrong |= not fits
            r = (v if fits else np.float32(0)) + MAGIC
            whole[t, c] = r - MAGIC
        bad[t] = wrong


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def products(rows, matrix, sums):  # type: ignore[no-untyped-def]
    """sums [T, M] = rows [T, N] · matrix [N, M], all of integers that the float type holds exactly, so that neither
    order nor fused operations matter. Not by a BLAS: its threads would take cores that are not ours."""
    tokens, inner = rows.shape
    columns = sums.shape[1]
    whole_tokens, whole_inner = tokens - tokens % 4, inner - inner % 4
    sums[:] = 0
    for t in range(0, whole_tokens, 4):
        s0, s1, s2, s3 = sums[t], sums[t + 1], sums[t + 2], sums[t + 3]
        for k in range(0, whole_inner, 4):
            a0, a1, a2, a3 = rows[t, k], rows[t, k + 1], rows[t, k + 2], rows[t, k + 3]
            b0, b1, b2, b3 = rows[t + 1, k], rows[t + 1, k + 1], rows[t + 1, k + 2], rows[t + 1, k + 3]
            c0, c1, c2, c3 = rows[t + 2, k], rows[t + 2, k + 1], rows[t + 2, k + 2], rows[t + 2, k + 3]
            d0, d1, d2, d3 = rows[t + 3, k], rows[t + 3, k + 1], rows[t + 3, k + 2], rows[t + 3, k + 3]
            w0, w1, w2, w3 = matrix[k], matrix[k + 1], matrix[k + 2], matrix[k + 3]
            for c in range(columns):
                x0, x1, x2, x3 = w0[c], w1[c], w2[c], w3[c]
                s0[c] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
                s1[c] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
                s2[c] += c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3
                s3[c] += d0 * x0 + d1 * x1 + d2 * x2 + d3 * x3
    for t in range(tokens):
        row = sums[t]
        for k in range(whole_inner if t < whole_tokens else 0, inner):
            a, w = rows[t, k], matrix[k]
            for c in range(columns):
                row[c] += a * w[c]


@_jit
def symbols_of(sums, out_scale, sym, shifts, bad):  # type: ignore[no-untyped-def]
    """Second part: shifts [kept] and sym [kept, T] of sums [T, kept], which hold integers."""
    tokens, used = sums.shape
    v = np.empty((tokens, used), np.float32)
    total = np.zeros(used, np.float32)
    good = 0
    for t in range(tokens):
        for k in range(used):
            v[t, k] = np.float32(np.int32(sums[t, k])) * out_scale[k]
        if bad[t]:
            continue
        good += 1
        for k in range(used):
            total[k] += v[t, k]
    each = np.float32(8) / np.float32(max(good, 1))
    shift = np.empty(used, np.float32)
    for k in range(used):
        eighths = min(max(total[k] * each, -SHIFT_LIMIT), SHIFT_LIMIT)
        r = eighths + MAGIC
        shifts[k] = np.int16(np.int32(r - MAGIC))
        shift[k] = np.float32(shifts[k]) * np.float32(0.125)
    q = np.empty(used, np.uint8)
    for t in range(tokens):
        row = v[t]
        for k in range(used):
            row[k] -= shift[k]
        if _symbols(row, q):
            bad[t] = 1
        for k in range(used):
            sym[k, t] = np.uint8(128) if bad[t] else q[k]


@_jit
def symbols(words, freq, table, slots, kept, by_channel, sums):  # type: ignore[no-untyped-def]
    """First part of klt_decode: sums [P, T, C], or [P, C, T] if `by_channel`, = symbol - 128; untouched beyond kept."""
    error = rans_numba.check(freq)
    if error != rans_numba.OK:
        return error
    states = np.empty(rans_numba.LANES, np.uint32)
    pos = rans_numba.open_states(words, states)
    if pos < 0:
        return pos
    for i in range(freq.shape[0]):
        rans_numba.fill_slots(freq[i], slots[i])
    planes = sums.shape[0]
    tokens, channels = (sums.shape[2], sums.shape[1]) if by_channel else (sums.shape[1], sums.shape[2])
    rows = np.empty((16, tokens), np.uint8)
    row = 0
    for p in range(planes):
        used = kept[p]
        if used < 0 or used > channels:
            return rans_numba.BAD_TABLE
        to = sums[p]
        for start in range(0, used, 16):
            n = min(16, used - start)
            for k in range(n):
                if table[row] >= freq.shape[0]:
                    return rans_numba.BAD_TABLE
                pos = rans_numba.decode_row(words, pos, states, slots[table[row]], rows[k])
                if pos < 0:
                    return pos
                row += 1
            if by_channel:
                for k in range(n):
                    channel = to[start + k]
                    for t in range(tokens):
                        channel[t] = np.float32(np.int32(rows[k, t]) - 128)
                continue
            for t in range(tokens):
                for k in range(n):
                    to[t, start + k] = np.float32(np.int32(rows[k, t]) - 128)
    return rans_numba.close_states(words, pos, states)


@_jit
def finish(sums, skip, wide, mean, scale, turned, angles, out):  # type: ignore[no-untyped-def]
    """Last part of klt_decode: out = sums * scale + mean, with RoPE back on."""
    planes, heads, _, dim = out.shape
    x = np.empty(heads * dim, np.float32)
    for p in range(planes):
        for t in range(sums.shape[1]):
            row = sums[p, t]
            for c in range(x.size):
                scaled = row[c] * scale[p, c]
                x[c] = scaled + mean[p, c]
            if turned[p]:
                turn(x, heads, dim, angles[t], np.float32(1))
            store_token(out[p], skip + t, wide, x)
