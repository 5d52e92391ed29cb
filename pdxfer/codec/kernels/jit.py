"""The loops in numba, for installations without the C library. Importing this needs numba (extra `codec`)."""

from typing import Any

import numpy as np

from pdxfer.codec.kernels import F32, Bytes, Planes, Words, jit_int4, jit_lossless, jit_rows


def _words(array: Bytes, dtype: int) -> Any:
    return array.view(np.uint32 if dtype == F32 else np.uint16)


class JitKernels:
    """See Kernels."""

    name = "numba"

    def int8_encode(self, src: Bytes, rows: int, dim: int, dtype: int, params: Words, codes: Bytes, bad: Bytes) -> None:
        """See Kernels."""
        jit_rows.int8_encode(_words(src, dtype), rows, dim, dtype, params, codes, bad)

    def int8_decode(self, codes: Bytes, params: Words, rows: int, dim: int, dtype: int, dst: Bytes) -> None:
        """See Kernels."""
        jit_rows.int8_decode(codes, params, rows, dim, dtype, _words(dst, dtype))

    def fp8_encode(self, src: Bytes, rows: int, dim: int, dtype: int, params: Words, codes: Bytes, bad: Bytes) -> None:
        """See Kernels."""
        jit_rows.fp8_encode(_words(src, dtype), rows, dim, dtype, params, codes, bad)

    def fp8_decode(self, codes: Bytes, params: Words, rows: int, dim: int, dtype: int, dst: Bytes) -> None:
        """See Kernels."""
        jit_rows.fp8_decode(codes, params, rows, dim, dtype, _words(dst, dtype))

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
        jit_int4.int4_encode(_words(src, dtype), planes, heads, tokens, dim, dtype, params, codes, bad)

    def int4_decode(
        self, codes: Bytes, params: Words, planes: int, heads: int, tokens: int, dim: int, dtype: int, dst: Bytes
    ) -> None:
        """See Kernels."""
        jit_int4.int4_decode(codes, params, planes, heads, tokens, dim, dtype, _words(dst, dtype))

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
        return int(jit_lossless.lossless_encode(src, stride, half, base, planes, extra, rest, counts, escapes))

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
        return bool(jit_lossless.lossless_decode(base, planes, extra, rest, counts, escapes, half, dst, stride))
