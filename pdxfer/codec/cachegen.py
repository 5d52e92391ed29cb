"""Codec `cachegen`: CacheGen as its paper has it (not as its first release has it, which codes no differences).

Anchors and differences in groups of 10, steps graded by depth, a distribution per (layer, K or V, channel) learnt
offline per model and level, arithmetic coding by interleaved rANS. Without offline tables a chunk carries its own,
shared by channels of like spread: one per channel would cost more than it saves on 256 tokens.
The first 4 tokens of a context, and tokens of a plane with values that are not finite, are kept exact.

    u32 mode   escapes   strays of the anchors, of the differences   words of both   (u32 each)
    exact tokens, escapes as in klt   u16 scales [P, A]   strays: u32 row * columns + column each, then u8 symbols
    mode 0: f32 step [P], u32 words, words of a rANS stream of 2 rows: classes of the anchors' and the differences'
    rows, its tables, tables of both      words of both. Mode pieces.RAW: the values follow as they are.

A stray is a symbol that the offline tables give no chance. The codec is here for comparison and for what it is; klt is
smaller at equal quality.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdxfer.codec import rans
from pdxfer.codec.base import Bytes, ChunkSpec, Encoded, Tables, check_shape, check_version
from pdxfer.codec.cachegen_tables import (
    DEFAULT_LEVEL,
    GROUP,
    LEVELS,
    NAME,
    SYMBOL_LIMIT,
    Floats,
    Offline,
    code_anchors,
    decode_anchors,
    differences,
    grades,
    is_anchor,
    rows,
)
from pdxfer.codec.frame import FrameError, FrameHeader
from pdxfer.codec.klt_payload import Exact, Plan
from pdxfer.codec.klt_tables import NUM_CLASSES, classes
from pdxfer.codec.pieces import RAW, Pieces, check_dtype, items, numbers, pack_tables, smaller
from pdxfer.codec.tables import TablesError
from pdxfer.codec.values import from_float, to_float
from pdxfer.core.errors import ConfigError

VERSION = 1
"""1: first (2026-11-29)."""
OWN, OFFLINE = 0, 1
NO_TABLES = bytes(16)
LARGEST = {"bfloat16": 1e30, "float16": 3e4, "float32": 1e30}
"""Tokens with values beyond are kept exact: an error on top must not overflow."""
Symbols = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Strays:
    """Symbols outside the tables of their rows."""

    where: npt.NDArray[np.int64]
    symbols: Symbols

    @classmethod
    def take_out(cls, sym: Symbols, table: rans.Rows, freq: rans.Freq, native: bool) -> "_Strays":
        """Replaces them in `sym` by 128, which every offline table has."""
        unknown = (rans.count(sym, table, len(freq), native=native) > 0) & (freq == 0)
        at_risk = np.flatnonzero(unknown[table].any(1))
        row, column = np.nonzero(unknown[table[at_risk, None], sym[at_risk]])
        found = sym[at_risk[row], column]
        sym[at_risk[row], column] = 128
        return cls(where=at_risk[row] * sym.shape[1] + column, symbols=found)

    @classmethod
    def read(cls, pieces: Pieces, count: int, limit: int) -> "_Strays":
        where = pieces.array("<u4", count).astype(np.int64)
        if int(where.max(initial=-1)) >= limit:
            raise FrameError(f"cachegen payload has a stray symbol at {where.max()} of {limit}")
        return cls(where=where, symbols=pieces.array(np.uint8, count))

    def pack(self) -> bytes:
        return self.where.astype("<u4").tobytes() + self.symbols.tobytes()

    def put_back(self, sym: Symbols) -> None:
        sym.reshape(-1)[self.where] = self.symbols


class CacheGenCodec:
    """See the module. Any thread: its tables are only read."""

    name = NAME
    lossless = False
    opaque = False

    def __init__(self, level: int = 0, tables: Tables | None = None, *, native: bool = True) -> None:
        """Raises ConfigError for a level that is none, or for damaged tables."""
        if level and level not in LEVELS:
            raise ConfigError(f"cachegen has levels {min(LEVELS)} (finest) to {max(LEVELS)}, not {level}")
        self.level = level or DEFAULT_LEVEL
        self._native = native
        self._tables = tables
        current = tables.current(self.name, self.level) if tables else None
        try:
            self._offline = Offline.parse(current) if current else None
        except TablesError as error:
            raise ConfigError(f"tables of codec cachegen cannot be used: {error}; calibrate again") from error
        self._others: dict[bytes, Offline] = {}

    def __repr__(self) -> str:
        return f"<CacheGenCodec level={self.level} {'offline tables' if self._offline else 'tables per chunk'}>"

    def encode(self, values: Bytes, spec: ChunkSpec) -> Encoded:
        """A payload of its own. Raises ConfigError for values that are no floats."""
        check_dtype(self.name, spec.dtype)
        plan = Plan(spec=spec, groups=1)
        offline = self._offline if self._offline and self._offline.fits(spec.shape) else None
        x = _vectors(to_float(values, spec.dtype), plan)
        escaped = np.asarray(~(np.abs(x) < LARGEST[spec.dtype]).all(2), np.uint8)
        x = np.where(escaped[:, :, None] != 0, np.float32(0), x)
        anchors, scales, decoded = code_anchors(x[:, ::GROUP])
        delta = differences(x, decoded)
        step = offline.step if offline else self._own_step(delta)
        q = np.rint(delta / step[:, None, None])
        escaped[:, ~is_anchor(x.shape[1])] |= (np.abs(q) > SYMBOL_LIMIT).any(2)
        deltas = (np.clip(q, -SYMBOL_LIMIT, SYMBOL_LIMIT) + 128).astype(np.uint8)
        body = self._coded(rows(anchors), rows(deltas), step, offline, Exact.of(values, plan, escaped), scales)
        return Encoded(
            payload=smaller(body, values), codec=self.name, codec_version=VERSION, level=self.level,
            tables=offline.digest if offline else NO_TABLES,
        )  # fmt: skip

    def _own_step(self, delta: Floats) -> Floats:
        spread = np.sqrt(np.square(delta, dtype=np.float64).mean((1, 2))) if delta.size else np.zeros(len(delta))
        factor = grades(len(delta) // 2) * np.float32(LEVELS[self.level])
        return np.asarray(np.maximum(spread, 1e-30).astype(np.float32) * factor)

    def _coded(
        self, anchors: Symbols, deltas: Symbols, step: Floats, offline: Offline | None, exact: Exact,
        scales: npt.NDArray[np.uint16],
    ) -> bytes:  # fmt: skip
        side, strays, words = b"", [], []
        kinds = []
        for sym, freq in (
            (anchors, offline.anchors if offline else None),
            (deltas, offline.deltas if offline else None),
        ):
            if freq is None:
                kind = classes(sym.std(1) if sym.shape[1] else np.zeros(len(sym)))
                table = kind.astype(np.uint32)
                freq = rans.frequencies(rans.count(sym, table, NUM_CLASSES, native=self._native))
                kinds.append(kind)
                side += pack_tables(freq)
                strays.append(_Strays(where=np.zeros(0, np.int64), symbols=np.zeros(0, np.uint8)))
            else:
                table = np.arange(len(sym), dtype=np.uint32)
                strays.append(_Strays.take_out(sym, table, freq, self._native))
            words.append(rans.encode(sym, table, freq, native=self._native))
        if not offline:
            side = step.astype("<f4").tobytes() + self._packed_kinds(np.stack(kinds)) + side
        head = numbers(
            OFFLINE if offline else OWN, len(exact.where), *(len(s.where) for s in strays), *(w.size for w in words)
        )
        parts = [head, exact.pack(), scales.astype("<u2").tobytes(), *(s.pack() for s in strays), side]
        return b"".join([*parts, *(w.astype("<u2", copy=False).tobytes() for w in words)])

    def _packed_kinds(self, kinds: Symbols) -> bytes:
        order = np.arange(len(kinds), dtype=np.uint32)
        freq = rans.frequencies(rans.count(kinds, order, len(kinds), native=self._native))
        words = rans.encode(kinds, order, freq, native=self._native)
        return numbers(words.size) + words.astype("<u2", copy=False).tobytes() + pack_tables(freq)

    def decode(self, payload: memoryview, header: FrameHeader, out: Bytes) -> None:
        """Into `out`; several passes over scratch of its size. Raises FrameError; then `out` is garbage."""
        check_version(header, self.name, VERSION)
        check_shape(header, out)
        if min(header.shape) < 1 or header.dtype not in ("bfloat16", "float16", "float32"):
            raise FrameError(f"cachegen frame of {header.dtype} {header.shape}")
        spec = ChunkSpec(dtype=header.dtype, shape=header.shape, first_token=header.first_token)
        plan = Plan(spec=spec, groups=1)
        pieces = Pieces(payload)
        (mode,) = pieces.numbers(1)
        if mode == RAW:
            out[:] = pieces.array(np.uint8, out.nbytes)
            return pieces.end()
        if mode not in (OWN, OFFLINE):
            raise FrameError(f"cachegen payload of mode {mode}")
        num_escapes, *counts = pieces.numbers(5)
        num_planes, tokens = plan.shape[0], plan.window.tokens
        num_rows, num_anchors = num_planes * plan.channels, -(-tokens // GROUP)
        columns = (num_anchors, tokens - num_anchors)
        whole = items(out, spec.dtype, plan.shape)
        exact = Exact.read(pieces, plan, num_escapes, whole.dtype)
        scales = pieces.array("<u2", num_planes * num_anchors).reshape(num_planes, num_anchors)
        strays = [_Strays.read(pieces, n, num_rows * c) for n, c in zip(counts[:2], columns, strict=True)]
        if mode == OFFLINE:
            offline = self._find(header)
            every = np.arange(num_rows, dtype=np.uint32)
            step, tables, freqs = offline.step, [every, every], [offline.anchors, offline.deltas]
        else:
            step, tables = self._read_kinds(pieces, num_planes, num_rows)
            freqs = [pieces.tables(NUM_CLASSES), pieces.tables(NUM_CLASSES)]
        decoded = []
        for i in (0, 1):
            words = pieces.array("<u2", counts[2 + i])
            sym = rans.decode(words, tables[i], freqs[i], columns[i], native=self._native)
            strays[i].put_back(sym)
            decoded.append(sym.reshape(num_planes, plan.channels, columns[i]).transpose(0, 2, 1))
        pieces.end()
        x = _joined(decode_anchors(decoded[0], scales), decoded[1], step)
        layers, two, heads, _, dim = spec.shape
        ordered = x.reshape(layers, two, tokens, heads, dim).transpose(0, 1, 3, 2, 4)
        narrow = from_float(np.ascontiguousarray(ordered), spec.dtype)
        whole[:, :, plan.window.skip :] = items(narrow, spec.dtype, (num_planes, heads, tokens, dim))
        exact.put(whole, plan)

    def _read_kinds(self, pieces: Pieces, num_planes: int, num_rows: int) -> tuple[Floats, list[rans.Rows]]:
        step = pieces.array("<f4", num_planes).astype(np.float32)
        (size,) = pieces.numbers(1)
        words = pieces.array("<u2", size)
        freq = pieces.tables(2)
        kinds = rans.decode(words, np.arange(2, dtype=np.uint32), freq, num_rows, native=self._native)
        if not np.isfinite(step).all() or kinds.max(initial=0) >= NUM_CLASSES:
            raise FrameError("cachegen payload has steps or classes out of range")
        return step, [kinds[0].astype(np.uint32), kinds[1].astype(np.uint32)]

    def _find(self, header: FrameHeader) -> Offline:
        found = self._offline
        if found is None or found.digest != header.tables:
            found = self._others.get(header.tables) or self._load(header.tables)
        if not found.fits(header.shape):
            raise FrameError(f"cachegen frame of shape {header.shape}; its tables are for {found.shape}")
        return found

    def _load(self, digest: bytes) -> Offline:
        data = self._tables.find(digest) if self._tables and digest != NO_TABLES else None
        if data is None:
            raise FrameError(f"cachegen frame needs tables {digest.hex()[:12]}, which are not here")
        try:
            found = Offline.parse(data)
        except TablesError as error:
            raise FrameError(f"tables {digest.hex()[:12]} cannot be used: {error}") from error
        if found.digest != digest:
            raise FrameError(f"tables under {digest.hex()[:12]} are {found.digest.hex()[:12]}")
        self._others[digest] = found
        return found


def _vectors(flat: Floats, plan: Plan) -> Floats:
    """[P, T, C] of the coded tokens."""
    planes, heads, tokens, dim = plan.shape
    coded = flat.reshape(planes, heads, tokens, dim)[:, :, plan.window.skip :]
    return np.ascontiguousarray(coded.transpose(0, 2, 1, 3)).reshape(planes, plan.window.tokens, heads * dim)


def _joined(anchors: Floats, deltas: Symbols, step: Floats) -> Floats:
    """[P, T, C] of decoded anchors and the others' symbols."""
    planes, num_anchors, channels = anchors.shape
    tokens = num_anchors + deltas.shape[1]
    anchor = is_anchor(tokens)
    x = np.repeat(anchors, GROUP, axis=1)[:, :tokens]
    with np.errstate(over="ignore", invalid="ignore"):  # a hostile payload's own problem
        x[:, ~anchor] += (deltas.astype(np.float32) - np.float32(128)) * step[:, None, None]
    return x
