"""The loops in Triton: values (`src`, `dst`) are tensors on one device, everything else host arrays, see arrays.py.

Used for CUDA tensors only (codec/device.py decides); under TRITON_INTERPRET=1 also for CPU tensors, which is how the
tests compare them with kernels/reference.py. Importing this needs torch and triton. Rates are unmeasured.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from pdxfer.codec.arrays import upload
from pdxfer.codec.kernels import F32, GROUP, TILE, Bytes, Planes, Words
from pdxfer.codec.kernels.gpu import int4, lossless
from pdxfer.codec.kernels.gpu import rows as row_loops
from pdxfer.codec.kernels.gpu.values import EXACT

ROW_VALUES = 4096
"""Values of a program of rows."""
BLOCK = 1024
"""Bytes or values of a program of int4 codes."""
GROUPS = 32
"""Groups of a program of lossless."""


def on(tensor: Any) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it this tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def power(number: int) -> int:
    """The least power of two that is not below."""
    return 1 << max(number - 1, 0).bit_length()


def _words(values: Any, dtype: int) -> Any:
    return values.view(torch.int32 if dtype == F32 else torch.int16)


def _down(tensor: Any, array: Any) -> None:
    array.view(np.uint8)[:] = tensor.view(torch.uint8).cpu().numpy()


def _new(like: Any, count: int, dtype: Any) -> Any:
    return torch.empty(count, dtype=dtype, device=like.device)


def _starts(counts: Any) -> Any:
    return torch.cumsum(counts, 0) - counts


class TritonKernels:
    """See Kernels."""

    name = "triton"

    def _encode_rows(
        self, loop: Any, src: Any, rows: int, dim: int, dtype: int, params: Words, codes: Bytes, bad: Bytes
    ) -> None:
        found = [_new(src, params.size, torch.int16), *(_new(src, a.size, torch.uint8) for a in (codes, bad))]
        width = power(dim)
        each = max(ROW_VALUES // width, 1)
        with on(src):
            loop[(-(-rows // each),)](_words(src, dtype), *found, rows, dim, DTYPE=dtype, ROWS=each, DIM=width, **EXACT)
        for tensor, array in zip(found, (params, codes, bad), strict=True):
            _down(tensor, array)

    def _decode_rows(self, loop: Any, codes: Bytes, params: Words, rows: int, dim: int, dtype: int, dst: Any) -> None:
        width = power(dim)
        each = max(ROW_VALUES // width, 1)
        given = upload(codes, dst.device), upload(params, dst.device).view(torch.int16)
        with on(dst):
            loop[(-(-rows // each),)](*given, _words(dst, dtype), rows, dim, DTYPE=dtype, ROWS=each, DIM=width, **EXACT)

    def int8_encode(self, src: Any, rows: int, dim: int, dtype: int, params: Words, codes: Bytes, bad: Bytes) -> None:
        """See Kernels."""
        self._encode_rows(row_loops.int8_encode, src, rows, dim, dtype, params, codes, bad)

    def int8_decode(self, codes: Bytes, params: Words, rows: int, dim: int, dtype: int, dst: Any) -> None:
        """See Kernels."""
        self._decode_rows(row_loops.int8_decode, codes, params, rows, dim, dtype, dst)

    def fp8_encode(self, src: Any, rows: int, dim: int, dtype: int, params: Words, codes: Bytes, bad: Bytes) -> None:
        """See Kernels."""
        self._encode_rows(row_loops.fp8_encode, src, rows, dim, dtype, params, codes, bad)

    def fp8_decode(self, codes: Bytes, params: Words, rows: int, dim: int, dtype: int, dst: Any) -> None:
        """See Kernels."""
        self._decode_rows(row_loops.fp8_decode, codes, params, rows, dim, dtype, dst)

    def int4_encode(
        self,
        src: Any,
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
        values, units = _words(src, dtype), planes * -(-tokens // TILE)
        words, bytes_, flags = (
            _new(src, params.size, torch.int16), _new(src, codes.size, torch.uint8), _new(src, units, torch.uint8),
        )  # fmt: skip
        wide, blocks = max(power(dim), TILE), -(-(TILE * dim // 2) // BLOCK)
        with on(src):
            int4.params_of[(units,)](values, words, flags, heads, tokens, dim, DTYPE=dtype, DIM=wide, **EXACT)
            int4.codes_of[(units, blocks)](
                values, words, flags, bytes_, heads, tokens, dim, DTYPE=dtype, BLOCK=BLOCK, **EXACT
            )
        for tensor, array in ((words, params), (bytes_, codes), (flags, bad)):
            _down(tensor, array)

    def int4_decode(
        self, codes: Bytes, params: Words, planes: int, heads: int, tokens: int, dim: int, dtype: int, dst: Any
    ) -> None:
        """See Kernels."""
        given = upload(codes, dst.device), upload(params, dst.device).view(torch.int16)
        grid = planes * -(-tokens // TILE), -(-(TILE * dim) // BLOCK)
        with on(dst):
            int4.int4_decode[grid](*given, _words(dst, dtype), heads, tokens, dim, DTYPE=dtype, BLOCK=BLOCK, **EXACT)

    def lossless_encode(
        self,
        src: Any,
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
        groups = base.size
        found = [
            _new(src, groups, torch.uint8), _new(src, planes.size, torch.int64), _new(src, extra.size, torch.int64),
            _new(src, rest.size, torch.uint8),
        ]  # fmt: skip
        each = _new(src, groups, torch.int32)
        grid = (-(-groups // GROUPS),)
        with on(src):
            lossless.split[grid](src, *found, each, groups, stride, HALF=half, GROUPS=GROUPS, **EXACT)
            used = int(each.sum())
            if used > escapes.size:
                return -1
            kept = _new(src, used, torch.uint8)
            lossless.escape[grid](src, found[0], _starts(each), kept, groups, stride, HALF=half, GROUPS=GROUPS, **EXACT)
        for tensor, array in zip(found, (base, planes, extra, rest), strict=True):
            _down(tensor, array)
        counts[:] = _segments(each.cpu().numpy())
        escapes[:used] = kept.cpu().numpy()
        return used

    def lossless_decode(
        self,
        base: Bytes,
        planes: Planes,
        extra: Planes,
        rest: Bytes,
        counts: Words,
        escapes: Bytes,
        half: bool,
        dst: Any,
        stride: int,
    ) -> bool:
        """See Kernels."""
        device, groups = dst.device, base.size
        grid = (-(-groups // GROUPS),)
        sides = upload(planes, device).view(torch.int64), upload(extra, device).view(torch.int64)
        each = _new(dst, groups, torch.int32)
        with on(dst):
            lossless.count[grid](sides[0], each, groups, GROUPS=GROUPS, **EXACT)
            found = _segments(each.cpu().numpy())
            if int(found.sum()) != escapes.size or not np.array_equal(found, counts):
                return False
            lossless.join[grid](
                upload(base, device), *sides, upload(rest, device), _starts(each), upload(escapes, device), dst,
                groups, stride, HALF=half, GROUPS=GROUPS, **EXACT,
            )  # fmt: skip
        return True


def _segments(counts: Any) -> Any:
    """Escapes of each 64 groups."""
    return np.add.reduceat(counts, np.arange(0, counts.size, GROUP)) if counts.size else counts
