"""Codec klt: the suite without tables, in C and numba, with calibrated tables; equal bits everywhere; bad tables."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from codec_bounds import rounding
from codec_levels import KINDS, use

from pdxfer.codec import planes
from pdxfer.codec.base import Bytes, ChunkSpec, Codec
from pdxfer.codec.calibrate import Moments, make_klt
from pdxfer.codec.frame import FrameError
from pdxfer.codec.klt import STEPS, KltCodec, _grades, _groups, _steps
from pdxfer.codec.klt_payload import Plan
from pdxfer.codec.klt_tables import Model
from pdxfer.codec.pieces import kernel_view
from pdxfer.codec.registry import Codecs, decode_frame, encode_frame
from pdxfer.codec.tables import MemoryTables, TableFile, TablesError
from pdxfer.codec.values import from_float, to_float
from pdxfer.core.errors import ConfigError
from pdxfer.testing.codec_suite import IDENTITY, KEY, CodecSuite, golden_values, kv_like

GOLDEN = Path(__file__).parent / "golden"
LAYERS, HEADS, DIM = 2, 2, 32


def waves(dim: int = DIM) -> npt.NDArray[np.float64]:
    """RoPE's, theta 10,000."""
    return 10000.0 ** (-np.arange(0, dim, 2) / dim)


def learnt(
    tokens: int = 400, layers: int = LAYERS, heads: int = HEADS, dim: int = DIM, rope: bool = True, num_ranks: int = 1
) -> TableFile:
    """Tables from synthetic KV and gradients."""
    spec = ChunkSpec(dtype="float32", shape=(layers, 2, heads, tokens, dim), first_token=4)
    moments = Moments((layers, 2, heads, dim), waves(dim) if rope else np.zeros(0), num_ranks)
    moments.add_values(to_float(kv_like(spec, 1), "float32").reshape(spec.shape), 4)
    moments.add_gradients(to_float(kv_like(spec, 2), "float32").reshape(spec.shape), 4, 100)
    found = moments.result()
    spread = np.sqrt(np.einsum("pcc->pc", found.covariance) * found.weight).mean()
    return make_klt(found, {level: 0.15 * 1.5**level * spread for level in STEPS}, {"model": "synthetic"})


LEARNT = MemoryTables(learnt())


class TestUncalibrated(CodecSuite):
    """No tables: half a step of the plane's rms around each value."""

    golden_dir = GOLDEN
    golden_encoding = False  # zlib, in another version, may deflate the frequency tables to other bytes

    def codec(self) -> Codec:
        return KltCodec()

    def bound(self, values: npt.NDArray[np.float32], spec: ChunkSpec) -> npt.NDArray[np.floating]:
        plan = Plan(spec=spec, groups=_groups(spec))
        view = kernel_view(from_float(values, spec.dtype), spec.dtype, plan.shape)
        mean, deviation = planes.stats(view, plan.window)
        step = _steps(mean, deviation, STEPS[4] * _grades(plan)).astype(np.float64)
        largest = np.abs(np.where(np.isfinite(values), values, 0)).reshape(*plan.shape).max((1, 2, 3))
        per_plane = step * 0.502 + rounding(np.minimum(largest, 8000 * step) * 1.1, spec.dtype)
        return np.broadcast_to(per_plane[:, None, None, None], plan.shape).reshape(spec.shape)


@pytest.mark.slow
class TestUncalibratedInNumba(TestUncalibrated):
    """The same without the C library: the same golden frames too."""

    def codec(self) -> Codec:
        return KltCodec(native=False)


class TestCalibrated(CodecSuite):
    """With tables; the error of a value has no bound but of what it costs, so only exactness is asked here."""

    def codec(self) -> Codec:
        return KltCodec(0, LEARNT)

    def codecs(self) -> Codecs:
        return Codecs(LEARNT)

    def specs(self) -> list[ChunkSpec]:
        return [
            ChunkSpec(dtype=dtype, shape=(LAYERS, 2, HEADS, tokens, DIM), first_token=first)
            for dtype in self.dtypes
            for tokens in (1, 5, 33, 64, 70)
            for first in (0, 2, 256)
        ]

    def bound(self, values: npt.NDArray[np.float32], spec: ChunkSpec) -> npt.NDArray[np.floating]:
        return np.full(spec.shape, np.inf)


