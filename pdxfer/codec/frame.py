"""The frame around every stored or staged chunk: a fixed header that says what the bytes are, then the payload.

One frame is one value of one tier. Reading trusts nothing: `open_frame` checks magic, version, both checksums, lengths
and every fact the reader knows; whatever differs raises FrameError, which tiers count as a miss. Little-endian.

    0 magic "PDXK"   4 version     6 header_bytes   8 codec name (12)   20 codec version   22 level   23 dtype
   24 shape L,2,H,T,D (5 × u32)   44 num_tokens    48 raw_bytes   56 payload_bytes   64 identity (16)
   80 tables (16)   96 key (32)  128 payload xxh3 136 first_token  140 zero (12)  152 header xxh3
  160 payload
"""

import struct
from dataclasses import dataclass

import xxhash

from pdxfer.core.errors import PdxferError

MAGIC = b"PDXK"
VERSION = 1
"""1: first (2026-11-29)."""
HEADER_BYTES = 160
MAX_RAW_BYTES = 1 << 32
"""A chunk larger than this is not ours, whatever its header says."""

_HEADER = struct.Struct("<4sHH12sHBB5IIQQ16s16s32sQI12s")
_CHECK = struct.Struct("<Q")
assert _HEADER.size + _CHECK.size == HEADER_BYTES

DTYPES = ("opaque", "bfloat16", "float16", "float32", "float8_e4m3", "float8_e5m2")
"""By their number in the header; `opaque` bytes are only for codecs that look at no values."""


class FrameError(PdxferError):
    """These bytes are not the frame that was asked for: damaged, cut, foreign or of another version. A miss."""


class ForeignFrameError(FrameError):
    """Its header is right and names another identity: in a tier that several models share it is another model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameHeader:
    """What a frame says about its payload."""

    codec: str
    """Registered name, ASCII, at most 12."""
    codec_version: int = 1
    level: int = 0
    dtype: str = "opaque"
    shape: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    """[L, 2, H, T, D] of the canonical values; zeros where the codec treats bytes as opaque."""
    num_tokens: int
    """Valid tokens of the chunk; the last chunk of a prompt may hold fewer than the others."""
    first_token: int = 0
    """Position of the chunk's first token in its context: who encodes again needs it."""
    raw_bytes: int
    """Length after decoding."""
    payload_bytes: int
    identity: bytes
    """16 bytes: model, weights, layout, packing, rank slice (kv/chunks.py)."""
    tables: bytes = bytes(16)
    """Digest of the codec's tables; zeros: none."""
    key: bytes
    """32 bytes: the chunk key this value was stored under."""
    payload_xxh3: int

    @property
    def opaque(self) -> bool:
        """Decodes to bytes as they were packed, not to canonical values."""
        return not any(self.shape)


def seal(header: FrameHeader) -> bytes:
    """The header's 160 bytes."""
    packed = _HEADER.pack(
        MAGIC,
        VERSION,
        HEADER_BYTES,
        header.codec.encode("ascii"),
        header.codec_version,
        header.level,
        DTYPES.index(header.dtype),
        *header.shape,
        header.num_tokens,
        header.raw_bytes,
        header.payload_bytes,
        header.identity,
        header.tables,
        header.key,
        header.payload_xxh3,
        header.first_token,
        bytes(12),
    )
    return packed + _CHECK.pack(xxhash.xxh3_64_intdigest(packed))


def read_header(frame: memoryview | bytes) -> FrameHeader:
    """The checked header of a frame (payload untouched). Raises FrameError."""
    if len(frame) < HEADER_BYTES:
        raise FrameError(f"{len(frame)} bytes are too few for a frame header of {HEADER_BYTES}")
    head = bytes(frame[:HEADER_BYTES])
    magic, version, size, codec, codec_version, level, dtype, *rest = _HEADER.unpack(head[: _HEADER.size])
    if magic != MAGIC:
        raise FrameError(f"not a frame: starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION or size != HEADER_BYTES:
        raise FrameError(
            f"frame version {version} with a header of {size}; this pdxfer reads {VERSION} of {HEADER_BYTES}"
        )
    if _CHECK.unpack(head[_HEADER.size :])[0] != xxhash.xxh3_64_intdigest(head[: _HEADER.size]):
        raise FrameError("the frame header's checksum is wrong")
    if dtype >= len(DTYPES):
        raise FrameError(f"frame dtype number {dtype} is unknown")
    shape = (rest[0], rest[1], rest[2], rest[3], rest[4])
    num_tokens, raw_bytes, payload_bytes, identity, tables, key, payload_xxh3, first_token, _zero = rest[5:]
    if raw_bytes > MAX_RAW_BYTES or payload_bytes > MAX_RAW_BYTES:
        raise FrameError(
            f"frame claims {raw_bytes} raw and {payload_bytes} payload bytes; the limit is {MAX_RAW_BYTES}"
        )
    return FrameHeader(
        codec=codec.rstrip(b"\0").decode("ascii", "replace"),
        codec_version=codec_version,
        level=level,
        dtype=DTYPES[dtype],
        shape=shape,
        num_tokens=num_tokens,
        first_token=first_token,
        raw_bytes=raw_bytes,
        payload_bytes=payload_bytes,
        identity=identity,
        tables=tables,
        key=key,
        payload_xxh3=payload_xxh3,
    )


def open_frame(frame: memoryview, key: bytes, identity: bytes) -> tuple[FrameHeader, memoryview]:
    """Header and payload (a view, no copy) of the frame stored under `key` by this identity. Raises FrameError."""
    header = read_header(frame)
    if header.key != key:
        raise FrameError(f"frame of key {header.key.hex()[:12]} where {key.hex()[:12]} was asked for")
    if header.identity != identity:
        raise ForeignFrameError(f"frame of identity {header.identity.hex()[:12]}, ours is {identity.hex()[:12]}")
    payload = frame[HEADER_BYTES:]
    if len(payload) != header.payload_bytes:
        raise FrameError(f"frame holds {len(payload)} payload bytes, its header says {header.payload_bytes}")
    if xxhash.xxh3_64_intdigest(payload) != header.payload_xxh3:
        raise FrameError("the payload's checksum is wrong")
    return header, payload
