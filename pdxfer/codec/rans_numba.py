"""The rANS coder of native/rans.c in numba, bit for bit: for machines without the C library. Called by rans.py only."""

import numba
import numpy as np

LANES = 64
BITS = 12
PROB = 1 << BITS
LOW = 1 << 15
OK, CUT, BAD_TABLE, BAD_SYMBOL, BAD_END = 0, -1, -2, -3, -4

_jit = numba.njit(cache=True, nogil=True, error_model="numpy")


@_jit
def check(freq):  # type: ignore[no-untyped-def]
    """Every table sums to 4096 and leaves no symbol the whole of it."""
    for t in range(freq.shape[0]):
        total = 0
        for s in range(256):
            if freq[t, s] >= PROB:
                return BAD_TABLE
            total += int(freq[t, s])
        if total != PROB:
            return BAD_TABLE
    return OK


@_jit
def fill_slots(freq, slots):  # type: ignore[no-untyped-def]
    """freq[256] → slots[4096]."""
    at = 0
    for s in range(256):
        f = np.uint32(freq[s])
        for k in range(f):
            slots[at] = np.uint32(s) | (f << np.uint32(8)) | (np.uint32(k) << np.uint32(20))
            at += 1


@_jit
def decode_row(words, pos, states, slots, sym):  # type: ignore[no-untyped-def]
    """One row; the next position in `words`, or CUT. Two loops a step: the first is done in vectors, the second is the
    part that is not parallel: which lane takes which word."""
    low, mask = np.uint32(LOW), np.uint32(PROB - 1)
    full = sym.size - sym.size % LANES
    for start in range(0, full, LANES):
        if words.size - pos < LANES + 1:
            full = start
            break
        out = sym[start : start + LANES]
        for i in range(LANES):
            x = states[i]
            e = slots[x & mask]
            out[i] = np.uint8(e & np.uint32(0xFF))
            states[i] = ((e >> np.uint32(8)) & np.uint32(0xFFF)) * (x >> np.uint32(BITS)) + (e >> np.uint32(20))
        at = np.uint64(pos)
        for i in range(LANES):
            x = states[i]
            word = np.uint32(words[at])
            is_low = x < low
            states[i] = ((x << np.uint32(16)) | word) if is_low else x
            at += np.uint64(is_low)
        pos = np.int64(at)
    for j in range(full, sym.size):
        i = j % LANES
        x = states[i]
        e = slots[x & mask]
        sym[j] = np.uint8(e & np.uint32(0xFF))
        x = ((e >> np.uint32(8)) & np.uint32(0xFFF)) * (x >> np.uint32(BITS)) + (e >> np.uint32(20))
        if x < low:
            if pos >= words.size:
                return CUT
            x = (x << np.uint32(16)) | np.uint32(words[pos])
            pos += 1
        states[i] = x
    return pos


@_jit
def open_states(words, states):  # type: ignore[no-untyped-def]
    """The 64 states at the head of `words`; the position after them, or CUT."""
    if words.size < 2 * LANES:
        return CUT
    for i in range(LANES):
        states[i] = (np.uint32(words[2 * i]) << np.uint32(16)) | np.uint32(words[2 * i + 1])
    return 2 * LANES


@_jit
def close_states(words, pos, states):  # type: ignore[no-untyped-def]
    """OK if all words were used and every state is back where the encoder began."""
    if pos != words.size:
        return BAD_END
    for i in range(LANES):
        if states[i] != LOW:
            return BAD_END
    return OK


@_jit
def decode(words, freq, table, slots, shared, sym):  # type: ignore[no-untyped-def]
    """As rans_decode in native/rans.c."""
    error = check(freq)
    if error != OK:
        return error
    states = np.empty(LANES, np.uint32)
    pos = open_states(words, states)
    if pos < 0:
        return pos
    if shared:
        for t in range(freq.shape[0]):
            fill_slots(freq[t], slots[t])
    for i in range(sym.shape[0]):
        t = int(table[i])
        if t >= freq.shape[0]:
            return BAD_TABLE
        if not shared:
            fill_slots(freq[t], slots[0])
        pos = decode_row(words, pos, states, slots[t if shared else 0], sym[i])
        if pos < 0:
            return pos
    return close_states(words, pos, states)


@_jit
def encode(sym, freq, table, out):  # type: ignore[no-untyped-def]
    """As rans_encode in native/rans.c; plain division, which its reciprocals equal."""
    error = check(freq)
    if error != OK:
        return error
    states = np.full(LANES, LOW, np.uint32)
    first = np.empty(256, np.uint32)
    current = -1
    pos = out.size
    for i in range(sym.shape[0] - 1, -1, -1):
        t = int(table[i])
        if t >= freq.shape[0]:
            return BAD_TABLE
        if t != current:
            at = np.uint32(0)
            for s in range(256):
                first[s] = at
                at += np.uint32(freq[t, s])
            current = t
        for j in range(sym.shape[1] - 1, -1, -1):
            s = sym[i, j]
            f = np.uint32(freq[t, s])
            if f == 0:
                return BAD_SYMBOL
            x = states[j & (LANES - 1)]
            if x >= f << np.uint32(31 - BITS):
                if pos < 1:
                    return CUT
                pos -= 1
                out[pos] = np.uint16(x & np.uint32(0xFFFF))
                x >>= np.uint32(16)
            d = x // f
            states[j & (LANES - 1)] = (d << np.uint32(BITS)) + (x - d * f) + first[s]
    if pos < 2 * LANES:
        return CUT
    for i in range(LANES - 1, -1, -1):
        out[pos - 1] = np.uint16(states[i] & np.uint32(0xFFFF))
        out[pos - 2] = np.uint16(states[i] >> np.uint32(16))
        pos -= 2
    return out.size - pos


@_jit
def count(sym, table, counts):  # type: ignore[no-untyped-def]
    """As rans_count in native/rans.c."""
    for i in range(sym.shape[0]):
        if table[i] >= counts.shape[0]:
            return BAD_TABLE
        row = counts[table[i]]
        for j in range(sym.shape[1]):
            row[sym[i, j]] += np.uint32(1)
    return OK
