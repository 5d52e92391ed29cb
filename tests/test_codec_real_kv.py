"""Gates on real KV: three layers of the demo model (0, 14, 29), tokens 256 to 319 of a licence text, bfloat16.

Made once with transformers on a CPU. Small, so the bars here are coarse; the figures are bench/codec.py's.
"""

from pathlib import Path

import numpy as np
import pytest

from pdxfer.codec.base import Bytes, ChunkSpec
from pdxfer.codec.registry import Codecs, decode_frame, encode_frame
from pdxfer.codec.values import to_float

SHAPE = (3, 2, 3, 64, 64)
SPEC = ChunkSpec(dtype="bfloat16", shape=SHAPE, first_token=256)
KEY, IDENTITY = bytes(32), bytes(16)


def real_kv() -> Bytes:
    """The fixture's bytes."""
    return np.fromfile(Path(__file__).parent / "golden" / "kv-smollm2-3x2x3x64x64-bf16.bin", dtype=np.uint8)


@pytest.mark.parametrize(
    ("name", "ratio", "error"),
    [("lossless", 1.33, 0.0), ("zstd", 1.33, 0.0), ("int8", 1.87, 0.01), ("fp8", 1.92, 0.03), ("int4", 3.15, 0.13)],
)
def test_ratio_and_error_on_real_kv(name: str, ratio: float, error: float) -> None:
    """Payload at least so many times smaller; root mean square error at most so much of the values'."""
    values, codecs = real_kv(), Codecs()
    parts = encode_frame(values, SPEC, codecs.get(name), KEY, IDENTITY, 64)
    out = np.empty_like(values)
    decode_frame(memoryview(b"".join(parts)), KEY, IDENTITY, out, codecs)
    was, now = to_float(values, "bfloat16").astype(np.float64), to_float(out, "bfloat16")
    found = values.nbytes / len(parts[1]), float(np.sqrt(((now - was) ** 2).sum() / (was**2).sum()))
    assert found[0] >= ratio and found[1] <= error, f"{name}: x{found[0]:.3f}, error {found[1]:.4f}"
