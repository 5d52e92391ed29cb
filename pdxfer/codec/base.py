"""The contract of a codec: chunk values ↔ payload bytes, inside a frame (frame.py).

Lossy codecs see canonical values [L, 2, H, T, D] (layers, K then V, heads, tokens, head dim), packed and unpacked by
kv/pack.py; `raw` and `lossless` see bytes. Pure functions of their input and tables; they release the GIL in the long
part. Called by the store's worker threads and the staged wire path. Input is never trusted: decode raises FrameError.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from pdxfer.codec.frame import FrameHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSpec:
    """What a chunk's raw bytes are."""

    dtype: str
    """One of frame.DTYPES."""
    shape: tuple[int, int, int, int, int]
    """[L, 2, H, T, D]."""
    first_token: int = 0
    """Position of the chunk's first token in its context: lossy codecs keep the context's first 4 tokens exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A payload and what its frame header has to say about it."""

    payload: bytes | memoryview
    codec: str
    codec_version: int
    level: int
    tables: bytes
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
