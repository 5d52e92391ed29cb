"""Codec `lossless`: exponents in three bits where they are near their neighbours' largest; everything else as it is.

Fixed rate with escapes, so that all offsets are known before decoding (a GPU can start anywhere). Works on packed bytes
of any layout: x1.4 on real bfloat16 KV, 1.1 on float16, 1.2 on float32; other dtypes and incompressible bytes are kept.
Groups of 64 values; little-endian:

    0 coded (0: bytes follow)  1 zero (3)  4 escapes E
    8 planes [G, 3] u64 · extra planes [G, 3] u64 (float16) · segments' escape counts [G / 64] u16 · base [G] ·
      rest [G, 64] · escapes [E] · low halves u16 (float32) · values after the last whole group
"""

import struct

import numpy as np

from pdxfer.codec.arrays import contiguous, host, put, words16
from pdxfer.codec.base import Bytes, ChunkSpec, Encoded, Tables, check_version
from pdxfer.codec.frame import FrameError, FrameHeader
from pdxfer.codec.kernels import GROUP, Kernels, best
from pdxfer.core.errors import ConfigError

_HEAD = struct.Struct("<BxxxI")
CODED = {"bfloat16": (1, False), "float16": (1, True), "float32": (2, False)}
"""Dtype → 16-bit words a value, whether it is float16."""


class Parts:
    """Where the parts of a payload of so many bytes of one dtype lie."""

    def __init__(self, dtype: str, num_bytes: int) -> None:
        self.stride, self.half = CODED[dtype]
        item = 2 * self.stride
        self.groups = num_bytes // (GROUP * item)
        self.whole = self.groups * GROUP * item
        """Bytes of the values in whole groups."""
        self.tail = num_bytes - self.whole
        self.low = self.whole // 2 if self.stride == 2 else 0
        """Bytes of the low halves."""
        g = self.groups
        sizes = (24 * g, 24 * g if self.half else 0, 2 * -(-g // GROUP), g, GROUP * g)
        self.ends = np.cumsum([_HEAD.size, *sizes]).tolist()

    def views(self, data: Bytes) -> tuple[Bytes, ...]:
        """planes, extra, counts, base, rest as bytes."""
        return tuple(data[a:b] for a, b in zip(self.ends, self.ends[1:], strict=False))


class LosslessCodec:
    """Bit-exact. Two copies of the values at most: into the payload, out of it."""

    name = "lossless"
    version = 1
    """1: first (2026-11-29)."""
    lossless = True
    opaque = True

    def __init__(self, level: int = 0, tables: Tables | None = None, kernels: Kernels | None = None) -> None:
        if level != 0:
            raise ConfigError(f"codec lossless has no level {level}; use 0")
        self._kernels = kernels or best()

    def encode(self, values: Bytes, spec: ChunkSpec) -> Encoded:
        """One pass."""
        payload = self._code(values, spec.dtype) if spec.dtype in CODED else None
        if payload is None:
            payload = np.concatenate((np.zeros(_HEAD.size, dtype=np.uint8), host(values)))
        return Encoded(payload=payload.data, codec=self.name, codec_version=self.version, level=0)

    def _code(self, values: Bytes, dtype: str) -> Bytes | None:
        parts = Parts(dtype, values.nbytes)
        fixed = parts.ends[-1]
        room = values.nbytes - fixed - parts.low - parts.tail
        if parts.groups == 0 or room <= 0:
            return None
        payload = np.empty(values.nbytes, dtype=np.uint8)
        planes, extra, counts, base, rest = parts.views(payload)
        words = words16(values[: parts.whole])
        used = self._kernels.lossless_encode(
            words[parts.stride - 1 :],
            parts.stride,
            parts.half,
            base,
            planes.view(np.uint64),
            extra.view(np.uint64),
            rest,
            counts.view(np.uint16),
            payload[fixed : fixed + room],
        )
        if used < 0:
            return None
        payload[: _HEAD.size] = np.frombuffer(_HEAD.pack(1, used), dtype=np.uint8)
        at = fixed + used
        if parts.low:
            payload[at : at + parts.low] = host(contiguous(words[::2])).view(np.uint8)
        payload[at + parts.low : at + parts.low + parts.tail] = host(values[parts.whole :])
        return payload[: at + parts.low + parts.tail]

    def decode(self, payload: memoryview, header: FrameHeader, out: Bytes) -> None:
        """One pass into `out`."""
        check_version(header, self.name, self.version)
        data = np.frombuffer(payload, dtype=np.uint8)
        if data.nbytes < _HEAD.size:
            raise FrameError(f"lossless payload of {data.nbytes} bytes is cut")
        coded, used = _HEAD.unpack(payload[: _HEAD.size])
        if not coded:
            if data.nbytes != _HEAD.size + out.nbytes:
                raise FrameError(f"lossless payload of {data.nbytes} bytes should hold {out.nbytes} as they are")
            put(out, data[_HEAD.size :])
            return
        if header.dtype not in CODED:
            raise FrameError(f"lossless payload of dtype {header.dtype}, which is never coded")
        parts = Parts(header.dtype, out.nbytes)
        at = parts.ends[-1] + used
        if data.nbytes != at + parts.low + parts.tail:
            raise FrameError(f"lossless payload of {data.nbytes} bytes for {out.nbytes} with {used} escapes is cut")
        planes, extra, counts, base, rest = parts.views(data)
        words = words16(out[: parts.whole])
        taken = self._kernels.lossless_decode(
            base,
            planes.view(np.uint64),
            extra.view(np.uint64),
            rest,
            counts.view(np.uint16),
            data[parts.ends[-1] : at],
            parts.half,
            words[parts.stride - 1 :],
            parts.stride,
        )
        if not taken:
            raise FrameError("lossless payload: the planes ask for other escapes than there are")
        if parts.low:
            put(words[::2], data[at : at + parts.low].view(np.uint16))
        put(out[parts.whole :], data[at + parts.low :])
