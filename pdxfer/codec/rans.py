"""Entropy coder of klt and cachegen: interleaved rANS over rows of byte symbols, each row with one frequency table.

    words = encode(sym, table, freq)          sym uint8 [rows, cols], table uint32 [rows], freq uint16 [tables, 256]
    decode(words, table, freq, cols)          → sym; raises FrameError for anything that `encode` did not make

64 lanes, 12-bit frequencies, 16-bit words; in C for AVX-512, AVX2 or anything (native/rans.c), or in numba: same bits.
"""

from collections.abc import Callable
from ctypes import c_int, c_int64
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from pdxfer.codec.frame import FrameError
from pdxfer.codec.native import POINTER, function, pointer
from pdxfer.core.errors import ConfigError
from pdxfer.core.install import pip_install

Symbols = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]
Freq = npt.NDArray[np.uint16]
Rows = npt.NDArray[np.uint32]

PROB = 4096
"""Frequencies of one table sum to this; one alone is at most 4095."""
LANES = 64
STATE_WORDS = 2 * LANES
"""What a stream costs before its first symbol."""
SHARED_TABLES = 64
"""Up to so many tables are expanded once (16 KiB each), more are expanded row by row."""
TABLE_BYTES = 2048
ERRORS = {
    -1: "the stream ends too early",
    -2: "a frequency table is not one",
    -3: "a symbol is in no table",
    -4: "the stream does not end where it should",
}


@cache
def numba_kernels() -> ModuleType:
    """The fallback; imported only where there is no C library."""
    try:
        from pdxfer.codec import rans_numba
    except ImportError as error:
        raise ConfigError(
            "codecs klt and cachegen need the C library (python -m pdxfer.codec.native) or numba "
            f"({pip_install('codec')}); neither is here: {error}"
        ) from error
    return rans_numba


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "rans_encode": (c_int64, [POINTER, c_int64, c_int64, POINTER, c_int64, POINTER, POINTER, c_int, POINTER, c_int64]),
    "rans_decode": (c_int, [POINTER, c_int64, POINTER, c_int64, POINTER, c_int64, c_int64, POINTER, c_int, POINTER]),
    "rans_count": (c_int, [POINTER, c_int64, c_int64, POINTER, c_int64, POINTER]),
}


@cache
def _native(name: str) -> Callable[..., Any] | None:
    return function(name, *SIGNATURES[name])


def encode(sym: Symbols, table: Rows, freq: Freq, *, native: bool = True) -> Words:
    """Words of one stream. `freq` must give every symbol of a row a frequency. Raises ValueError if it does not."""
    rows, cols = sym.shape
    sym, table, freq = np.ascontiguousarray(sym), np.ascontiguousarray(table), np.ascontiguousarray(freq)
    out = np.empty(rows * cols + STATE_WORDS + 32, np.uint16)
    run = _native("rans_encode") if native else None
    if run is None:
        used = int(numba_kernels().encode(sym, freq, table, out))
    else:
        shared = len(freq) <= SHARED_TABLES
        built = np.empty(TABLE_BYTES * (len(freq) if shared else 1), np.uint8)
        used = int(
            run(
                pointer(sym), rows, cols, pointer(freq), len(freq), pointer(table), pointer(built), int(shared),
                pointer(out), out.size,
            )
        )  # fmt: skip
    if used < 0:
        raise ValueError(f"symbols cannot be coded: {ERRORS[used]}")
    return out[out.size - used :]


def decode(words: Words, table: Rows, freq: Freq, cols: int, *, native: bool = True) -> Symbols:
    """Symbols [rows, cols] of one stream. Raises FrameError; never reads or writes outside its arrays."""
    words, table, freq = np.ascontiguousarray(words), np.ascontiguousarray(table), np.ascontiguousarray(freq)
    sym = np.empty((len(table), cols), np.uint8)
    shared = len(freq) <= SHARED_TABLES
    slots = np.empty((len(freq) if shared else 1, PROB), np.uint32)
    run = _native("rans_decode") if native else None
    if run is None:
        error = int(numba_kernels().decode(words, freq, table, slots, shared, sym))
    else:
        error = int(
            run(
                pointer(words), words.size, pointer(freq), len(freq), pointer(table), len(table), cols, pointer(slots),
                int(shared), pointer(sym),
            )
        )  # fmt: skip
    check(error)
    return sym


def check(error: int) -> None:
    """Raise FrameError for a coder's error number."""
    if error < 0:
        raise FrameError(f"payload is damaged: {ERRORS.get(error, error)}")


def count(sym: Symbols, table: Rows, num_tables: int, *, native: bool = True) -> npt.NDArray[np.uint32]:
    """How often each symbol occurs under each table: uint32 [num_tables, 256]."""
    sym, table = np.ascontiguousarray(sym), np.ascontiguousarray(table)
    counts = np.zeros((num_tables, 256), np.uint32)
    run = _native("rans_count") if native else None
    if run is None:
        error = int(numba_kernels().count(sym, table, counts))
    else:
        error = int(run(pointer(sym), *sym.shape, pointer(table), num_tables, pointer(counts)))
    assert error == 0, "tables are the caller's own"
    return counts


def frequencies(counts: npt.NDArray[Any]) -> Freq:
    """Tables for `counts` [tables, 256]: each symbol that occurs gets at least 1, none more than 4095.

    A table whose symbols never occur says so with all of it on 128 and 127, so that it still is a table.
    """
    totals = counts.sum(1, keepdims=True, dtype=np.int64)
    filled = np.where(totals == 0, np.eye(1, 256, 128, dtype=np.int64), counts.astype(np.int64))
    share = filled * PROB // filled.sum(1, keepdims=True)
    freq = np.where(filled > 0, np.maximum(share, 1), 0)
    missing = PROB - freq.sum(1)
    freq[np.arange(len(freq)), freq.argmax(1)] += np.maximum(missing, 0)
    for i in np.flatnonzero((missing < 0) | (freq.max(1) == PROB)):
        _balance(freq[i])
    return freq.astype(np.uint16)


def _balance(row: npt.NDArray[np.int64]) -> None:
    """Bring one row with too large a sum to 4096, the largest giving, and leave no entry above 4095."""
    missing = PROB - int(row.sum())
    while missing < 0:
        top = int(row.argmax())
        taken = min(-missing, max(1, int(row[top]) // 4))
        row[top] -= taken
        missing += taken
    top = int(row.argmax())
    if row[top] == PROB:
        row[top] -= 1
        row[top - 1 if top else 1] += 1
