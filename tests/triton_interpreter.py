"""Triton kernels give the bits of the CPU loops: by Triton's interpreter on CPU tensors, or on a GPU.

The interpreter needs TRITON_INTERPRET=1 from the start of the process, so test_codec_triton.py runs this file in one of
its own."""

import os

import numpy as np
import pytest
import torch
from test_codec_klt import DIM, HEADS, LAYERS, LEARNT

from pdxfer.codec.base import ChunkSpec, Encoded
from pdxfer.codec.fp8 import Fp8Codec
from pdxfer.codec.frame import FrameHeader
from pdxfer.codec.int4 import Int4Codec
from pdxfer.codec.int8 import Int8Codec
from pdxfer.codec.kernels.gpu.kernels import TritonKernels
from pdxfer.codec.kernels.reference import ReferenceKernels
from pdxfer.codec.klt import KltCodec
from pdxfer.codec.lossless import LosslessCodec
from pdxfer.codec.values import from_float, to_float
from pdxfer.testing.codec_suite import kv_like

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, about inf and NaN it was given

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = ("bfloat16", "float16", "float32")
SHAPES = [(2, 2, 2, 37, 32), (1, 2, 1, 33, 17), (1, 2, 1, 8, 80), (1, 2, 1, 1, 1)]


def inputs(dtype: str) -> list[tuple[np.ndarray, ChunkSpec]]:
    """KV-like values with zeros, and random bits, in all shapes."""
    found = []
    for seed, shape in enumerate(SHAPES):
        spec = ChunkSpec(dtype=dtype, shape=shape, first_token=256 if seed % 2 else 2)
        rng = np.random.default_rng(seed)
        values = kv_like(spec, seed)
        values[rng.random(values.size) < 0.1] = 0
        found += [(values, spec), (rng.integers(0, 256, spec.raw_bytes, dtype=np.uint8), spec)]
    return found


def header(encoded: Encoded, spec: ChunkSpec, opaque: bool) -> FrameHeader:
    """What a frame of it would say."""
    return FrameHeader(
        codec=encoded.codec, codec_version=encoded.codec_version, level=encoded.level, dtype=spec.dtype,
        shape=(0, 0, 0, 0, 0) if opaque else spec.shape, num_tokens=spec.shape[3], first_token=spec.first_token,
        raw_bytes=spec.raw_bytes, payload_bytes=len(encoded.payload), identity=bytes(16), tables=encoded.tables,
        key=bytes(32), payload_xxh3=0,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [Int8Codec, Fp8Codec, Int4Codec, LosslessCodec])
def test_tensors_are_coded_as_arrays_are(make: type, dtype: str) -> None:
    """The same payload from a tensor, and the same values back into one."""
    fast, plain = make(kernels=TritonKernels()), make(kernels=ReferenceKernels())
    for values, spec in inputs(dtype):
        mine, judge = fast.encode(torch.tensor(values, device=DEVICE), spec), plain.encode(values, spec)
        assert bytes(mine.payload) == bytes(judge.payload), spec
        out, expected = torch.empty(values.nbytes, dtype=torch.uint8, device=DEVICE), np.empty_like(values)
        fast.decode(memoryview(mine.payload), header(mine, spec, fast.opaque), out)
        plain.decode(memoryview(mine.payload), header(mine, spec, plain.opaque), expected)
        assert np.array_equal(out.cpu().numpy(), expected), spec


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [Int8Codec, Fp8Codec, Int4Codec])
def test_hostile_codes_decode_to_the_same_values(make: type, dtype: str) -> None:
    """Codes and finite parameters no encoder writes, with results that overflow and underflow."""
    rng = np.random.default_rng(8)
    fast, plain = make(kernels=TritonKernels()), make(kernels=ReferenceKernels())
    spec = ChunkSpec(dtype=dtype, shape=(1, 2, 2, 37, 48), first_token=256)
    payload = np.array(bytearray(plain.encode(kv_like(spec), spec).payload), dtype=np.uint8)
    layout = plain.layout(spec.shape)
    payload[8:] = rng.integers(0, 256, payload.size - 8, dtype=np.uint8)
    words = payload[8 : 8 + 2 * layout.params].view(np.uint16)
    words[:] = rng.integers(0, 0x7F00, words.size)
    encoded = Encoded(payload=payload.data, codec=make.name, codec_version=make.version, level=0)
    out, expected = torch.empty(spec.raw_bytes, dtype=torch.uint8, device=DEVICE), np.empty(spec.raw_bytes, np.uint8)
    fast.decode(payload.data, header(encoded, spec, False), out)
    plain.decode(payload.data, header(encoded, spec, False), expected)
    assert np.array_equal(out.cpu().numpy(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("calibrated", [False, True])
def test_klt_transforms_tensors_as_it_does_arrays(calibrated: bool, dtype: str) -> None:
    """The same payload, with outliers and NaN, with and without exact tokens."""
    for tokens, first, level in ((37, 300, 4), (9, 2, 7), (3, 0, 1)):
        spec = ChunkSpec(dtype=dtype, shape=(LAYERS, 2, HEADS, tokens, DIM), first_token=first)
        values = to_float(kv_like(spec, tokens), dtype).reshape(spec.shape)
        if tokens > 20:
            values[0, 1, 0, 11, 3], values[1, 0, 1, 17, 5] = np.nan, 3e4
        coded = from_float(values, dtype)
        codec = KltCodec(level, LEARNT if calibrated else None)
        mine, judge = codec.encode(torch.tensor(coded, device=DEVICE), spec), codec.encode(coded, spec)
        assert bytes(mine.payload) == bytes(judge.payload) and mine.tables == judge.tables, spec
