"""Codec `klt`: decorrelate, quantise uniformly, entropy code. Needs nothing; gets a lot better with tables.

Without tables: each channel's mean over the chunk is taken off, one step per plane (layer and K or V, some heads), a
part of its rms; rANS with frequency tables shared by channels of like spread. Knows nothing about the model.
With tables of `pdxfer codec calibrate`: RoPE off K, then per plane a transform learnt from calibration text, in which
one step serves all planes: each channel is scaled by how much the model's output depends on it.

Exact in both: the first 4 tokens of a context, and any token of a plane that does not fit (outliers, inf, NaN).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdxfer.codec import planes, rans
from pdxfer.codec.base import Bytes, ChunkSpec, Encoded, Tables, check_shape, check_version
from pdxfer.codec.frame import FrameError, FrameHeader
from pdxfer.codec.klt_payload import TRANSFORM, UNIFORM, Exact, Plan, Side
from pdxfer.codec.klt_tables import NAME, NUM_CLASSES, Level, Model, classes, streams
from pdxfer.codec.pieces import (
    RAW,
    Pieces,
    check_dtype,
    items,
    kernel_view,
    numbers,
    pack_tables,
    scratch_view,
    settle,
    smaller,
)
from pdxfer.codec.planes import MAX_CHANNELS, NO_ANGLES, NO_SHIFTS, SHIFT_LIMIT, Floats, Shifts, Uniform
from pdxfer.codec.tables import TableFile, TablesError
from pdxfer.core.errors import ConfigError

VERSION = 1
"""1: first (2026-11-29)."""
STEPS = {1: 0.1, 2: 0.15, 3: 0.2, 4: 0.25, 5: 0.35, 6: 0.5, 7: 0.7}
"""Level → step of planes without tables, in rms of the plane."""
V_GRADE = (0.6, 1.6)
"""Factor on that for V in the first and the last layer, geometric between: early layers' values matter more. Found on
one small model; worth 3 % there."""
DEFAULT_LEVEL = 4
MAX_MEAN_STEPS = 3900
"""What 16 bits of eighths hold."""
NO_TABLES = bytes(16)


class KltCodec:
    """See the module. Any thread: its tables are only read."""

    name = NAME
    lossless = False
    opaque = False

    def __init__(self, level: int = 0, tables: Tables | None = None, *, native: bool = True) -> None:
        """`native`: use the C library where it is there. Raises ConfigError for a level that is none, or for damaged
        tables."""
        if level and level not in STEPS:
            raise ConfigError(f"klt has levels {min(STEPS)} (finest) to {max(STEPS)}, not {level}")
        self.level = level or DEFAULT_LEVEL
        self._native = native
        self._tables = tables
        current = tables.current(self.name, self.level) if tables else None
        try:
            self._model = Model(TableFile.from_bytes(current, self.name)) if current else None
        except TablesError as error:
            raise ConfigError(f"tables of codec klt cannot be used: {error}; calibrate again") from error
        self._others: dict[bytes, Model] = {}

    def __repr__(self) -> str:
        return f"<KltCodec level={self.level} {self._model or 'uncalibrated'}>"

    def encode(self, values: Bytes, spec: ChunkSpec) -> Encoded:
        """A payload of its own. Raises ConfigError for values that are no floats."""
        check_dtype(self.name, spec.dtype)
        model = self._model if self._model and self._model.fits(spec.shape) else None
        level = model.levels.get(self.level) if model else None
        if model is None or level is None:
            payload, digest = self._encode_uniform(values, Plan(spec=spec, groups=_groups(spec))), NO_TABLES
        else:
            plan = Plan(spec=spec, groups=model.groups)
            payload, digest = self._encode_transform(values, plan, model, level), model.digest
        return Encoded(
            payload=smaller(payload, values), codec=self.name, codec_version=VERSION, level=self.level, tables=digest
        )

    def _encode_uniform(self, values: Bytes, plan: Plan) -> bytes:
        source = kernel_view(values, plan.spec.dtype, plan.shape)
        mean, deviation = planes.stats(source, plan.window, native=self._native)
        step = _steps(mean, deviation, STEPS[self.level] * _grades(plan))
        shifts = np.clip(np.rint(mean * (8 / step[:, None])), -32768, 32767).astype(np.int16)
        kinds = classes(deviation / step[:, None]).reshape(-1)
        sym, escaped = planes.quantise(source, plan.window, _uniform(step, shifts), native=self._native)
        side = Side(shifts=shifts.reshape(-1), classes=kinds, step=step)
        kept = np.full(plan.shape[0], plan.channels)
        return self._payload(UNIFORM, Exact.of(values, plan, escaped), side, sym, kinds.astype(np.uint32), kept)

    def _encode_transform(self, values: Bytes, plan: Plan, model: Model, level: Level) -> bytes:
        source = kernel_view(values, plan.spec.dtype, plan.shape)
        turns = model.angles(plan.spec.first_token + plan.window.skip, plan.window.tokens)
        sym, shifts, escaped = planes.forward(source, plan.window, level.transform, turns, native=self._native)
        exact, side = Exact.of(values, plan, escaped), Side(shifts=shifts)
        return self._payload(TRANSFORM, exact, side, sym, level.table, level.transform.kept)

    def _payload(
        self, mode: int, exact: Exact, side: Side, sym: rans.Symbols, table: rans.Rows, kept: npt.NDArray[np.int64]
    ) -> bytes:
        freq = rans.frequencies(rans.count(sym, table, NUM_CLASSES, native=self._native))
        coded = [rans.encode(sym[rows], table[rows], freq, native=self._native) for rows in _rows(kept)]
        head = numbers(mode, len(coded), len(exact.where), *(words.size for words in coded))
        words = [w.astype("<u2", copy=False).tobytes() for w in coded]
        return b"".join((head, exact.pack(), side.pack(self._native), pack_tables(freq), *words))

    def decode(self, payload: memoryview, header: FrameHeader, out: Bytes) -> None:
        """Into `out`, with no copy between but for float16. Raises FrameError; then `out` is garbage."""
        spec = _checked_spec(header, out)
        pieces = Pieces(payload)
        (mode,) = pieces.numbers(1)
        if mode == RAW:
            out[:] = pieces.array(np.uint8, out.nbytes)
            return pieces.end()
        if mode not in (UNIFORM, TRANSFORM):
            raise FrameError(f"klt payload of mode {mode}")
        num_streams, num_escapes = pieces.numbers(2)
        model, level = self._find(header) if mode == TRANSFORM else (None, None)
        plan = Plan(spec=spec, groups=model.groups if model else _groups(spec))
        num_planes = plan.shape[0]
        parts = list(streams(num_planes))
        if num_streams != len(parts):
            raise FrameError(f"klt payload of {num_streams} streams, its planes have {len(parts)}")
        sizes = pieces.numbers(num_streams)
        whole = items(out, spec.dtype, plan.shape)
        exact = Exact.read(pieces, plan, num_escapes, whole.dtype)
        kept = level.transform.kept if level else np.full(num_planes, plan.channels)
        side = Side.read(pieces, int(kept.sum()), num_planes, mode, self._native)
        table, by, turns = _decoder(side, plan, model, level)
        freq = pieces.tables(NUM_CLASSES)
        target = scratch_view(out, spec.dtype, plan.shape)
        for part, rows, size, each in zip(parts, _rows(kept), sizes, by, strict=True):
            words, shifts = pieces.array("<u2", size), side.shifts[rows] if level else NO_SHIFTS
            planes.decode(words, freq, table[rows], each, shifts, turns, target[part], plan.window, native=self._native)
        pieces.end()
        settle(target, out, spec.dtype)
        exact.put(whole, plan)

    def _find(self, header: FrameHeader) -> tuple[Model, Level]:
        model = self._model
        if model is None or model.digest != header.tables:
            model = self._others.get(header.tables) or self._load(header.tables)
        level = model.levels.get(header.level)
        if level is None or not model.fits(header.shape):
            raise FrameError(f"klt frame of level {header.level} and shape {header.shape}; its tables are {model}")
        return model, level

    def _load(self, digest: bytes) -> Model:
        data = self._tables.find(digest) if self._tables and digest != NO_TABLES else None
        if data is None:
            raise FrameError(f"klt frame needs tables {digest.hex()[:12]}, which are not here")
        try:
            model = Model(TableFile.from_bytes(data, self.name))
        except TablesError as error:
            raise FrameError(f"tables {digest.hex()[:12]} cannot be used: {error}") from error
        if model.digest != digest:
            raise FrameError(f"tables under {digest.hex()[:12]} are {model.digest.hex()[:12]}")
        self._others[digest] = model
        return model


def _checked_spec(header: FrameHeader, out: Bytes) -> ChunkSpec:
    check_version(header, NAME, VERSION)
    check_shape(header, out)
    if min(header.shape) < 1:
        raise FrameError(f"klt frame of shape {header.shape}")
    try:
        check_dtype(NAME, header.dtype)
    except ConfigError as error:
        raise FrameError(str(error)) from error
    return ChunkSpec(dtype=header.dtype, shape=header.shape, first_token=header.first_token)


def _decoder(
    side: Side, plan: Plan, model: Model | None, level: Level | None
) -> tuple[rans.Rows, Sequence[planes.Transform | Uniform], Floats]:
    """Class of each row, arithmetic of each stream, RoPE."""
    num_planes, channels = plan.shape[0], plan.channels
    if model and level:
        if int(np.abs(side.shifts.astype(np.int32)).max(initial=0)) > SHIFT_LIMIT:
            raise FrameError(f"klt payload has shifts beyond {SHIFT_LIMIT}")
        return level.table, level.parts, model.angles(plan.spec.first_token + plan.window.skip, plan.window.tokens)
    assert side.step is not None and side.classes is not None, "Side.read gives both in this mode"
    uniform = _uniform(side.step, side.shifts.reshape(num_planes, channels))
    return side.classes.astype(np.uint32), [uniform.part(s) for s in streams(num_planes)], NO_ANGLES


def _rows(kept: npt.NDArray[np.int64]) -> list[slice]:
    """Rows of symbols of each stream."""
    ends = np.concatenate([[0], np.cumsum(kept)])
    return [slice(int(ends[s.start]), int(ends[s.stop])) for s in streams(len(kept))]


def _groups(spec: ChunkSpec) -> int:
    """Fewest equal groups of heads that the kernels can take as planes."""
    _, _, heads, _, dim = spec.shape
    for groups in range(1, heads + 1):
        if heads % groups == 0 and heads // groups * dim <= MAX_CHANNELS:
            return groups
    raise FrameError(f"klt codes head dims up to {MAX_CHANNELS}, not {dim}")


def _grades(plan: Plan) -> npt.NDArray[np.float64]:
    """[P]: 1 for K, V_GRADE for V."""
    by_layer = np.geomspace(*V_GRADE, plan.spec.shape[0])
    return np.repeat(np.stack([np.ones_like(by_layer), by_layer], axis=1).reshape(-1), plan.groups)


def _steps(mean: Floats, deviation: Floats, level: npt.NDArray[np.float64]) -> Floats:
    """Step of each plane: a part of its rms, but never too small for its means' 16 bits."""
    rms = np.sqrt(np.square(deviation.astype(np.float64)).mean(1))
    least = np.maximum(np.abs(mean).max(1) / MAX_MEAN_STEPS, 1e-30)
    return np.asarray(np.maximum(level * rms, least), np.float32)


def _uniform(step: Floats, shifts: Shifts) -> Uniform:
    mean = shifts.astype(np.float32) * (step * np.float32(0.125))[:, None]
    return Uniform(mean=mean, step=np.repeat(step[:, None], shifts.shape[1], axis=1))
