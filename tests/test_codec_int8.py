"""Codec int8 keeps every promise of the suite, within half a step of its row's range."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from codec_bounds import range_bound

from pdxfer.codec.base import ChunkSpec, Codec
from pdxfer.codec.int8 import Int8Codec
from pdxfer.testing.codec_suite import CodecSuite


class TestInt8(CodecSuite):
    """255 steps between the least and the largest of each row."""

    golden_dir = Path(__file__).parent / "golden"

    def codec(self) -> Codec:
        return Int8Codec()

    def bound(self, values: npt.NDArray[np.float32], spec: ChunkSpec) -> npt.NDArray[np.floating]:
        return range_bound(values, -1, 255.0, spec.dtype)
