"""Layout of a klt payload: what klt.py puts between a frame's header and its end.

    u32 mode   u32 streams   u32 escapes   u32 words of each stream
    exact tokens [P, H, exact, D]      escapes: u32 plane * T + token each, then their values [n, H, D]
    side: u32 words, words of a rANS stream of 2 rows, and in mode 0 a third, then their tables:
          shift of each coded row of symbols (its mean over the chunk in eighths of a step) + 32768, high and low bytes;
          class of each row. In mode 0 also f32 step [P]
    tables of the symbols      streams

Mode 0: without calibrated tables, 1: with them; pieces.RAW: the values follow as they are.
P planes, H heads of one, T coded tokens.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pdxfer.codec import rans
from pdxfer.codec.arrays import host
from pdxfer.codec.base import Bytes, ChunkSpec
from pdxfer.codec.frame import FrameError
from pdxfer.codec.klt_tables import NUM_CLASSES
from pdxfer.codec.pieces import Pieces, items, numbers, pack_tables
from pdxfer.codec.planes import Floats, Shifts, Window

UNIFORM, TRANSFORM = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A chunk's planes and the tokens that are coded."""

    spec: ChunkSpec
    groups: int
    """Groups of heads, a plane each."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[P, H, T, D] of the planes, with all tokens."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What the symbols of a chunk need beside calibrated tables."""

    shifts: Shifts
    """[rows]."""
    classes: npt.NDArray[np.uint8] | None = None
    """[rows]; None: the tables know."""
    step: Floats | None = None
    """[P]; None: the tables know."""

    def pack(self, native: bool) -> bytes:
        """For the payload."""
        biased = self.shifts.astype(np.int32) + 32768
        rows = [biased >> 8, biased & 255] + ([] if self.classes is None else [self.classes])
        sym = np.stack(rows).astype(np.uint8)
        order = np.arange(len(sym), dtype=np.uint32)
        freq = rans.frequencies(rans.count(sym, order, len(sym), native=native))
        words = rans.encode(sym, order, freq, native=native)
        step = b"" if self.step is None else self.step.astype("<f4").tobytes()
        return numbers(words.size) + words.astype("<u2", copy=False).tobytes() + pack_tables(freq) + step

    @classmethod
    def read(cls, pieces: Pieces, num_rows: int, num_planes: int, mode: int, native: bool) -> "Side":
        """Raises FrameError."""
        count = 3 if mode == UNIFORM else 2
        (size,) = pieces.numbers(1)
        words = pieces.array("<u2", size)
        freq = pieces.tables(count)
        sym = rans.decode(words, np.arange(count, dtype=np.uint32), freq, num_rows, native=native)
        shifts = ((sym[0].astype(np.int32) << 8 | sym[1]) - 32768).astype(np.int16)
        if mode != UNIFORM:
            return cls(shifts=shifts)
        step = pieces.array("<f4", num_planes).astype(np.float32)
        if not np.isfinite(step).all() or sym[2].max(initial=0) >= NUM_CLASSES:
            raise FrameError("klt payload has steps or classes out of range")
        return cls(shifts=shifts, classes=sym[2], step=step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """What is not coded: the first tokens of a context, and tokens of a plane that did not fit."""

    first: npt.NDArray[Any]
    """[P, H, exact, D] items."""
    where: npt.NDArray[np.int64]
    """[n]: plane * T + token."""
    escapes: npt.NDArray[Any]
    """[n, H, D] items."""

    @classmethod
    def of(cls, values: Bytes, plan: Plan, escaped: npt.NDArray[np.uint8]) -> "Exact":
        """Taken from a chunk, which may be a tensor."""
        whole, window = items(values, plan.spec.dtype, plan.shape), plan.window
        where = np.flatnonzero(escaped)
        plane, token = np.divmod(where, max(window.tokens, 1))
        escapes = host(whole[plane, :, window.skip + token])
        return cls(first=host(whole[:, :, : window.skip]), where=where, escapes=escapes)

    @classmethod
    def read(cls, pieces: Pieces, plan: Plan, count: int, dtype: Any) -> "Exact":
        """Raises FrameError."""
        num_planes, heads, _, dim = plan.shape
        skip = plan.window.skip
        first = pieces.array(dtype, num_planes * heads * skip * dim).reshape(num_planes, heads, skip, dim)
        where = pieces.array("<u4", count).astype(np.int64)
        if int(where.max(initial=-1)) >= num_planes * plan.window.tokens:
            raise FrameError(f"klt payload has an escape at {where.max()} of {num_planes * plan.window.tokens}")
        escapes = pieces.array(dtype, count * heads * dim).reshape(count, heads, dim)
        return cls(first=first, where=where, escapes=escapes)

    def pack(self) -> bytes:
        """For the payload."""
        return b"".join((self.first.tobytes(), self.where.astype("<u4").tobytes(), self.escapes.tobytes()))

    def put(self, whole: npt.NDArray[Any], plan: Plan) -> None:
        """Into the decoded chunk, items [P, H, T, D]."""
        window = plan.window
        whole[:, :, : window.skip] = self.first
        plane, token = np.divmod(self.where, max(window.tokens, 1))
        whole[plane, :, window.skip + token] = self.escapes
