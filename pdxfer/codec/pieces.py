"""Reading and writing the parts of a payload: counts, arrays, frequency tables. Trusts no length.

Used by klt.py and cachegen.py. `Pieces` hands out views of the payload in order and raises FrameError past its end.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pdxfer.codec import rans
from pdxfer.codec.arrays import float32_of, host, on_host, words16
from pdxfer.codec.base import ITEM_BYTES, Bytes
from pdxfer.codec.frame import FrameError
from pdxfer.codec.values import from_float, to_float
from pdxfer.core.errors import ConfigError


class Pieces:
    """A cursor over one payload."""

    def __init__(self, payload: memoryview) -> None:
        self._data = payload.cast("B") if payload.format != "B" else payload
        self._at = 0

    def array(self, dtype: Any, count: int) -> npt.NDArray[Any]:
        """The next `count` items; a copy where they are not aligned."""
        kind = np.dtype(dtype)
        end = self._at + count * kind.itemsize
        if count < 0 or end > len(self._data):
            raise FrameError(f"payload of {len(self._data)} bytes ends within {count} items of {kind} at {self._at}")
        found = np.frombuffer(self._data[self._at : end], dtype=kind)
        self._at = end
        return found if found.flags.aligned else found.copy()

    def numbers(self, count: int) -> list[int]:
        """The next `count` u32."""
        return [int(n) for n in self.array("<u4", count)]

    def tables(self, num_tables: int) -> rans.Freq:
        """Frequency tables as `pack_tables` wrote them."""
        (size,) = self.numbers(1)
        packed = self.array(np.uint8, size)
        most = num_tables * (2 + 512)
        unpacker = zlib.decompressobj()
        try:
            flat = unpacker.decompress(packed.tobytes(), most)
        except zlib.error as error:
            raise FrameError(f"payload's frequency tables are damaged: {error}") from error
        return _unpack(flat, num_tables)

    def end(self) -> None:
        """Raise FrameError unless all of it was read."""
        if self._at != len(self._data):
            raise FrameError(f"payload has {len(self._data) - self._at} bytes too many")


def _unpack(flat: bytes, num_tables: int) -> rans.Freq:
    freq = np.zeros((num_tables, 256), np.uint16)
    at = 0
    for row in freq:
        if at + 2 > len(flat):
            raise FrameError("payload's frequency tables are cut")
        first, last = flat[at], flat[at + 1]
        size = 2 * (last - first + 1)
        if size <= 0 or at + 2 + size > len(flat):
            raise FrameError("payload's frequency tables are damaged")
        row[first : last + 1] = np.frombuffer(flat, "<u2", last - first + 1, at + 2)
        at += 2 + size
    if at != len(flat):
        raise FrameError("payload's frequency tables are too long")
    return freq


def pack_tables(freq: rans.Freq) -> bytes:
    """Frequency tables [n, 256] for a payload: first and last symbol and what is between, deflated."""
    flat = bytearray()
    for row in freq:
        present = np.flatnonzero(row)
        first, last = int(present[0]), int(present[-1])
        flat += bytes((first, last)) + row[first : last + 1].astype("<u2").tobytes()
    packed = zlib.compress(bytes(flat), 6)
    return numbers(len(packed)) + packed


RAW = 0xFFFFFFFF
"""Mode of a payload that is the values themselves: what could not be made smaller."""


def smaller(payload: bytes, values: Bytes) -> bytes:
    """The payload, or the values as they are where those are shorter."""
    return payload if len(payload) < values.nbytes else numbers(RAW) + host(values).tobytes()


def numbers(*values: int) -> bytes:
    """u32 each."""
    return np.array(values, "<u4").tobytes()


FLOAT_DTYPES = ("bfloat16", "float16", "float32")


def check_dtype(codec: str, dtype: str) -> None:
    """Raise ConfigError for values that are no floats of two or four bytes."""
    if dtype not in FLOAT_DTYPES:
        raise ConfigError(f"codec {codec} codes {', '.join(FLOAT_DTYPES)}, not {dtype}: use raw, lossless or zstd")


def kernel_view(values: Bytes, dtype: str, shape: Sequence[int]) -> npt.NDArray[Any]:
    """Values as the kernels take them, in `shape`: bfloat16 bits or float32 without a copy, float16 widened."""
    if not on_host(values):
        tensor: npt.NDArray[Any] = words16(values) if dtype == "bfloat16" else float32_of(values, dtype)
        return tensor.reshape(shape)
    if dtype == "bfloat16":
        return values.view(np.uint16).reshape(shape)
    if dtype == "float32":
        return values.view(np.float32).reshape(shape)
    return to_float(values, dtype).reshape(shape)


def scratch_view(out: Bytes, dtype: str, shape: Sequence[int]) -> npt.NDArray[Any]:
    """Where the kernels write: `out` itself, or float32 scratch that `settle` narrows into it."""
    return np.empty(shape, np.float32) if dtype == "float16" else kernel_view(out, dtype, shape)


def settle(scratch: npt.NDArray[Any], out: Bytes, dtype: str) -> None:
    """Bring scratch home where it is not `out` itself."""
    if dtype == "float16":
        out[:] = from_float(scratch, dtype)


def items(values: Bytes, dtype: str, shape: Sequence[int]) -> npt.NDArray[Any]:
    """The values as items of their size (a tensor: as bytes), in `shape`: for parts that are kept exact."""
    if not on_host(values):
        return values.reshape(*shape[:-1], shape[-1] * ITEM_BYTES[dtype])
    return values.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[ITEM_BYTES[dtype]]).reshape(shape)