def coded(codec: KltCodec, values: Bytes, spec: ChunkSpec, decoder: KltCodec | None = None) -> tuple[bytes, Bytes]:
    """Frame, and what it decodes to."""
    frame = b"".join(encode_frame(values, spec, codec, KEY, IDENTITY, spec.shape[3]))
    out = np.empty(values.nbytes, np.uint8)
    reader = Codecs()
    reader._made["klt", codec.level] = decoder or codec
    decode_frame(memoryview(frame), KEY, IDENTITY, out, reader)
    return frame, out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_frames_and_values_are_the_same_everywhere(kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C at every instruction set and numba, with and without tables: equal payloads, equal values."""
    for tokens, first in ((64, 0), (70, 300), (9, 2), (3, 0)):
        spec = ChunkSpec(dtype=dtype, shape=(LAYERS, 2, HEADS, tokens, DIM), first_token=first)
        values = kv_like(spec, tokens)
        if tokens > 20:
            to_float_view = to_float(values, dtype).reshape(spec.shape)
            to_float_view[0, 1, 0, 11, 3], to_float_view[1, 0, 1, 17, 5] = np.nan, 3e4
            values = from_float(to_float_view, dtype)
        for level in (1, 4, 7):
            for tables in (None, LEARNT):
                expected = coded(KltCodec(level, tables), values, spec)
                with monkeypatch.context() as patch:
                    if not use(kind, patch):
                        pytest.skip(f"this CPU has no x86-64-{kind}")
                    found = coded(KltCodec(level, tables), values, spec)
                assert found[0] == expected[0] and np.array_equal(found[1], expected[1])


def test_the_transform_costs_what_its_step_says() -> None:
    """On KV like the calibration text's, a finer level is larger and nearer, and tables make it smaller."""
    spec = ChunkSpec(dtype="bfloat16", shape=(LAYERS, 2, HEADS, 256, DIM), first_token=512)
    values = kv_like(spec, 1)
    exact = to_float(values, spec.dtype)
    sizes, errors = [], []
    for level in sorted(STEPS):
        frame, out = coded(KltCodec(level, LEARNT), values, spec)
        sizes.append(len(frame))
        errors.append(float(np.square(to_float(out, spec.dtype) - exact).mean()))
    assert sizes == sorted(sizes, reverse=True) and errors == sorted(errors)
    assert sizes[0] < values.nbytes * 0.8 and errors[0] < 0.05 * float(exact.var())


def test_reference_in_plain_numpy_agrees_with_the_kernels() -> None:
    """The transform as a formula: RoPE off, matrix, round; and back. Within float rounding of the kernels."""
    model = Model(TableFile.from_bytes(LEARNT.current("klt", 4) or b"", "klt"))
    by = model.levels[4].transform
    spec = ChunkSpec(dtype="float32", shape=(LAYERS, 2, HEADS, 48, DIM), first_token=100)
    x = kernel_view(kv_like(spec, 3), spec.dtype, (LAYERS * 2, HEADS, 48, DIM))
    window = planes.Window(skip=0, tokens=48)
    turns = model.angles(100, 48)
    sym, shifts, escaped = planes.forward(x, window, by, turns)
    rows = np.concatenate([[0], np.cumsum(by.kept)])
    half = DIM // 2
    cosine, sine = turns[:, :half].astype(np.float64), turns[:, half:].astype(np.float64)
    for p in range(len(x)):
        y = x[p].astype(np.float64)
        if by.turned[p]:
            a, b = y[..., :half], y[..., half:]
            y = np.concatenate([a * cosine + b * sine, b * cosine - a * sine], -1)
        flat = y.transpose(1, 0, 2).reshape(48, -1)
        whole = np.rint((flat - by.mean[p]) * by.in_scale[p])
        used = int(by.kept[p])
        coefficients = (whole @ by.forward_plain[p])[:, :used] * by.out_scale[p, :used]
        near = coefficients - shifts[rows[p] : rows[p + 1]] / 8
        fits = escaped[p] == 0
        difference = np.abs(sym[rows[p] : rows[p + 1]].T[fits].astype(np.float64) - 128 - near[fits])
        assert fits.any() and difference.max() < 0.51


def test_a_frame_finds_its_tables_by_digest() -> None:
    """Tables made anew do not make old frames unreadable; without the tables a frame is a miss."""
    spec = ChunkSpec(dtype="bfloat16", shape=(LAYERS, 2, HEADS, 32, DIM), first_token=256)
    values = kv_like(spec, 5)
    old, new = learnt(), learnt(tokens=500)
    before = KltCodec(4, MemoryTables(old))
    _, expected = coded(before, values, spec)
    _, out = coded(before, values, spec, KltCodec(4, MemoryTables(old, new)))
    assert np.array_equal(out, expected)
    for reader in (KltCodec(4), KltCodec(4, MemoryTables(new))):
        with pytest.raises(FrameError, match="are not here"):
            coded(before, values, spec, reader)
    small = ChunkSpec(dtype="bfloat16", shape=(1, 2, HEADS, 32, DIM), first_token=256)
    assert before.encode(kv_like(small), small).tables == bytes(16), "of another shape: without tables"


def test_tables_that_would_overflow_are_refused() -> None:
    """The kernels rely on bounds: weights, classes, sizes, RoPE dims."""
    good = learnt()
    Model(good)
    forward = np.full_like(good.arrays["forward"], 32767)
    for name, bad in (
        ("forward", forward), ("inverse", np.full_like(good.arrays["inverse"], -32768)),
        ("classes", good.arrays["classes"] + 40), ("kept", good.arrays["kept"] + 1000),
        ("mean", good.arrays["mean"][:1]), ("scale", good.arrays["scale"].astype(np.int16)),
    ):  # fmt: skip
        with pytest.raises(TablesError):
            Model(TableFile("klt", good.facts, {**good.arrays, name: bad}))
    for fact, value in (("shape", [2, 2, 2]), ("groups", 0), ("inverse_wavelengths", [1.0] * 40), ("steps", {"x": 1})):
        with pytest.raises(TablesError):
            Model(TableFile("klt", {**good.facts, fact: value}, good.arrays))
    with pytest.raises(ConfigError, match="calibrate again"):
        KltCodec(0, MemoryTables(TableFile("klt", {}, {})))


def test_settings_that_are_none_are_refused() -> None:
    """Levels and dtypes."""
    with pytest.raises(ConfigError, match="levels 1"):
        KltCodec(9)
    spec = ChunkSpec(dtype="float8_e4m3", shape=(1, 2, 1, 8, 16), first_token=0)
    with pytest.raises(ConfigError, match="use raw, lossless or zstd"):
        KltCodec().encode(np.zeros(spec.raw_bytes, np.uint8), spec)
    assert replace(spec, dtype="bfloat16").exact_tokens == 4


def test_models_without_rope_and_with_many_heads() -> None:
    """Wide models are split into groups of heads; no wavelengths: nothing is turned."""
    tables = MemoryTables(learnt(tokens=600, layers=1, heads=8, dim=64, rope=False))
    model = Model(TableFile.from_bytes(tables.current("klt", 4) or b"", "klt"))
    assert model.groups == 2 and not model.levels[4].transform.turned.any()
    spec = ChunkSpec(dtype="bfloat16", shape=(1, 2, 8, 64, 64), first_token=64)
    values = kv_like(spec, 1)
    for codec in (KltCodec(4, tables), KltCodec(4, tables, native=False), KltCodec(4)):
        _, out = coded(codec, values, spec)
        error = to_float(out, spec.dtype) - to_float(values, spec.dtype)
        assert float(np.square(error).mean()) < 0.2 * float(to_float(values, spec.dtype).var())


@pytest.mark.full
def test_hostile_payloads_by_the_thousand() -> None:
    """20,000 mutated payloads, with and without tables: FrameError or values, never a write outside."""
    from pdxfer.codec.frame import open_frame
    from pdxfer.testing.codec_suite import mutate

    rng = np.random.default_rng(9)
    for suite in (TestUncalibrated(), TestCalibrated(), TestUncalibratedInNumba()):
        spec = ChunkSpec(dtype="bfloat16", shape=(LAYERS, 2, HEADS, 70, DIM), first_token=0)
        frame = suite.frame(golden_values(spec), spec)
        header, payload = open_frame(memoryview(frame), KEY, IDENTITY)
        for _ in range(7000):
            suite.decode_payload(*mutate(rng, bytes(payload), header))
