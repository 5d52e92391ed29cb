"""Bytes of bfloat16, float16 and float32 ↔ float32 arrays, in plain numpy. Used by references, tests and benches."""

import numpy as np
import numpy.typing as npt

from pdxfer.codec.base import Bytes


def to_float(values: Bytes, dtype: str) -> npt.NDArray[np.float32]:
    """Flat float32 of bytes in `dtype`."""
    if dtype == "bfloat16":
        return (values.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "float16":
        return values.view(np.float16).astype(np.float32)
    if dtype == "float32":
        return values.view(np.float32).copy()
    raise ValueError(f"{dtype} values are no floats that codecs compute with")


def from_float(values: npt.NDArray[np.float32], dtype: str) -> Bytes:
    """Flat bytes of float32 values rounded to nearest, ties to even, in `dtype`. NaN stays NaN."""
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    if dtype == "bfloat16":
        bits = flat.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
        return np.where(np.isnan(flat), quiet, rounded).astype(np.uint16).view(np.uint8)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return flat.astype(np.float16).view(np.uint8)
    if dtype == "float32":
        return flat.view(np.uint8).copy()
    raise ValueError(f"{dtype} values are no floats that codecs compute with")
