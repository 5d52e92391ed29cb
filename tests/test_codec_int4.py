"""Codec int4 keeps every promise of the suite, within half a step of its group's range."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from codec_bounds import range_bound

from pdxfer.codec.base import ChunkSpec, Codec
from pdxfer.codec.int4 import Int4Codec
from pdxfer.testing.codec_suite import CodecSuite


class TestInt4(CodecSuite):
    """15 steps in groups of 32: tokens of a channel for K, channels of a token for V."""

    golden_dir = Path(__file__).parent / "golden"

    def codec(self) -> Codec:
        return Int4Codec()

    def bound(self, values: npt.NDArray[np.float32], spec: ChunkSpec) -> npt.NDArray[np.floating]:
        allowed = np.zeros(spec.shape, dtype=np.float64)
        for first in range(spec.exact_tokens, spec.shape[3], 32):
            k = values[:, 0, :, first : first + 32]
            allowed[:, 0, :, first : first + 32] = range_bound(k, 2, 15.0, spec.dtype)
        for first in range(0, spec.shape[4], 32):
            v = values[:, 1, ..., first : first + 32]
            allowed[:, 1, ..., first : first + 32] = range_bound(v, -1, 15.0, spec.dtype)
        return allowed
