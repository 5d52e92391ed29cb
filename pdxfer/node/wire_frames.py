"""One unit's bytes ↔ one codec frame: what both ends of the staged path agree on.

The frame's key is the unit's name (transfer, epoch, blocks, layers) and its identity the partners' fingerprint, so a
frame of another unit or engine is refused like a damaged one. Called by lanes (encode) and staging workers (decode).
"""

from collections.abc import Mapping

import numpy as np
from blake3 import blake3

from pdxfer.codec.base import ITEM_BYTES, Bytes, ChunkSpec, Codec
from pdxfer.codec.frame import FrameError, FrameHeader, open_frame
from pdxfer.codec.registry import encode_frame
from pdxfer.kv.chunks import identity_digest
from pdxfer.node.wire_settings import WireSettings, split
from pdxfer.store.transcode import OPAQUE, ChunkForm
from pdxfer.transport.base import UnitHeader


class WireFrames:
    """Encodes and decodes units of one rank. Any thread."""

    def __init__(self, settings: WireSettings, fingerprint: Mapping[str, str], block_size: int) -> None:
        """Raises ConfigError for a codec or level that nobody provides."""
        self._settings, self._block_size = settings, block_size
        self._identity = identity_digest(fingerprint)
        entries = [split(entry) for entry in settings.entries]
        self.taken = sorted({name for name, level in entries if self.usable(self.codec(name, level))})
        """Codecs whose frames are decoded here."""

    def codec(self, name: str, level: int) -> Codec:
        """ConfigError if there is none."""
        return self._settings.codecs.get(name, level)

    def usable(self, codec: Codec) -> bool:
        """Whether this engine's KV can be given to it."""
        return codec.opaque or self._settings.forms is not None

    def encode(self, raw: Bytes, unit: UnitHeader, codec: Codec) -> tuple[bytes | memoryview, ...]:
        """The frame of a unit's bytes in canonical order, in parts that may alias `raw`. One pass, or two for codecs
        that see values."""
        first, num_tokens = unit.first_block * self._block_size, unit.num_blocks * self._block_size
        if codec.opaque:
            item = ITEM_BYTES[self._settings.dtype]
            dtype = self._settings.dtype if raw.nbytes % item == 0 else OPAQUE
            shape = (1, 1, 1, 1, raw.nbytes // ITEM_BYTES[dtype])
            spec, values = ChunkSpec(dtype=dtype, shape=shape, first_token=first), raw
        else:
            form = self._form(unit.num_layers)
            spec, values = form.spec(num_tokens, first), form.unpack(raw, num_tokens)
        return tuple(encode_frame(values, spec, codec, key_of(unit), self._identity, num_tokens))

    def decode(self, frame: memoryview, unit: UnitHeader) -> tuple[Bytes, str]:
        """The unit's bytes in canonical order, in memory of their own, and the codec. Raises FrameError."""
        header, payload = open_frame(frame, key_of(unit), self._identity)
        if header.codec not in self.taken:
            raise FrameError(f"codec {header.codec} is not allowed here: see codec.allow; {self.taken} are")
        num_tokens = unit.num_blocks * self._block_size
        if header.raw_bytes != unit.num_bytes or header.num_tokens != num_tokens:
            raise FrameError(
                f"frame of {header.num_tokens} tokens, {header.raw_bytes} raw bytes for a unit of {num_tokens} tokens, "
                f"{unit.num_bytes} bytes"
            )
        form = None if header.opaque else self._form(unit.num_layers)
        if form is not None:
            _check(header, form.spec(num_tokens, header.first_token))
        out = np.empty(header.raw_bytes, dtype=np.uint8)
        self._settings.codecs.of(header).decode(payload, header, out)
        return (out if form is None else form.pack(out, num_tokens)), header.codec

    def _form(self, num_layers: int) -> ChunkForm:
        if self._settings.forms is None:
            raise FrameError("a frame of values, and this engine's KV layout is not known")
        return self._settings.forms(num_layers)


def key_of(unit: UnitHeader) -> bytes:
    """32 bytes that name a unit."""
    name = (unit.epoch, unit.first_block, unit.num_blocks, unit.first_layer, unit.num_layers)
    return blake3(f"{name}".encode() + unit.transfer_id.encode()).digest(length=32)


def _check(header: FrameHeader, spec: ChunkSpec) -> None:
    if (spec.dtype, spec.shape, spec.raw_bytes) != (header.dtype, header.shape, header.raw_bytes):
        raise FrameError(f"frame of {header.dtype} {header.shape}; this engine has {spec.dtype} {spec.shape}")
