"""Codec `raw`: the bytes as they are. What every tier and wire can always fall back to."""

import numpy as np

from pdxfer.codec.base import Bytes, ChunkSpec, Encoded, Tables, check_version
from pdxfer.codec.frame import FrameError, FrameHeader

VERSION = 1
"""1: first (2026-11-29)."""


class RawCodec:
    """No transform; encode makes no copy, decode one."""

    name = "raw"
    lossless = True
    opaque = True

    def __init__(self, level: int = 0, tables: Tables | None = None) -> None:
        pass

    def encode(self, values: Bytes, spec: ChunkSpec) -> Encoded:
        """The payload aliases `values`."""
        return Encoded(payload=values.data, codec=self.name, codec_version=VERSION, level=0)

    def decode(self, payload: memoryview, header: FrameHeader, out: Bytes) -> None:
        """One copy."""
        check_version(header, self.name, VERSION)
        if len(payload) != out.nbytes:
            raise FrameError(f"raw payload of {len(payload)} bytes for a destination of {out.nbytes}")
        out[:] = np.frombuffer(payload, dtype=np.uint8)
