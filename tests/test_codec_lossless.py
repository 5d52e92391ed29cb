"""Codec lossless keeps every promise of the suite, bit for bit, on packed bytes of any length."""

from pathlib import Path

from pdxfer.codec.base import Codec
from pdxfer.codec.lossless import LosslessCodec
from pdxfer.testing.codec_suite import CodecSuite


class TestLossless(CodecSuite):
    """Every dtype a cache can have; only two-byte and four-byte floats get shorter."""

    dtypes = ("bfloat16", "float16", "float32", "opaque")
    golden_dir = Path(__file__).parent / "golden"

    def codec(self) -> Codec:
        return LosslessCodec()
