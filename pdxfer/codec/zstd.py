"""Codec `zstd`: byte planes of the values through zstandard, for tiers where bytes cost more than time (disk, cloud).

Works on packed bytes of any layout; x1.47 on real bfloat16 KV, the exponents being in a plane of their own. Needs the
library `zstandard` (extra `codec`). Payload: number of planes (1: bytes as they are), three zeros, u32 zero, one zstd
frame of all planes; the values themselves (0 planes) where that would not be shorter.
"""

import struct

import numpy as np
import zstandard

from pdxfer.codec.base import ITEM_BYTES, Bytes, ChunkSpec, Encoded, Tables, check_version
from pdxfer.codec.frame import FrameError, FrameHeader
from pdxfer.core.errors import ConfigError

_HEAD = struct.Struct("<BxxxI")
DEFAULT_LEVEL = 1
"""Higher ones are slower and no smaller on KV: its mantissas are noise, its exponents have no repeats to find."""
MAX_LEVEL = 9
MAX_WINDOW = 1 << 27
"""zstd frames that ask for a larger window are refused: bounded memory."""


class ZstdCodec:
    """Bit-exact; levels 1 to 9 are zstd's own."""

    name = "zstd"
    version = 1
    """1: first (2026-11-29)."""
    lossless = True
    opaque = True

    def __init__(self, level: int = 0, tables: Tables | None = None) -> None:
        if level > MAX_LEVEL:
            raise ConfigError(f"codec zstd has no level {level}; use 0 (= {DEFAULT_LEVEL}) to {MAX_LEVEL}")
        self._level = level or DEFAULT_LEVEL

    def encode(self, values: Bytes, spec: ChunkSpec) -> Encoded:
        """Two passes: planes, then zstd."""
        item = ITEM_BYTES[spec.dtype]
        planes = np.ascontiguousarray(values.reshape(-1, item).T)
        packed = zstandard.ZstdCompressor(level=self._level, write_content_size=True).compress(planes.data)
        head = _HEAD.pack(item, 0)
        payload = head + packed if len(packed) < values.nbytes else _HEAD.pack(0, 0) + values.tobytes()
        return Encoded(payload=payload, codec=self.name, codec_version=self.version, level=self._level)

    def decode(self, payload: memoryview, header: FrameHeader, out: Bytes) -> None:
        """Two passes; as much memory again as the values."""
        check_version(header, self.name, self.version)
        if len(payload) < _HEAD.size:
            raise FrameError(f"zstd payload of {len(payload)} bytes is cut")
        item, _ = _HEAD.unpack(payload[: _HEAD.size])
        body = payload[_HEAD.size :]
        if item == 0:
            if len(body) != out.nbytes:
                raise FrameError(f"zstd payload holds {len(body)} bytes as they are, the destination has {out.nbytes}")
            out[:] = np.frombuffer(body, dtype=np.uint8)
            return
        if item not in (1, 2, 4) or out.nbytes % item:
            raise FrameError(f"zstd payload of {item} planes for {out.nbytes} bytes")
        planes = np.frombuffer(_decompress(body, out.nbytes), dtype=np.uint8)
        out.reshape(-1, item)[:] = planes.reshape(item, -1).T


def _decompress(body: memoryview, size: int) -> bytes:
    """The one zstd frame of `body`, which must hold `size` bytes and nothing after it."""
    try:
        said = zstandard.get_frame_parameters(body)
        if said.content_size != size or said.window_size > MAX_WINDOW:
            raise FrameError(
                f"zstd frame of {said.content_size} bytes, window {said.window_size}; the chunk has {size}"
            )
        reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
        plain = reader.decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FrameError(f"zstd payload is damaged: {error}") from error
    if len(plain) != size:
        raise FrameError(f"zstd frame gave {len(plain)} of {size} bytes")
    return plain
