"""The inner loops of raw-to-code transforms, three times over with the same bits: C, numba, and plain numpy.

`best()` picks the first that is there; the numpy one is the definition the others are tested against. Arrays are
C-contiguous and as long as the docstrings say: callers (the codecs) check every length before. All release the GIL
in their long part.
"""

from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]
Planes = npt.NDArray[np.uint64]

BF16, F16, F32 = 0, 1, 2
DTYPE_NUMBERS = {"bfloat16": BF16, "float16": F16, "float32": F32}
"""Value types the lossy kernels compute with, as C knows them."""
TILE = 32
"""Tokens of an int4 tile, and channels of a group of V."""
GROUP = 64
"""Values of a lossless group; groups of a segment with its own escape count."""
MAX_DIM = 1024
"""Largest head dim of int4."""


class Kernels(Protocol):
    """One implementation of all loops."""

    name: str

    def int8_encode(self, src: Bytes, rows: int, dim: int, dtype: int, params: Words, codes: Bytes, bad: Bytes) -> None:
        """`src` rows x dim values → params [rows, 2] (lowest, step as bfloat16), codes [rows, dim], bad [rows]."""
        ...

    def int8_decode(self, codes: Bytes, params: Words, rows: int, dim: int, dtype: int, dst: Bytes) -> None:
        """code * step + lowest, rounded to dtype."""
        ...

    def fp8_encode(self, src: Bytes, rows: int, dim: int, dtype: int, params: Words, codes: Bytes, bad: Bytes) -> None:
        """→ params [rows] (scale as bfloat16), codes [rows, dim] (e4m3 of value / scale), bad [rows]."""
        ...

    def fp8_decode(self, codes: Bytes, params: Words, rows: int, dim: int, dtype: int, dst: Bytes) -> None:
        """e4m3 * scale, rounded to dtype."""
        ...

    def int4_encode(
        self,
        src: Bytes,
        planes: int,
        heads: int,
        tokens: int,
        dim: int,
        dtype: int,
        params: Words,
        codes: Bytes,
        bad: Bytes,
    ) -> None:
        """`src` planes x tokens x dim, plane p being K where (p // heads) is even → per plane and tile of 32 tokens
        its parameters, packed codes, bad (native/int4.c has the order)."""
        ...

    def int4_decode(
        self, codes: Bytes, params: Words, planes: int, heads: int, tokens: int, dim: int, dtype: int, dst: Bytes
    ) -> None:
        """Back, rounded to dtype."""
        ...

    def lossless_encode(
        self,
        src: Words,
        stride: int,
        half: bool,
        base: Bytes,
        planes: Planes,
        extra: Planes,
        rest: Bytes,
        counts: Words,
        escapes: Bytes,
    ) -> int:
        """64-value groups of every `stride`-th word (native/lossless.c); number of escapes, -1: more than there is
        room for."""
        ...

    def lossless_decode(
        self,
        base: Bytes,
        planes: Planes,
        extra: Planes,
        rest: Bytes,
        counts: Words,
        escapes: Bytes,
        half: bool,
        dst: Words,
        stride: int,
    ) -> bool:
        """Back; False if escapes and planes do not belong together."""
        ...


@cache
def best() -> Kernels:
    """C where the library is there, else numba, else numpy. Decided once."""
    from pdxfer.codec.kernels.native import NativeKernels
    from pdxfer.codec.native import library

    found = library()
    if found is not None:
        return NativeKernels(found)
    try:
        from pdxfer.codec.kernels.jit import JitKernels
    except ImportError:
        from pdxfer.codec.kernels.reference import ReferenceKernels

        return ReferenceKernels()
    return JitKernels()
