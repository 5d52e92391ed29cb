"""Codec fp8 keeps every promise of the suite, within e4m3's error at its row's scale."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from codec_bounds import finite, rounding

from pdxfer.codec.base import ChunkSpec, Codec
from pdxfer.codec.fp8 import Fp8Codec
from pdxfer.codec.kernels import F32, best
from pdxfer.testing.codec_suite import CodecSuite


class TestFp8(CodecSuite):
    """Three bits of mantissa; below 2^-6 of the scale, steps of 2^-9."""

    golden_dir = Path(__file__).parent / "golden"

    def codec(self) -> Codec:
        return Fp8Codec()

    def bound(self, values: npt.NDArray[np.float32], spec: ChunkSpec) -> npt.NDArray[np.floating]:
        size = np.abs(finite(values))
        scale = size.max(axis=-1, keepdims=True) / 448 * 1.01 + 2.0**-99
        return np.maximum(size * 2.0**-4, scale * 2.0**-10) * 1.01 + rounding(size * 1.07, spec.dtype)


def test_codes_are_torchs_e4m3_of_the_scaled_values() -> None:
    """An independent judge: the same bytes as torch's cast, over 120,000 values at all magnitudes."""
    rng = np.random.default_rng(3)
    values = (rng.normal(0, 1, (2000, 60)) * np.exp(rng.normal(-3, 3, (2000, 60)))).astype(np.float32)
    params, codes = np.empty(2000, np.uint16), np.empty((2000, 60), np.uint8)
    best().fp8_encode(values.reshape(-1).view(np.uint8), 2000, 60, F32, params, codes, np.empty(2000, np.uint8))
    scale = (params.astype(np.uint32) << 16).view(np.float32)
    scaled = values * (np.float32(1) / scale)[:, None]
    judged = torch.from_numpy(scaled).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(judged, codes)
