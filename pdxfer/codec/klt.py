"""Codec `klt`: decorrelate, quantise uniformly, entropy code. Needs nothing; gets a lot better with tables.

Without tables: each channel's mean is taken off, one step per plane (layer and K or V, some heads) = level x rms,
symbols coded by rANS with tables shared by channels of like spread. Knows nothing about the model.
With tables of `pdxfer codec calibrate`: RoPE off K, then per plane a transform learnt from calibration text, in which
one step serves all: channels weigh what the model's output depends on them.

Exact in both: the first 4 tokens of a context, and any token of a plane that does not fit (outliers, inf, NaN).

    u32 mode (0, 1)   u32 streams   u32 escapes   u32 words of each stream   exact tokens [L, 2, H, exact, D]
    escapes: u32 plane * T + token each, then their values
    mode 0: f32 step [P], side stream (u32 words, words: class, then mean in half steps, high and low byte, of each
    channel), its tables; then in both: tables of the symbols, the streams
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pdxfer.codec import planes, rans
from pdxfer.codec.base import Bytes, ChunkSpec, Encoded, Tables, check_shape, check_version
from pdxfer.codec.frame import FrameError, FrameHeader
from pdxfer.codec.klt_tables import NAME, NUM_CLASSES, Level, Model, classes, streams
from pdxfer.codec.pieces import Pieces, check_dtype, items, kernel_view, numbers, pack_tables, scratch_view, settle
from pdxfer.codec.planes import MAX_CHANNELS, NO_ANGLES, Uniform, Window
from pdxfer.codec.tables import TableFile, TablesError
from pdxfer.core.errors import ConfigError

VERSION = 1
"""1: first (2026-11-29)."""
STEPS = {1: 0.1, 2: 0.15, 3: 0.2, 4: 0.25, 5: 0.35, 6: 0.5, 7: 0.7}
"""Level → step of uncalibrated planes, in rms of the plane."""
DEFAULT_LEVEL = 4
UNCALIBRATED, CALIBRATED = 0, 1
MAX_MEAN_STEPS = 8000
NO_TABLES = bytes(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A chunk's planes and the tokens that are coded."""

    spec: ChunkSpec
    groups: int
    """Groups of heads, a plane each."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[P, H, T, D] of the planes."""
        layers, two, heads, tokens, dim = self.spec.shape
        return layers * two * self.groups, heads // self.groups, tokens, dim

    @property
    def channels(self) -> int:
        """Of a plane."""
        return self.shape[1] * self.shape[3]

    @property
    def window(self) -> Window:
        """All but the exact tokens."""
        return Window(skip=self.spec.exact_tokens, tokens=self.spec.shape[3] - self.spec.exact_tokens)


