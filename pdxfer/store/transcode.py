"""Frames of one identity: a chunk's raw bytes → the frame a tier keeps, and back; frame → frame of another codec.

Used by reading.py, writing.py and manage.py in the store's worker threads; everything here is synchronous. Lossy codecs
see canonical values, which only the engine's `ChunkForm` can make of its raw bytes; without one such frames are misses,
and tiers that ask for such a codec keep raw frames.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import xxhash

from pdxfer.codec.base import ITEM_BYTES, Bytes, ChunkSpec
from pdxfer.codec.frame import HEADER_BYTES, FrameError, FrameHeader, open_frame, seal
from pdxfer.codec.registry import Codecs, encode_frame
from pdxfer.memory.segment import private_map
from pdxfer.store.base import Buffer
from pdxfer.store.chunk import NewChunk, Wanted
from pdxfer.store.lease import total_bytes

log = logging.getLogger(__name__)

RAW = "raw"
OPAQUE = "opaque"
_STEP_BYTES = 1 << 19
"""Copied, then digested out of the cache: up to 1.1 times the rate of two passes; smaller steps are slower."""


class ChunkForm(Protocol):
    """How this engine's raw chunk bytes are canonical values (kv/pack.py). Any thread."""

    def spec(self, num_tokens: int, first_token: int) -> ChunkSpec:
        """Dtype and shape of a chunk of so many tokens."""
        ...

    def unpack(self, raw: Bytes, num_tokens: int) -> Bytes:
        """Raw bytes → canonical values, both uint8 [raw_bytes]."""
        ...

    def pack(self, values: Bytes, num_tokens: int) -> Bytes:
        """And back."""
        ...


