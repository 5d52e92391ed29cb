"""Stated error bounds of the lossy codecs, for their conformance tests."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]


def rounding(values: Floats, dtype: str) -> Floats:
    """Half a unit in the last place of `values` in `dtype`, and a little for subnormals."""
    bits = {"bfloat16": 8, "float16": 11, "float32": 24}[dtype]
    tiny = {"bfloat16": 2.0**-133, "float16": 2.0**-25, "float32": 2.0**-149}[dtype]
    return np.abs(values.astype(np.float64)) * 2.0**-bits * 1.01 + tiny


def finite(values: Floats) -> Floats:
    """float64, inf and NaN as 0: units that hold them are kept raw."""
    return np.where(np.isfinite(values), values, 0).astype(np.float64)


def range_bound(values: Floats, axis: int, steps: float, dtype: str) -> Floats:
    """Half a step of the range along `axis`, the step rounded up to bfloat16, and the result rounded to `dtype`."""
    lo, hi = finite(values).min(axis=axis, keepdims=True), finite(values).max(axis=axis, keepdims=True)
    step = (hi - lo + np.abs(lo) * 2.0**-7) / steps * (1 + 2.0**-7) + 2.0**-99
    return step * 0.505 + rounding(np.maximum(np.abs(lo), np.abs(hi)) * 1.02, dtype)