class KltCodec:
    """See the module. Thread-safe: its tables are only read."""

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

    # ------------------------------------------------------------------------------------------------ encode

    def encode(self, values: Bytes, spec: ChunkSpec) -> Encoded:
        """A payload of its own; one pass over `values` for symbols, one over those. Raises ConfigError for values that
        are no floats."""
        check_dtype(self.name, spec.dtype)
        model = self._model if self._model and self._model.fits(spec.shape) else None
        level = model.levels.get(self.level) if model else None
        if model is None or level is None:
            payload, digest = self._encode_uniform(values, _Plan(spec=spec, groups=_groups(spec))), NO_TABLES
        else:
            plan = _Plan(spec=spec, groups=model.groups)
            payload, digest = self._encode_transform(values, plan, model, level), model.digest
        return Encoded(payload=payload, codec=self.name, codec_version=VERSION, level=self.level, tables=digest)

    def _encode_uniform(self, values: Bytes, plan: _Plan) -> bytes:
        source = kernel_view(values, plan.spec.dtype, plan.shape)
        mean, deviation = planes.stats(source, plan.window, native=self._native)
        step = _steps(mean, deviation, STEPS[self.level])
        half_steps = np.clip(np.rint(mean * (2 / step[:, None])), -32768, 32767).astype(np.int16)
        kinds = classes(deviation / step[:, None])
        sym, escaped = planes.quantise(source, plan.window, _uniform(step, half_steps), native=self._native)
        return self._payload(
            UNCALIBRATED, values, plan, _side(step, kinds, half_steps), sym, kinds.reshape(-1).astype(np.uint32),
            np.full(plan.shape[0], plan.channels), escaped,
        )  # fmt: skip

    def _encode_transform(self, values: Bytes, plan: _Plan, model: Model, level: Level) -> bytes:
        source = kernel_view(values, plan.spec.dtype, plan.shape)
        turns = model.angles(plan.spec.first_token + plan.window.skip, plan.window.tokens)
        sym, escaped = planes.forward(source, plan.window, level.transform, turns, native=self._native)
        return self._payload(CALIBRATED, values, plan, b"", sym, level.table, level.transform.kept, escaped)

    def _payload(
        self,
        mode: int,
        values: Bytes,
        plan: _Plan,
        side: bytes,
        sym: rans.Symbols,
        table: rans.Rows,
        kept: npt.NDArray[np.int64],
        escaped: rans.Symbols,
    ) -> bytes:
        freq = rans.frequencies(rans.count(sym, table, NUM_CLASSES, native=self._native))
        rows = np.concatenate([[0], np.cumsum(kept)])
        coded_streams = [
            rans.encode(
                sym[rows[s.start] : rows[s.stop]], table[rows[s.start] : rows[s.stop]], freq, native=self._native
            )
            for s in streams(plan.shape[0])
        ]
        where = np.flatnonzero(escaped).astype("<u4")
        whole = items(values, plan.spec.dtype, plan.shape)
        window = plan.window
        coded = whole[:, :, window.skip :].transpose(0, 2, 1, 3)
        parts = [
            numbers(mode, len(coded_streams), len(where), *(s.size for s in coded_streams)),
            whole[:, :, : window.skip].tobytes(),
            where.tobytes(),
            coded[where // max(window.tokens, 1), where % max(window.tokens, 1)].tobytes(),
            side,
            pack_tables(freq),
            *(s.astype("<u2", copy=False).tobytes() for s in coded_streams),
        ]
        return b"".join(parts)

    # ------------------------------------------------------------------------------------------------ decode

    def decode(self, payload: memoryview, header: FrameHeader, out: Bytes) -> None:
        """Into `out` without a copy between (float16: one). Raises FrameError; then `out` is garbage."""
        check_version(header, self.name, VERSION)
        check_shape(header, out)
        spec = ChunkSpec(dtype=header.dtype, shape=header.shape, first_token=header.first_token)
        if min(spec.shape) < 1:
            raise FrameError(f"klt frame of shape {spec.shape}")
        try:
            check_dtype(self.name, spec.dtype)
        except ConfigError as error:
            raise FrameError(str(error)) from error
        pieces = Pieces(payload)
        mode, num_streams, num_escapes = pieces.numbers(3)
        if mode == CALIBRATED:
            model, level = self._find(header)
            plan = _Plan(spec=spec, groups=model.groups)
        elif mode == UNCALIBRATED:
            model, level, plan = None, None, _Plan(spec=spec, groups=_groups(spec))
        else:
            raise FrameError(f"klt payload of mode {mode}")
        parts = list(streams(plan.shape[0]))
        if num_streams != len(parts):
            raise FrameError(f"klt payload of {num_streams} streams for {len(parts)}")
        sizes = pieces.numbers(num_streams)
        num_planes, heads, _, dim = plan.shape
        window = plan.window
        whole = items(out, spec.dtype, plan.shape)
        exact = pieces.array(whole.dtype, num_planes * heads * window.skip * dim)
        where, escapes = _escapes(pieces, num_escapes, plan, whole.dtype)

        if model and level:
            turns = model.angles(spec.first_token + window.skip, window.tokens)
            by: list[planes.Transform] | list[Uniform] = level.parts
            table, kept = level.table, level.transform.kept
        else:
            uniform, table = _read_side(pieces, plan, self._native)
            by = [uniform.part(s) for s in parts]
            turns, kept = NO_ANGLES, np.full(num_planes, plan.channels, np.int64)
        freq = pieces.tables(NUM_CLASSES)
        rows = np.concatenate([[0], np.cumsum(kept)])
        target = scratch_view(out, spec.dtype, plan.shape)
        for part, size, each in zip(parts, sizes, by, strict=True):
            words = pieces.array("<u2", size)
            mine = table[rows[part.start] : rows[part.stop]]
            planes.decode(words, freq, mine, each, turns, target[part], window, native=self._native)
        pieces.end()
        settle(target, out, spec.dtype)
        whole[:, :, : window.skip] = exact.reshape(num_planes, heads, window.skip, dim)
        whole.transpose(0, 2, 1, 3)[where // max(window.tokens, 1), window.skip + where % max(window.tokens, 1)] = (
            escapes
        )

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


def _groups(spec: ChunkSpec) -> int:
    """Fewest equal groups of heads that the kernels can take as planes."""
    _, _, heads, _, dim = spec.shape
    for groups in range(1, heads + 1):
        if heads % groups == 0 and heads // groups * dim <= MAX_CHANNELS:
            return groups
    raise FrameError(f"klt codes head dims up to {MAX_CHANNELS}, not {dim}")


def _steps(mean: planes.Floats, deviation: planes.Floats, level: float) -> planes.Floats:
    """Step of each plane: a part of its rms, but never too small for its means' 16 bits."""
    rms = np.sqrt(np.square(deviation.astype(np.float64)).mean(1))
    return np.maximum(np.maximum(level * rms, np.abs(mean).max(1) / MAX_MEAN_STEPS), 1e-30).astype(np.float32)


def _uniform(step: planes.Floats, half_steps: npt.NDArray[np.int16]) -> Uniform:
    mean = half_steps.astype(np.float32) * (step * np.float32(0.5))[:, None]
    return Uniform(mean=mean, step=np.repeat(step[:, None], half_steps.shape[1], axis=1))


def _side(step: planes.Floats, kinds: npt.NDArray[np.uint8], half_steps: npt.NDArray[np.int16]) -> bytes:
    halves = (half_steps.astype(np.int32) + 32768).reshape(-1)
    rows = np.stack([kinds.reshape(-1), (halves >> 8).astype(np.uint8), (halves & 255).astype(np.uint8)])
    order = np.arange(3, dtype=np.uint32)
    freq = rans.frequencies(rans.count(rows, order, 3))
    words = rans.encode(rows, order, freq)
    return (
        step.astype("<f4").tobytes()
        + numbers(words.size)
        + words.astype("<u2", copy=False).tobytes()
        + pack_tables(freq)
    )


def _read_side(pieces: Pieces, plan: _Plan, native: bool) -> tuple[Uniform, rans.Rows]:
    num_planes, channels = plan.shape[0], plan.channels
    step = pieces.array("<f4", num_planes).astype(np.float32)
    (size,) = pieces.numbers(1)
    words = pieces.array("<u2", size)
    freq = pieces.tables(3)
    rows = rans.decode(words, np.arange(3, dtype=np.uint32), freq, num_planes * channels, native=native)
    half_steps = ((rows[1].astype(np.int32) << 8 | rows[2]) - 32768).astype(np.int16).reshape(num_planes, channels)
    if not np.isfinite(step).all() or rows[0].max() >= NUM_CLASSES:
        raise FrameError("klt payload has steps or classes out of range")
    return _uniform(step, half_steps), rows[0].astype(np.uint32)


def _escapes(pieces: Pieces, count: int, plan: _Plan, dtype: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    num_planes, heads, _, dim = plan.shape
    where = pieces.array("<u4", count).astype(np.int64)
    if where.size and int(where.max()) >= num_planes * plan.window.tokens:
        raise FrameError(f"klt payload has an escape at {where.max()} of {num_planes * plan.window.tokens}")
    return where, pieces.array(dtype, count * heads * dim).reshape(count, heads, dim)
