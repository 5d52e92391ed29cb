"""Codecs by name, and whole frames: values → frame parts, frame → values.

Ours, those of installed plug-ins (entry point group pdxfer.codecs) and `module:Class`. A codec's file, with the
library it needs, is imported when it is asked for. A class is constructed with (level, tables). Used by the store
(put, transcode) and the staged wire path; any thread.
"""

import difflib
import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from importlib.metadata import entry_points
from typing import cast

import numpy as np
import xxhash

from pdxfer.codec.base import Bytes, ChunkSpec, Codec, Tables
from pdxfer.codec.frame import FrameError, FrameHeader, open_frame, seal
from pdxfer.core.errors import ConfigError

BUILT_IN = {
    "cachegen": "pdxfer.codec.cachegen:CacheGenCodec",
    "fp8": "pdxfer.codec.fp8:Fp8Codec",
    "int4": "pdxfer.codec.int4:Int4Codec",
    "int8": "pdxfer.codec.int8:Int8Codec",
    "klt": "pdxfer.codec.klt:KltCodec",
    "lossless": "pdxfer.codec.lossless:LosslessCodec",
    "raw": "pdxfer.codec.raw:RawCodec",
    "zstd": "pdxfer.codec.zstd:ZstdCodec",
}
NO_SHAPE = (0, 0, 0, 0, 0)


def codec(name: str, level: int = 0, tables: Tables | None = None) -> Codec:
    """The codec `name` at `level` (0: its default). Raises ConfigError for a name nobody provides, naming the nearest,
    and for a level or library that is not there."""
    target = find_codec(name)
    module, _, attribute = target.partition(":")
    try:
        make = cast(Callable[[int, Tables | None], Codec], getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"codec {name} cannot be loaded from {target}: {error}") from error
    return make(level, tables)


def find_codec(name: str) -> str:
    """Where a codec is, `module:Class`, without importing it. Raises ConfigError for a name nobody provides."""
    target = name if ":" in name else BUILT_IN.get(name) or _plugins().get(name, "")
    if not target:
        known = sorted({*BUILT_IN, *_plugins()})
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"no codec {name!r}; {hint}Known are {', '.join(known)} and module:Class")
    return target


def names() -> list[str]:
    """All registered names, sorted."""
    return sorted({*BUILT_IN, *_plugins()})


def _plugins() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group="pdxfer.codecs")}


class Codecs:
    """Codecs of one model that were asked for so far: made once, found by a frame's header. Any thread."""

    def __init__(self, tables: Tables | None = None) -> None:
        self._tables = tables
        self._made: dict[tuple[str, int], Codec] = {}

    def get(self, name: str, level: int = 0) -> Codec:
        """As `codec`, kept."""
        made = self._made.get((name, level))
        return made if made is not None else self._made.setdefault((name, level), codec(name, level, self._tables))

    def of(self, header: FrameHeader) -> Codec:
        """The one that reads this frame. Raises FrameError if there is none: a miss, not a setting."""
        if ":" in header.codec:
            raise FrameError(f"frame names codec {header.codec!r}, which is no registered name")
        try:
            return self.get(header.codec, header.level)
        except ConfigError as error:
            raise FrameError(f"frame cannot be read here: {error}") from error


def encode_frame(
    values: Bytes, spec: ChunkSpec, codec: Codec, key: bytes, identity: bytes, num_tokens: int
) -> list[bytes | memoryview]:
    """Header and payload of the frame of one chunk; their concatenation is the stored value.

    `values`: uint8 [raw_bytes], packed bytes for an opaque codec, canonical values for the others. The payload may
    alias `values` (raw does): both stay valid only as long as the caller keeps `values` unchanged.
    """
    encoded = codec.encode(values, spec)
    header = FrameHeader(
        codec=encoded.codec,
        codec_version=encoded.codec_version,
        level=encoded.level,
        dtype=spec.dtype,
        shape=NO_SHAPE if codec.opaque else spec.shape,
        num_tokens=num_tokens,
        first_token=spec.first_token,
        raw_bytes=values.nbytes,
        payload_bytes=len(encoded.payload),
        identity=identity,
        tables=encoded.tables,
        key=key,
        payload_xxh3=xxhash.xxh3_64_intdigest(encoded.payload),
    )
    return [seal(header), encoded.payload]


def decode_frame(
    frame: memoryview, key: bytes, identity: bytes, out: Bytes, codecs: Codecs | None = None
) -> FrameHeader:
    """Check a frame and decode it into `out`, uint8 [raw_bytes]. Raises FrameError; then `out` is garbage.

    `header.opaque` says what `out` now holds: packed bytes, or canonical values that kv/pack.py has to pack.
    """
    header, payload = open_frame(frame, key, identity)
    if out.dtype != np.uint8 or out.nbytes != header.raw_bytes:
        raise FrameError(f"frame decodes to {header.raw_bytes} bytes, the destination has {out.nbytes}")
    (codecs or Codecs()).of(header).decode(payload, header, out)
    return header


def decode_frames(
    jobs: Sequence[tuple[memoryview, bytes, Bytes]], identity: bytes, codecs: Codecs, executor: Executor
) -> list[FrameHeader | FrameError]:
    """Decode a batch of (frame, key, out) in `executor`'s threads: one result each, in order."""

    def one(job: tuple[memoryview, bytes, Bytes]) -> FrameHeader | FrameError:
        try:
            return decode_frame(job[0], job[1], identity, job[2], codecs)
        except FrameError as error:
            return error

    return list(executor.map(one, jobs))


def encode_frames(
    jobs: Sequence[tuple[Bytes, ChunkSpec, bytes, int]], codec: Codec, identity: bytes, executor: Executor
) -> list[list[bytes | memoryview]]:
    """Encode a batch of (values, spec, key, num_tokens) in `executor`'s threads: frame parts each, in order."""
    return list(executor.map(lambda job: encode_frame(job[0], job[1], codec, job[2], identity, job[3]), jobs))
