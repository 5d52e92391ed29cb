"""The loops in C (native/*.c), through ctypes: the GIL is released for the whole call."""

from ctypes import c_int, c_int64
from typing import Any

import numpy.typing as npt

from pdxfer.codec.kernels import Bytes, Planes, Words
from pdxfer.codec.native import POINTER, Library, pointer

ENCODE_ROWS = (POINTER, c_int64, c_int64, c_int, POINTER, POINTER, POINTER)
DECODE_ROWS = (POINTER, POINTER, c_int64, c_int64, c_int, POINTER)


class NativeKernels:
    """Functions of one loaded library."""

    def __init__(self, library: Library) -> None:
        self.name = f"C v{library.level}"
        get = library.function
        self._int8_encode = get("int8_encode", None, ENCODE_ROWS)
        self._int8_decode = get("int8_decode", None, DECODE_ROWS)
        self._fp8_encode = get("fp8_encode", None, ENCODE_ROWS)
        self._fp8_decode = get("fp8_decode", None, DECODE_ROWS)
        self._int4_encode = get("int4_encode", c_int, (POINTER, *[c_int64] * 4, c_int, *[POINTER] * 3))
        self._int4_decode = get("int4_decode", c_int, (POINTER, POINTER, *[c_int64] * 4, c_int, POINTER))
        self._lossless_encode = get(
            "lossless_encode", c_int64, (POINTER, c_int, c_int64, c_int, *[POINTER] * 6, c_int64)
        )
        self._lossless_decode = get("lossless_decode", c_int, (*[POINTER] * 6, c_int64, c_int64, c_int, POINTER, c_int))
        self._strided_copy = get("strided_copy", c_int, (*[POINTER] * 5, c_int, c_int))

    def int8_encode(self, src: Bytes, rows: int, dim: int, dtype: int, params: Words, codes: Bytes, bad: Bytes) -> None:
        """See Kernels."""
        self._int8_encode(pointer(src), rows, dim, dtype, pointer(params), pointer(codes), pointer(bad))

    def int8_decode(self, codes: Bytes, params: Words, rows: int, dim: int, dtype: int, dst: Bytes) -> None:
        """See Kernels."""
        self._int8_decode(pointer(codes), pointer(params), rows, dim, dtype, pointer(dst))

    def fp8_encode(self, src: Bytes, rows: int, dim: int, dtype: int, params: Words, codes: Bytes, bad: Bytes) -> None:
        """See Kernels."""
        self._fp8_encode(pointer(src), rows, dim, dtype, pointer(params), pointer(codes), pointer(bad))

    def fp8_decode(self, codes: Bytes, params: Words, rows: int, dim: int, dtype: int, dst: Bytes) -> None:
        """See Kernels."""
        self._fp8_decode(pointer(codes), pointer(params), rows, dim, dtype, pointer(dst))

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
        """See Kernels."""
        places = (pointer(params), pointer(codes), pointer(bad))
        done = self._int4_encode(pointer(src), planes, heads, tokens, dim, dtype, *places)
        assert done == 0, f"int4 of dim {dim} and {heads} heads"

    def int4_decode(
        self, codes: Bytes, params: Words, planes: int, heads: int, tokens: int, dim: int, dtype: int, dst: Bytes
    ) -> None:
        """See Kernels."""
        done = self._int4_decode(pointer(codes), pointer(params), planes, heads, tokens, dim, dtype, pointer(dst))
        assert done == 0, f"int4 of dim {dim} and {heads} heads"

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
        """See Kernels."""
        places = [pointer(array) for array in (base, planes, extra, rest, counts, escapes)]
        return int(self._lossless_encode(pointer(src), stride, base.size, half, *places, escapes.size))

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
        """See Kernels."""
        places = [pointer(array) for array in (base, planes, extra, rest, counts, escapes)]
        done = self._lossless_decode(*places, escapes.size, base.size, half, pointer(dst), stride)
        return bool(done == 0)

    def strided_copy(self, dst: npt.NDArray[Any], src: npt.NDArray[Any]) -> None:
        """dst[...] = src[...] for views of equal shape and item size; what kv/pack.py takes as `copy`."""
        assert dst.shape == src.shape and dst.itemsize == src.itemsize and 2 <= dst.ndim <= 8
        longs = c_int64 * dst.ndim
        done = self._strided_copy(
            dst.ctypes.data,
            longs(*dst.strides),
            src.ctypes.data,
            longs(*src.strides),
            longs(*dst.shape),
            dst.ndim,
            dst.itemsize,
        )
        assert done == 0
