"""Codec zstd keeps every promise of the suite; its frames are judged by what they decode to."""

from pathlib import Path

import pytest

from pdxfer.codec.base import Codec
from pdxfer.codec.zstd import ZstdCodec
from pdxfer.core.errors import ConfigError
from pdxfer.testing.codec_suite import CodecSuite


class TestZstd(CodecSuite):
    """Every dtype; encoders of other zstd versions may choose other bytes."""

    dtypes = ("bfloat16", "float16", "float32", "opaque")
    golden_dir = Path(__file__).parent / "golden"
    golden_encoding = False

    def codec(self) -> Codec:
        return ZstdCodec()


def test_levels_beyond_nine_are_refused() -> None:
    """ConfigError, naming the range."""
    with pytest.raises(ConfigError, match="to 9"):
        ZstdCodec(level=10)
