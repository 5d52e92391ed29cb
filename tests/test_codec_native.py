"""C at every instruction set, numba and numpy give the same bits; the library is there, current and optional."""

import ctypes
import logging
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest

from pdxfer.codec import native
from pdxfer.codec.base import ChunkSpec, Encoded
from pdxfer.codec.fp8 import Fp8Codec
from pdxfer.codec.frame import FrameHeader
from pdxfer.codec.int4 import Int4Codec
from pdxfer.codec.int8 import Int8Codec
from pdxfer.codec.kernels import Kernels
from pdxfer.codec.kernels.native import NativeKernels
from pdxfer.codec.kernels.reference import ReferenceKernels
from pdxfer.codec.lossless import LosslessCodec
from pdxfer.codec.native import build
from pdxfer.testing.codec_suite import kv_like

CODECS = (Int8Codec, Fp8Codec, Int4Codec, LosslessCodec)
DTYPES = ("bfloat16", "float16", "float32")
SHAPES = [(2, 2, 3, 70, 64), (1, 2, 2, 40, 128), (1, 2, 1, 33, 17), (2, 2, 1, 5, 80), (1, 2, 1, 1, 1), (1, 2, 1, 3, 0)]


def kernels(kind: str) -> Kernels:
    """`numba` or `v1`, `v3`, `v4`."""
    if kind == "numba":
        from pdxfer.codec.kernels.jit import JitKernels

        return JitKernels()
    library = native.library(int(kind[1:]))
    if library is None:
        pytest.skip(f"this CPU has no x86-64-{kind}")
    return NativeKernels(library)


def inputs(dtype: str) -> list[tuple[np.ndarray, ChunkSpec]]:
    """KV-like values, random bits, and values of all magnitudes with zeros, in all shapes."""
    found = []
    for seed, shape in enumerate(SHAPES):
        spec = ChunkSpec(dtype=dtype, shape=shape, first_token=256 if seed % 2 else 2)
        rng = np.random.default_rng(seed)
        found.append((kv_like(spec, seed), spec))
        found.append((rng.integers(0, 256, spec.raw_bytes, dtype=np.uint8), spec))
        zeros = kv_like(spec, seed)
        zeros[rng.random(zeros.size) < 0.3] = 0
        found.append((zeros, spec))
    return found


def header(encoded: Encoded, spec: ChunkSpec, opaque: bool) -> FrameHeader:
    """What a frame of it would say."""
    return FrameHeader(
        codec=encoded.codec,
        codec_version=encoded.codec_version,
        dtype=spec.dtype,
        shape=(0, 0, 0, 0, 0) if opaque else spec.shape,
        num_tokens=spec.shape[3],
        raw_bytes=spec.raw_bytes,
        payload_bytes=len(encoded.payload),
        identity=bytes(16),
        key=bytes(32),
        payload_xxh3=0,
    )


@pytest.mark.parametrize("kind", ["v4", "v3", "v1", pytest.param("numba", marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", CODECS)
def test_fast_loops_give_the_bits_of_the_numpy_ones(make: type, kind: str) -> None:
    """Encoded by each, decoded by the other: the same payload, the same values."""
    fast, plain = make(kernels=kernels(kind)), make(kernels=ReferenceKernels())
    for dtype in DTYPES:
        for values, spec in inputs(dtype):
            mine, judge = fast.encode(values, spec), plain.encode(values, spec)
            assert bytes(mine.payload) == bytes(judge.payload), (spec, kind)
            outs = [np.empty_like(values) for _ in range(2)]
            for codec, out in zip((fast, plain), outs, strict=True):
                codec.decode(memoryview(mine.payload), header(mine, spec, codec.opaque), out)
            assert np.array_equal(*outs), (spec, kind)


@pytest.mark.parametrize("kind", ["v4", "v3", "v1", pytest.param("numba", marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [Int8Codec, Fp8Codec, Int4Codec])
def test_hostile_codes_decode_to_the_same_values_everywhere(make: type, kind: str) -> None:
    """Codes and finite parameters no encoder writes, with results that overflow and underflow."""
    fast, plain = make(kernels=kernels(kind)), make(kernels=ReferenceKernels())
    rng = np.random.default_rng(8)
    for dtype in DTYPES:
        spec = ChunkSpec(dtype=dtype, shape=(1, 2, 2, 37, 48), first_token=256)
        payload = np.array(bytearray(plain.encode(kv_like(spec), spec).payload), dtype=np.uint8)
        layout = plain.layout(spec.shape)
        payload[8:] = rng.integers(0, 256, payload.size - 8, dtype=np.uint8)
        words = payload[8 : 8 + 2 * layout.params].view(np.uint16)
        words[:] = rng.integers(0, 0x7F00, words.size)
        outs = [np.empty(spec.raw_bytes, dtype=np.uint8) for _ in range(2)]
        encoded = Encoded(payload=payload.data, codec=make.name, codec_version=make.version, level=0)
        for codec, out in zip((fast, plain), outs, strict=True):
            codec.decode(payload.data, header(encoded, spec, False), out)
        assert np.array_equal(*outs)


def test_the_library_is_built_here_and_carries_the_digest_of_its_sources() -> None:
    """An editable installation has it; whoever changes a C file is told to build again."""
    library = native.library()
    assert library is not None, f"not built; {native.REBUILD}"
    loaded = ctypes.CDLL(str(build.HERE / build.LIBRARY))
    loaded.pdx_digest_v1.restype = ctypes.c_char_p
    assert loaded.pdx_digest_v1().decode() == build.digest()


def test_a_library_of_other_sources_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Stale, damaged or missing: one warning each that says what to do, and no library."""
    for name in ("stale", "damaged", "missing"):
        (tmp_path / name).mkdir()
    shutil.copy(build.HERE / build.LIBRARY, tmp_path / "stale")
    (tmp_path / "damaged" / build.LIBRARY).write_bytes(b"no library")
    monkeypatch.setattr(build, "digest", lambda: "0" * 32)
    with caplog.at_level(logging.WARNING):
        for name in ("stale", "damaged", "missing"):
            monkeypatch.setattr(build, "HERE", tmp_path / name)
            assert native.library.__wrapped__() is None
    assert [("other sources" in m, "not load" in m, "not there" in m) for m in caplog.messages] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]
    assert all(native.REBUILD in m for m in caplog.messages)


def test_without_a_compiler_building_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And nothing is left behind."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(RuntimeError, match="no C compiler"):
        build.build(tmp_path / "x.so")
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its own words are in the error."""
    monkeypatch.setattr(build, "sources", lambda: [tmp_path / "broken.c"])
    (tmp_path / "broken.c").write_text("this is no C\n")
    with pytest.raises(RuntimeError, match="broken.c"):
        build.build(tmp_path / "x.so")
    assert not (tmp_path / "x.so").exists()


def test_an_array_lives_as_long_as_its_pointer() -> None:
    """A temporary of the call must not be another thread's memory before C has read it."""
    array = np.arange(8)
    lives, address = weakref.ref(array), native.pointer(array)
    assert address.value == array.ctypes.data
    del array
    assert lives() is not None
    del address
    assert lives() is None
