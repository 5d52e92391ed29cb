"""The promises of every codec, as tests: subclass CodecSuite and give it a factory.

    class TestMyCodec(CodecSuite):
        def codec(self) -> Codec:
            return MyCodec(level=2)

        def bound(self, values, spec):        # lossy codecs: largest absolute error allowed, per value
            ...

Run by pytest; needs nothing but the package and numpy. As long as the contract: authors subclass one class.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pdxfer.codec.base import ITEM_BYTES, Bytes, ChunkSpec, Codec
from pdxfer.codec.frame import HEADER_BYTES, FrameError, FrameHeader, open_frame
from pdxfer.codec.registry import Codecs, decode_frame, decode_frames, encode_frame, encode_frames
from pdxfer.codec.values import from_float, to_float

KEY, IDENTITY = bytes(range(32)), bytes(range(16))
FLOATS = ("bfloat16", "float16", "float32")
REWRITE_GOLDEN = "PDXFER_REWRITE_GOLDEN"
"""Environment variable: write golden files anew instead of comparing. Only together with a new codec version."""


def kv_like(spec: ChunkSpec, seed: int = 0) -> Bytes:
    """Values shaped like KV: a mean and a spread a channel, neighbours alike, a few wide channels."""
    rng = np.random.default_rng(seed)
    if spec.dtype not in FLOATS:
        return rng.integers(0, 256, spec.raw_bytes, dtype=np.uint8)
    layers, _, heads, tokens, dim = spec.shape
    spread = np.exp(rng.normal(0.0, 0.8, (layers, 2, heads, 1, dim)))
    mean = rng.normal(0.0, 1.0, (layers, 2, heads, 1, dim)) * spread
    noise = rng.normal(0.0, 1.0, spec.shape)
    values = mean + spread * (noise + 0.5 * np.roll(noise, 1, axis=3))
    return from_float(values.astype(np.float32), spec.dtype)


class CodecSuite:
    """What every codec keeps."""

    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    """Those the codec is for."""
    golden_dir: Path | None = None
    """Where stored frames of earlier versions lie; None: not tested."""
    golden_encoding = True
    """Encoders of all times give the same bytes; False where another library makes them."""
    max_overhead_bytes = 64
    """A payload is never longer than the values by more than this."""

    def codec(self) -> Codec:
        """The codec under test; called often."""
        raise NotImplementedError

    def codecs(self) -> Codecs:
        """Decoders for its frames; overridden by codecs with tables."""
        return Codecs()

    def bound(self, values: npt.NDArray[np.float32], spec: ChunkSpec) -> npt.NDArray[np.floating[Any]]:
        """Largest absolute error of each value, broadcastable to `spec.shape`. Lossy codecs only."""
        raise NotImplementedError

    # ---- helpers ---------------------------------------------------------------------------------------------------

    def frame(self, values: Bytes, spec: ChunkSpec) -> bytes:
        """One whole frame."""
        return b"".join(encode_frame(values, spec, self.codec(), KEY, IDENTITY, spec.shape[3]))

    def roundtrip(self, values: Bytes, spec: ChunkSpec) -> Bytes:
        """What comes back; bytes around the destination stay untouched."""
        guarded = np.full(values.nbytes + 128, 0xA5, dtype=np.uint8)
        out = guarded[64:-64]
        decode_frame(memoryview(self.frame(values, spec)), KEY, IDENTITY, out, self.codecs())
        assert (guarded[:64] == 0xA5).all() and (guarded[-64:] == 0xA5).all(), "decode wrote outside its destination"
        return out

    def check(self, values: Bytes, spec: ChunkSpec) -> None:
        """The roundtrip is exact, or within the bound with the context's first tokens exact."""
        before = values.copy()
        out = self.roundtrip(values, spec)
        assert np.array_equal(values, before), "encode changed its input"
        if self.codec().lossless:
            assert np.array_equal(out, values)
            return
        exact = spec.exact_tokens
        item = ITEM_BYTES[spec.dtype]
        shape = (*spec.shape[:4], spec.shape[4] * item)
        assert np.array_equal(out.reshape(shape)[..., :exact, :], values.reshape(shape)[..., :exact, :])
        was, now = to_float(values, spec.dtype).reshape(spec.shape), to_float(out, spec.dtype).reshape(spec.shape)
        odd = ~np.isfinite(was)
        if odd.any():
            assert np.array_equal(np.isnan(was), np.isnan(now)) and np.array_equal(np.isinf(was), np.isinf(now))
        allowed = np.broadcast_to(self.bound(was, spec), spec.shape)
        error = np.abs(np.where(odd, 0, now).astype(np.float64) - np.where(odd, 0, was))
        worst = np.unravel_index(np.argmax(error - allowed), spec.shape)
        assert (error <= allowed).all(), f"{was[worst]} became {now[worst]}, allowed {allowed[worst]}, at {worst}"

    def specs(self) -> list[ChunkSpec]:
        """Whole chunks, partial chunks and odd shapes, at the start and in the middle of a context."""
        shapes = [(2, 2, 3, 64, 64), (1, 2, 1, 16, 128), (3, 2, 2, 5, 64), (1, 2, 1, 1, 8), (2, 2, 1, 33, 17)]
        return [
            ChunkSpec(dtype=dtype, shape=shape, first_token=first)
            for dtype in self.dtypes
            for shape in shapes
            for first in (0, 2, 256)
        ]

    # ---- values ----------------------------------------------------------------------------------------------------

    def test_values_come_back_within_the_bound_in_every_shape(self) -> None:
        """Exact for lossless codecs; within the stated bound, sinks exact, for the others."""
        for seed, spec in enumerate(self.specs()):
            self.check(kv_like(spec, seed), spec)

    def test_values_that_are_no_ordinary_numbers_come_back(self) -> None:
        """Zeros, denormals, the largest numbers, infinities and NaN, alone and among others."""
        for dtype in filter(FLOATS.__contains__, self.dtypes):
            spec = ChunkSpec(dtype=dtype, shape=(1, 2, 2, 40, 32), first_token=256)
            base = to_float(kv_like(spec, 5), dtype).reshape(spec.shape)
            largest = 65504.0 if dtype == "float16" else 3.3e38
            tiny = 6e-8 if dtype == "float16" else 1e-40
            for odd in (0.0, -0.0, tiny, -tiny, largest, -largest, np.inf, -np.inf, np.nan):
                lone = base.copy()
                lone[0, :, 1, 7, 3] = odd
                self.check(from_float(lone, dtype), spec)
                self.check(from_float(np.full(spec.shape, odd, dtype=np.float32), dtype), spec)

    def test_any_bit_pattern_comes_back(self) -> None:
        """Bytes drawn at random, as a foreign or broken model would leave them."""
        for seed, dtype in enumerate(self.dtypes):
            spec = ChunkSpec(dtype=dtype, shape=(1, 2, 2, 32, 64), first_token=256)
            self.check(np.random.default_rng(seed).integers(0, 256, spec.raw_bytes, dtype=np.uint8), spec)

    def test_incompressible_values_cost_their_own_size_at_most(self) -> None:
        """Random bits: the payload is the values and a few bytes."""
        for seed, dtype in enumerate(self.dtypes):
            spec = ChunkSpec(dtype=dtype, shape=(1, 2, 2, 64, 64), first_token=0)
            values = np.random.default_rng(seed).integers(0, 256, spec.raw_bytes, dtype=np.uint8)
            assert len(self.frame(values, spec)) <= spec.raw_bytes + HEADER_BYTES + self.max_overhead_bytes

    # ---- frames ----------------------------------------------------------------------------------------------------

    def test_the_same_values_give_the_same_frame(self) -> None:
        """From two codecs: nothing random, nothing of the process, is in a frame."""
        for spec in self.specs():
            values = kv_like(spec)
            assert self.frame(values, spec) == self.frame(values.copy(), spec)

    def test_the_frame_says_what_it_holds(self) -> None:
        """Codec, version, dtype, shape, lengths."""
        spec = self.specs()[0]
        frame = self.frame(kv_like(spec), spec)
        header, payload = open_frame(memoryview(frame), KEY, IDENTITY)
        codec = self.codec()
        assert header.codec == codec.name and len(codec.name) <= 12 and codec.name.isascii()
        assert header.opaque == codec.opaque and (codec.opaque or header.shape == spec.shape)
        assert header.raw_bytes == spec.raw_bytes and header.payload_bytes == len(payload) == len(frame) - HEADER_BYTES

    def test_many_threads_get_what_one_gets(self) -> None:
        """Batches in four threads on one codec object: each result as alone, each error its own."""
        spec = self.specs()[0]
        chunks = [kv_like(spec, seed) for seed in range(8)]
        keys = [bytes([i]) * 32 for i in range(8)]
        with ThreadPoolExecutor(4) as executor:
            parts = encode_frames(
                [(v, spec, k, spec.shape[3]) for v, k in zip(chunks, keys, strict=True)],
                self.codec(), IDENTITY, executor,
            )  # fmt: skip
            frames = [b"".join(p) for p in parts]
            alone = [
                b"".join(encode_frame(v, spec, self.codec(), k, IDENTITY, spec.shape[3]))
                for v, k in zip(chunks, keys, strict=True)
            ]
            assert frames == alone
            frames[3] = frames[3][:-1]
            outs = [np.empty(spec.raw_bytes, dtype=np.uint8) for _ in frames]
            jobs = [(memoryview(f), k, o) for f, k, o in zip(frames, keys, outs, strict=True)]
            results = decode_frames(jobs, IDENTITY, self.codecs(), executor)
        assert [isinstance(r, FrameError) for r in results] == [i == 3 for i in range(8)]
        for i in (0, 1, 2, 4, 5, 6, 7):
            single = np.empty(spec.raw_bytes, dtype=np.uint8)
            decode_frame(memoryview(frames[i]), keys[i], IDENTITY, single, self.codecs())
            assert np.array_equal(single, outs[i])

    def test_stored_frames_of_this_version_stay_readable(self) -> None:
        """Golden bytes: the frame made today is the frame made then, and decodes to what it decoded to then."""
        if self.golden_dir is None:
            return
        for dtype in self.dtypes:
            spec = ChunkSpec(dtype=dtype, shape=(2, 2, 2, 37, 32), first_token=0)
            values = golden_values(spec)
            frame = self.frame(values, spec)
            out = np.empty(spec.raw_bytes, dtype=np.uint8)
            codec = self.codec()
            encoded = codec.encode(values, spec)
            name = f"{codec.name}-{encoded.codec_version}-{encoded.level}-{dtype}.bin"
            path = self.golden_dir / name
            if os.environ.get(REWRITE_GOLDEN):
                decode_frame(memoryview(frame), KEY, IDENTITY, out, self.codecs())
                path.write_bytes(frame + hashlib.sha256(out.tobytes()).digest())
            stored = path.read_bytes()
            decode_frame(memoryview(stored[:-32]), KEY, IDENTITY, out, self.codecs())
            assert hashlib.sha256(out.tobytes()).digest() == stored[-32:], f"{name} decodes to something else"
            assert not self.golden_encoding or frame == stored[:-32], (
                f"{name}: frames changed without a new codec version"
            )

    # ---- hostile input ---------------------------------------------------------------------------------------------

    def decode_payload(self, payload: bytes, header: FrameHeader, room: int) -> bool:
        """Decode bytes that no encoder made (checksums are no protection against an author): True if it was taken.

        FrameError is the only exception allowed, and nothing outside the destination may change.
        """
        guarded = np.full(room + 256, 0x5A, dtype=np.uint8)
        try:
            self.codecs().of(header).decode(memoryview(payload), header, guarded[128:-128])
            taken = True
        except FrameError:
            taken = False
        assert (guarded[:128] == 0x5A).all() and (guarded[-128:] == 0x5A).all(), "decode wrote out of bounds"
        return taken

    def test_hostile_payloads_are_refused_or_decode_to_some_values(self) -> None:
        """Bits flipped, bytes cut off, added, replaced; header fields that lie: FrameError or some values."""
        rng = np.random.default_rng(11)
        for spec in self.specs()[:: max(1, len(self.specs()) // 12)]:
            frame = self.frame(kv_like(spec), spec)
            header, payload = open_frame(memoryview(frame), KEY, IDENTITY)
            for _ in range(40):
                self.decode_payload(*mutate(rng, bytes(payload), header))

    def test_a_frame_with_a_wrong_fact_is_refused(self) -> None:
        """Cut, longer, another key, identity, a flipped bit anywhere: FrameError."""
        spec = self.specs()[0]
        frame = self.frame(kv_like(spec), spec)
        out = np.empty(spec.raw_bytes, dtype=np.uint8)
        rng = np.random.default_rng(12)
        flipped = []
        for at in rng.integers(0, len(frame), 50).tolist():
            damaged = bytearray(frame)
            damaged[at] ^= 1 << int(rng.integers(8))
            flipped.append(bytes(damaged))
        for bad in (frame[:-1], frame + b"\0", frame[:HEADER_BYTES], frame[:10], b"", *flipped):
            with pytest.raises(FrameError):
                decode_frame(memoryview(bad), KEY, IDENTITY, out, self.codecs())
        with pytest.raises(FrameError):
            decode_frame(memoryview(frame), KEY[::-1], IDENTITY, out, self.codecs())
        with pytest.raises(FrameError):
            decode_frame(memoryview(frame), KEY, IDENTITY[::-1], out, self.codecs())
        with pytest.raises(FrameError):
            decode_frame(memoryview(frame), KEY, IDENTITY, out[:-1], self.codecs())


def golden_values(spec: ChunkSpec) -> Bytes:
    """Values that do not depend on numpy's generators: a sum of sines on a grid of exact binary fractions."""
    count = int(np.prod(spec.shape))
    if spec.dtype not in FLOATS:
        return (np.arange(spec.raw_bytes) * 31 % 251).astype(np.uint8)
    index = np.arange(count, dtype=np.int64)
    mixed = (index * 2654435761 + (index >> 7) * 40503) % 65536
    values = (mixed.astype(np.float32) - 32768.0) / 16384.0
    return from_float(values.reshape(spec.shape) * np.float32(0.75), spec.dtype)


def mutate(rng: np.random.Generator, payload: bytes, header: FrameHeader) -> tuple[bytes, FrameHeader, int]:
    """A hostile variant: payload, header, and the size of the destination the reader would have."""
    from dataclasses import replace

    body = bytearray(payload)
    kind = int(rng.integers(7))
    if kind == 0:
        for at in rng.integers(0, len(body), int(rng.integers(1, 9))).tolist() if body else []:
            body[at] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        del body[int(rng.integers(0, len(body) + 1)) :]
    elif kind == 2:
        body += rng.bytes(int(rng.integers(1, 64)))
    elif kind == 3:
        start = int(rng.integers(0, len(body) + 1))
        size = int(rng.integers(0, 64))
        body[start : start + size] = rng.bytes(size)
    elif kind == 4:
        body[: min(16, len(body))] = rng.bytes(min(16, len(body)))
    elif kind == 5:
        shape = list(header.shape)
        shape[int(rng.integers(5))] = int(rng.choice([0, 1, 3, 7, 2**16, 2**31, 2**32 - 1]))
        header = replace(header, shape=(shape[0], shape[1], shape[2], shape[3], shape[4]))
    else:
        wrong: dict[str, Any] = {
            "dtype": str(rng.choice(["opaque", "bfloat16", "float16", "float32", "float8_e4m3"])),
            "level": int(rng.integers(0, 256)),
            "codec_version": int(rng.integers(0, 4)),
            "num_tokens": int(rng.integers(0, 2**32)),
        }
        name = str(rng.choice(list(wrong)))
        header = replace(header, **{name: wrong[name]})
    return bytes(body), header, header.raw_bytes
