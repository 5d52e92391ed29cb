"""Hostile payloads against the decoders in C: some values or FrameError, never a byte outside the destination."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdxfer.codec.base import ChunkSpec
from pdxfer.codec.frame import FrameError, FrameHeader, open_frame
from pdxfer.codec.registry import Codecs, encode_frame
from pdxfer.testing.codec_suite import IDENTITY, KEY, kv_like, mutate

NAMES = ("raw", "lossless", "zstd", "int8", "fp8", "int4")
ROUNDS = 20_000 if os.environ.get("PDXFER_TIER") == "full" else 1_000
"""Mutations a codec."""


def decode(codecs: Codecs, payload: bytes, header: FrameHeader, room: int) -> bool:
    """Whether it was taken; the bytes around the destination must not change."""
    guarded = np.full(room + 512, 0x5A, dtype=np.uint8)
    try:
        codecs.of(header).decode(memoryview(payload), header, guarded[256:-256])
        taken = True
    except FrameError:
        taken = False
    assert (guarded[:256] == 0x5A).all() and (guarded[-256:] == 0x5A).all()
    return taken


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_mutated_payloads(name: str) -> None:
    """Random mutations of real payloads and their headers; both ends are reached: some are taken, some refused."""
    rng, codecs, taken = np.random.default_rng(4), Codecs(), 0
    for n in range(ROUNDS):
        shape = (1, 2, int(rng.integers(1, 3)), int(rng.integers(1, 70)), int(rng.integers(1, 40)))
        dtype = str(rng.choice(["bfloat16", "float16", "float32"]))
        spec = ChunkSpec(dtype=dtype, shape=shape, first_token=int(rng.integers(0, 6)))
        frame = b"".join(encode_frame(kv_like(spec, n), spec, codecs.get(name), KEY, IDENTITY, shape[3]))
        header, payload = open_frame(memoryview(frame), KEY, IDENTITY)
        taken += decode(codecs, *mutate(rng, bytes(payload), header))
    assert 0 < taken < ROUNDS


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(data=st.binary(max_size=600), shape=st.tuples(*[st.integers(0, 40)] * 3), dtype=st.integers(0, 5))
def test_invented_payloads(name: str, data: bytes, shape: tuple[int, int, int], dtype: int) -> None:
    """Bytes that no encoder made, for headers that fit the destination."""
    spec = ChunkSpec(
        dtype=("opaque", "bfloat16", "float16", "float32", "float8_e4m3", "float8_e5m2")[dtype], shape=(1, 2, *shape)
    )
    header = FrameHeader(
        codec=name,
        dtype=spec.dtype,
        shape=spec.shape,
        num_tokens=shape[1],
        raw_bytes=spec.raw_bytes,
        payload_bytes=len(data),
        identity=IDENTITY,
        key=KEY,
        payload_xxh3=0,
    )
    decode(Codecs(), data, header, spec.raw_bytes)
