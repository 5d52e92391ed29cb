"""Frames and the registry: headers that lie are refused, names are found or the nearest is named."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdxfer.codec.base import ChunkSpec
from pdxfer.codec.frame import HEADER_BYTES, FrameError, open_frame, read_header
from pdxfer.codec.raw import RawCodec
from pdxfer.codec.registry import Codecs, codec, decode_frame, encode_frame
from pdxfer.core.errors import ConfigError

KEY, IDENTITY = bytes(range(32)), bytes(range(16))
SPEC = ChunkSpec(dtype="bfloat16", shape=(1, 2, 1, 4, 8), first_token=256)
FRAME = b"".join(encode_frame(np.arange(128, dtype=np.uint8), SPEC, RawCodec(), KEY, IDENTITY, 4))


def test_a_frame_tells_what_it_was_made_of() -> None:
    """All facts come back; the payload is a view."""
    header, payload = open_frame(memoryview(FRAME), KEY, IDENTITY)
    assert (header.codec, header.dtype, header.num_tokens, header.raw_bytes) == ("raw", "bfloat16", 4, 128)
    assert header.opaque and bytes(payload) == bytes(range(128))


@pytest.mark.parametrize("at", range(HEADER_BYTES))
def test_every_byte_of_the_header_is_protected(at: int) -> None:
    """One bit flipped anywhere: FrameError."""
    damaged = bytearray(FRAME)
    damaged[at] ^= 0x10
    with pytest.raises(FrameError):
        open_frame(memoryview(damaged), KEY, IDENTITY)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_no_frame(data: bytes) -> None:
    """FrameError and nothing else, with our magic in front or not."""
    for candidate in (data, FRAME[:8] + data, FRAME[:HEADER_BYTES] + data):
        if candidate == FRAME:
            continue
        with pytest.raises(FrameError):
            decode_frame(memoryview(candidate), KEY, IDENTITY, np.empty(128, dtype=np.uint8))
    if len(data) < HEADER_BYTES:
        with pytest.raises(FrameError):
            read_header(data)


def test_an_unknown_codec_names_the_nearest() -> None:
    """Settings with a slip of the pen are ConfigErrors; a frame of an unknown codec is a miss."""
    with pytest.raises(ConfigError, match="did you mean lossless"):
        codec("losless")
    with pytest.raises(ConfigError, match="no_such_module"):
        codec("no_such_module:Codec")
    with pytest.raises(ConfigError, match="level 3"):
        codec("int8", 3)
    header = read_header(FRAME)
    with pytest.raises(FrameError, match="no registered name"):
        Codecs().of(type(header)(**{n: getattr(header, n) for n in header.__slots__} | {"codec": "os:system"}))


def test_codecs_by_module_and_class() -> None:
    """A plug-in that is not installed as one."""
    assert codec("pdxfer.codec.raw:RawCodec").name == "raw"
