"""The contract of a codec: chunk values ↔ payload bytes, inside a frame (frame.py).

Lossy codecs see canonical values [L, 2, H, T, D] (layers, K then V, heads, tokens, head dim), packed and unpacked by
kv/pack.py; `raw`, `lossless` and `zstd` see bytes. Pure functions of their input and tables; they release the GIL in
the long part. Called by the store's worker threads and the staged wire path. Input is never trusted: decode raises
FrameError.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pdxfer.codec.frame import FrameError, FrameHeader

Bytes = npt.NDArray[np.uint8]

ITEM_BYTES = {"opaque": 1, "bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3": 1, "float8_e5m2": 1}
"""Bytes of one value, by frame.DTYPES."""
EXACT_TOKENS = 4
"""Lossy codecs keep so many first tokens of a context as they are: attention sinks; without it KL is 5 to 8 times
worse."""

Shape = tuple[int, int, int, int, int]
"""[L, 2, H, T, D]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSpec:
    """What a chunk's raw bytes are."""

    dtype: str
    """One of frame.DTYPES."""
    shape: Shape
    """[L, 2, H, T, D]."""
    first_token: int = 0
    """Position of the chunk's first token in its context: lossy codecs keep the context's first 4 tokens exact."""

    @property
    def raw_bytes(self) -> int:
        """Length of the values."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def exact_tokens(self) -> int:
        """How many of the chunk's first tokens a lossy codec must keep as they are."""
        return min(max(EXACT_TOKENS - self.first_token, 0), self.shape[3])


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A payload and what its frame header has to say about it."""

    payload: bytes | memoryview
    codec: str
    codec_version: int
    level: int
    tables: bytes = bytes(16)
    """16-byte digest of the tables used; zeros: none."""


class Codec(Protocol):
    """One transform. Stateless but for its tables; safe to call from several threads."""

    @property
    def name(self) -> str:
        """Registered name, ASCII, at most 12 characters."""
        ...

    @property
    def lossless(self) -> bool:
        """decode(encode(x)) == x, bit for bit."""
        ...

    @property
    def opaque(self) -> bool:
        """Takes bytes as they are; others need canonical values."""
        ...

    def encode(self, values: npt.NDArray[Any], spec: ChunkSpec) -> Encoded:
        """`values`: uint8 bytes [raw_bytes] if opaque, else uint8 view of canonical values in spec.dtype."""
        ...

    def decode(self, payload: memoryview, header: FrameHeader, out: npt.NDArray[Any]) -> None:
        """Into `out`, uint8 [raw_bytes], same order as encode took. Raises FrameError, and then `out` is garbage."""
        ...


class Tables(Protocol):
    """Calibrated tables of one model, as files hold them; what is inside is the codec's own business."""

    def current(self, codec: str, level: int) -> bytes | None:
        """To encode with; None: not calibrated."""
        ...

    def find(self, digest: bytes) -> bytes | None:
        """Those that a frame was made with, by the 16-byte digest in its header; None: not here."""
        ...


def check_version(header: FrameHeader, name: str, version: int) -> None:
    """Raise FrameError unless this codec in this version made the payload."""
    if header.codec != name or header.codec_version != version:
        raise FrameError(
            f"payload of {header.codec} version {header.codec_version}; this {name} reads version {version}"
        )


def check_shape(header: FrameHeader, out: Bytes) -> None:
    """Raise FrameError unless the header's shape, dtype and raw_bytes agree with each other and with `out`."""
    expected = prod(header.shape) * ITEM_BYTES[header.dtype]
    if header.shape[1] != 2 or expected != header.raw_bytes or out.nbytes != expected:
        raise FrameError(
            f"{header.codec} payload of {header.dtype} {header.shape} ({expected} bytes) claims {header.raw_bytes} raw "
            f"bytes, the destination has {out.nbytes}"
        )
