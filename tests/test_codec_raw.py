"""Codec raw keeps every promise of the suite."""

from pathlib import Path

from pdxfer.codec.base import Codec
from pdxfer.codec.raw import RawCodec
from pdxfer.testing.codec_suite import CodecSuite


class TestRaw(CodecSuite):
    """Bytes as they are."""

    dtypes = ("bfloat16", "float16", "float32")
    golden_dir = Path(__file__).parent / "golden"

    def codec(self) -> Codec:
        return RawCodec()