class Transcoder:
    """Makes and opens frames. Any thread."""

    def __init__(
        self, identity: bytes, codecs: Codecs | None = None, form: ChunkForm | None = None, dtype: str = OPAQUE
    ) -> None:
        """`dtype` (frame.DTYPES) of the values in raw bytes, however packed: lossless and zstd need no more."""
        self.identity = identity
        self._dtype = dtype
        self._codecs = codecs if codecs is not None else Codecs()
        self._form = form

    def raw_frame_bytes(self, chunk: NewChunk) -> int:
        """Length of the chunk's raw frame."""
        return HEADER_BYTES + total_bytes(chunk.parts)

    def fill_raw(self, view: memoryview, chunk: NewChunk) -> None:
        """Write the chunk's raw frame into `view`, exactly as long. One copy, then digested."""
        payload = view[HEADER_BYTES:]
        digest = _copy_digested(payload, chunk.parts)
        header = FrameHeader(
            codec=RAW,
            dtype=self._dtype,
            num_tokens=chunk.num_tokens,
            first_token=chunk.first_token,
            raw_bytes=len(payload),
            payload_bytes=len(payload),
            identity=self.identity,
            key=chunk.key,
            payload_xxh3=digest,
        )
        view[:HEADER_BYTES] = seal(header)

    def raw_frame(self, chunk: NewChunk) -> memoryview:
        """The chunk's raw frame in memory of its own, on whole pages: the disk tier writes it from there."""
        frame = memoryview(private_map(self.raw_frame_bytes(chunk)))
        self.fill_raw(frame, chunk)
        return frame

    def usable(self, codec: str, level: int) -> bool:
        """Whether frames of this codec can be made here. ConfigError for an unknown name, level or missing library."""
        return self._codecs.get(codec, level).opaque or self._form is not None

    def check(self, frame: memoryview, key: bytes, want: Wanted | None = None) -> FrameHeader:
        """The header of an intact frame of `key` and our identity, which can be decoded here. Raises FrameError."""
        return self._checked(frame, key, want)[0]

    def open(self, frame: memoryview, key: bytes, want: Wanted | None = None) -> tuple[FrameHeader, memoryview]:
        """Header and raw bytes: a view of `frame` where the codec is raw, else memory of its own. Raises FrameError."""
        header, payload = self._checked(frame, key, want)
        if header.codec == RAW:
            return header, payload.toreadonly()
        out = np.empty(header.raw_bytes, dtype=np.uint8)
        self._codecs.of(header).decode(payload, header, out)
        if not header.opaque:
            assert self._form is not None
            out = self._form.pack(out, header.num_tokens)
        return header, out.data.toreadonly()

    def recode(self, frame: memoryview, key: bytes, codec: str, level: int) -> list[Buffer]:
        """The same chunk as a frame of another codec, in parts that may alias `frame`. Raises FrameError."""
        header, raw = self.open(frame, key)
        if (header.codec, header.level) == (codec, level):
            return [frame]
        return list(self._encode(header, np.frombuffer(raw, dtype=np.uint8), codec, level))

    # ---- how ---------------------------------------------------------------------------------------------------------

    def _checked(self, frame: memoryview, key: bytes, want: Wanted | None) -> tuple[FrameHeader, memoryview]:
        header, payload = open_frame(frame, key, self.identity)
        if want is not None and (header.num_tokens, header.raw_bytes) != (want.num_tokens, want.raw_bytes):
            raise FrameError(
                f"frame of {header.num_tokens} tokens, {header.raw_bytes} raw bytes; the request needs "
                f"{want.num_tokens} tokens, {want.raw_bytes} bytes"
            )
        if header.codec == RAW and header.raw_bytes != len(payload):
            raise FrameError(f"raw frame of {len(payload)} payload bytes claims {header.raw_bytes}")
        if not header.opaque:
            self._check_form(header)
        return header, payload

    def _check_form(self, header: FrameHeader) -> None:
        """Canonical values are ours only if dtype and shape are what this engine has."""
        if self._form is None:
            raise FrameError(f"frame of {header.codec} values, and this process does not know its engine's KV layout")
        spec = self._form.spec(header.num_tokens, header.first_token)
        if (spec.dtype, spec.shape, spec.raw_bytes) != (header.dtype, header.shape, header.raw_bytes):
            raise FrameError(f"frame of {header.dtype} {header.shape}; this engine has {spec.dtype} {spec.shape}")

    def _encode(self, header: FrameHeader, raw: Bytes, codec: str, level: int) -> Sequence[Buffer]:
        made = self._codecs.get(codec, level)
        num_tokens, first_token = header.num_tokens, header.first_token
        if made.opaque:
            dtype = header.dtype if raw.nbytes % ITEM_BYTES[header.dtype] == 0 else OPAQUE
            spec = ChunkSpec(dtype=dtype, shape=(1, 1, 1, 1, raw.nbytes // ITEM_BYTES[dtype]), first_token=first_token)
            return encode_frame(raw, spec, made, header.key, self.identity, num_tokens)
        if self._form is None:
            raise FrameError(f"codec {codec} needs the engine's KV layout, which this process does not know")
        spec = self._form.spec(num_tokens, first_token)
        if spec.raw_bytes != raw.nbytes:
            raise FrameError(
                f"chunk of {raw.nbytes} raw bytes; {num_tokens} tokens of this engine are {spec.raw_bytes}"
            )
        values = self._form.unpack(raw, num_tokens)
        return encode_frame(values, spec, made, header.key, self.identity, num_tokens)


def _copy_digested(view: memoryview, parts: Sequence[Buffer]) -> int:
    """Concatenate `parts` into `view`; xxh3_64 of what is now there, step by step while it is in the cache. Releases
    the GIL in both."""
    target, at, state = np.frombuffer(view, dtype=np.uint8), 0, xxhash.xxh3_64()
    for part in parts:
        source = np.frombuffer(part, dtype=np.uint8)
        for begin in range(0, source.nbytes, _STEP_BYTES):
            piece = source[begin : begin + _STEP_BYTES]
            copied = target[at : at + piece.nbytes]
            np.copyto(copied, piece)  # a copy between memoryviews would hold the GIL
            state.update(copied.data)
            at += piece.nbytes
    assert at == len(view), (at, len(view))
    return state.intdigest()
