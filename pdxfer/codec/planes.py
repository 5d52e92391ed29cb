"""Planes of KV values ↔ symbols: the arithmetic of klt, in C (native/klt.c) or numba, the same bits.

A plane is some heads of one layer's K or V, [H, T, D]; its channel c is (head c // D, dim c % D). `Uniform` quantises
channels as they are; `Transform` turns RoPE off and multiplies by a matrix per plane first, in integers. A token of a
plane that does not fit is reported, not clipped: the codec keeps it exact. Called by klt.py; any thread.

Shape letters: P planes, H heads of a plane, T tokens, S tokens in memory, D head dim, C channels = H * D.
"""

from collections.abc import Callable
from ctypes import c_int, c_int64
from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from pdxfer.codec import rans
from pdxfer.codec.arrays import on_host
from pdxfer.codec.native import POINTER, function, pointer

Floats = npt.NDArray[np.float32]
Shifts = npt.NDArray[np.int16]
Values = npt.NDArray[Any]
"""[P, H, S, D]: uint16 bits of bfloat16, or float32."""

MAX_CHANNELS = 512
NO_ANGLES = np.zeros((0, 0), np.float32)
NO_SHIFTS = np.zeros(0, np.int16)
SHIFT_LIMIT = 16000
"""Eighths of a step: what keeps the inverse's sums in int32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """Symbol = 128 + round((x - mean) / step)."""

    mean: Floats
    """[P, C]."""
    step: Floats
    """[P, C], positive."""

    def part(self, planes: slice) -> "Uniform":
        """Of these planes; views."""
        return Uniform(mean=self.mean[planes], step=self.step[planes])


@dataclass(frozen=True, kw_only=True)
class Transform:
    """Coefficients = out_scale * (forward · round((x - mean) * in_scale)), x with RoPE off; shift = their mean over the
    chunk in eighths; symbols = 128 + round(coefficients - shift / 8).

    Sums of `forward` stay below 2^31, those of `inverse` below 2^24: exact in int32 and in float32.
    """

    mean: Floats
    """[P, C]."""
    in_scale: Floats
    """[P, C]."""
    forward: npt.NDArray[np.int16]
    """[P, C / 2, width, 2]: pair matrices, width a multiple of 16 and at least C."""
    out_scale: Floats
    """[P, width]: what makes symbols of the forward sums."""
    inverse: npt.NDArray[np.int16]
    """[P, C / 2, C, 2]: pair matrices."""
    scale: Floats
    """[P, C]: what makes values of the inverse sums."""
    kept: npt.NDArray[np.int64]
    """[P]: how many symbols of a plane are coded; the others are 128."""
    turned: npt.NDArray[np.uint8]
    """[P]: 1 where RoPE is taken off."""

    def part(self, planes: slice) -> "Transform":
        """Of these planes; views."""
        return Transform(
            mean=self.mean[planes], in_scale=self.in_scale[planes], forward=self.forward[planes],
            out_scale=self.out_scale[planes], inverse=self.inverse[planes], scale=self.scale[planes],
            kept=self.kept[planes], turned=self.turned[planes],
        )  # fmt: skip

    @cached_property
    def uploaded(self) -> dict[Any, tuple[Any, ...]]:
        """Device → what kernels/gpu/planes.py keeps there."""
        return {}

    @cached_property
    def forward_plain(self) -> npt.NDArray[np.float64]:
        """[P, C, width]: `forward` for numba."""
        return _plain(self.forward).astype(np.float64)

    @cached_property
    def inverse_plain(self) -> Floats:
        """[P, C, C]: `inverse` for numba."""
        return _plain(self.inverse).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Which tokens of the planes are meant."""

    skip: int
    """Tokens before the first one."""
    tokens: int


def _plain(pairs: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
    planes, half, width, _ = pairs.shape
    return pairs.transpose(0, 1, 3, 2).reshape(planes, 2 * half, width)


def dims(values: Values, window: Window, rotary: int) -> npt.NDArray[np.int64]:
    """The `geometry` struct of native/klt.c."""
    _, heads, stride, dim = values.shape
    wide = int(values.dtype == np.float32)
    return np.array([heads, dim, heads * dim, window.tokens, window.skip, stride, rotary, wide], np.int64)


@cache
def _numba() -> ModuleType:
    rans.numba_kernels()
    from pdxfer.codec import planes_numba

    return planes_numba


_P, _I = POINTER, c_int64
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "klt_stats": (None, [_P, _I, _P, _P, _P]),
    "klt_quantise": (None, [_P, _I, _P, _P, _P, _P, _P]),
    "klt_forward": (None, [_P, _I, _P, _P, _P, _P, _I, _P, _P, _P, _P, _P, _P, _P, _P]),
    "klt_decode": (c_int, [_P, _I, _P, _I, _P, _P, _I, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P]),
}


@cache
def _native(name: str) -> Callable[..., Any] | None:
    return function(name, *SIGNATURES[name])


def angles(positions: npt.NDArray[np.int64], inverse_wavelengths: npt.NDArray[np.float64]) -> Floats:
    """[T, rotary]: cosines, then sines, of each position's RoPE angles."""
    turns = positions[:, None].astype(np.float64) * inverse_wavelengths[None]
    return np.asarray(np.concatenate([np.cos(turns), np.sin(turns)], axis=1), np.float32)


def stats(values: Values, window: Window, *, native: bool = True) -> tuple[Floats, Floats]:
    """Mean and standard deviation of each channel, [P, C] each; what is not finite counts as 0."""
    if not on_host(values):
        from pdxfer.codec.kernels.gpu import planes as gpu

        return gpu.stats(values, window)
    shape = (values.shape[0], values.shape[1] * values.shape[3])
    mean, deviation = np.empty(shape, np.float32), np.empty(shape, np.float32)
    run = _native("klt_stats") if native else None
    if run is None:
        wide = values.dtype == np.float32
        _numba().stats(values, window.skip, window.tokens, wide, mean, deviation)
    else:
        run(pointer(values), len(values), pointer(dims(values, window, 0)), pointer(mean), pointer(deviation))
    return mean, np.asarray(np.sqrt(deviation))


def quantise(values: Values, window: Window, by: Uniform, *, native: bool = True) -> tuple[rans.Symbols, rans.Symbols]:
    """Symbols [P * C, T], and which tokens of a plane do not fit [P, T]."""
    if not on_host(values):
        from pdxfer.codec.kernels.gpu import planes as gpu

        return gpu.quantise(values, window, by)
    planes, channels = by.mean.shape
    sym, escaped = np.empty((planes * channels, window.tokens), np.uint8), np.empty((planes, window.tokens), np.uint8)
    inverse = np.float32(1) / by.step
    run = _native("klt_quantise") if native else None
    if run is None:
        wide = values.dtype == np.float32
        _numba().quantise(values, window.skip, window.tokens, wide, by.mean, inverse, sym, escaped)
    else:
        run(
            pointer(values), planes, pointer(dims(values, window, 0)), pointer(by.mean), pointer(inverse),
            pointer(sym), pointer(escaped),
        )  # fmt: skip
    return sym, escaped


def forward(
    values: Values, window: Window, by: Transform, turns: Floats, *, native: bool = True
) -> tuple[rans.Symbols, Shifts, rans.Symbols]:
    """Symbols [sum of kept, T], shifts [sum of kept], and which tokens of a plane do not fit [P, T]. `turns`: of
    `angles`, or NO_ANGLES."""
    if not on_host(values):
        from pdxfer.codec.kernels.gpu import planes as gpu

        return gpu.forward(values, window, by, turns)
    planes = len(by.mean)
    shifts = np.empty(int(by.kept.sum()), np.int16)
    sym = np.empty((int(by.kept.sum()), window.tokens), np.uint8)
    escaped = np.empty((planes, window.tokens), np.uint8)
    run = _native("klt_forward") if native else None
    if run is None:
        _forward_numba(values, window, by, turns, sym, shifts, escaped)
    else:
        work = np.empty((window.tokens, by.forward.shape[2]), np.float32)
        run(
            pointer(values), planes, pointer(dims(values, window, turns.shape[1])), pointer(by.mean),
            pointer(by.in_scale), pointer(by.forward), by.forward.shape[2], pointer(by.kept), pointer(by.out_scale),
            pointer(by.turned), pointer(turns), pointer(work), pointer(sym), pointer(shifts), pointer(escaped),
        )  # fmt: skip
    return sym, shifts, escaped


def decode(
    words: rans.Words,
    freq: rans.Freq,
    table: rans.Rows,
    by: Uniform | Transform,
    shifts: Shifts,
    turns: Floats,
    out: Values,
    window: Window,
    *,
    native: bool = True,
) -> None:
    """The window of `out` [P, H, S, D] from one rANS stream. Raises FrameError; writes nothing outside `out`.

    `shifts`: [sum of kept], within SHIFT_LIMIT; of a Uniform: NO_SHIFTS.
    """
    planes, heads, _, dim = out.shape
    channels = heads * dim
    transform = by if isinstance(by, Transform) else None
    kept = transform.kept if transform else np.full(planes, channels, np.int64)
    scale = transform.scale if transform else by.step if isinstance(by, Uniform) else by.scale
    turned = transform.turned if transform else np.zeros(planes, np.uint8)
    assert len(table) == int(kept.sum()) and len(shifts) == (len(table) if transform else 0)
    assert by.mean.shape == scale.shape == (planes, channels)
    slots = np.empty((len(freq), rans.PROB), np.uint32)
    run = _native("klt_decode") if native else None
    if run is None:
        by_channel = transform is not None
        coded = np.empty(
            (planes, channels, window.tokens) if by_channel else (planes, window.tokens, channels), np.float32
        )
        sums = coded
        mean = by.mean
        error = int(_numba().symbols(words, freq, table, slots, kept, by_channel, coded))
        if transform and error == 0:
            sums = np.empty((planes, window.tokens, channels), np.float32)
            for p, used in enumerate(kept):
                _numba().products(coded[p, :used].T, transform.inverse_plain[p, :used], sums[p])
            mean = _moved(transform, shifts)
        _numba().finish(sums, window.skip, out.dtype == np.float32, mean, scale, turned, turns, out)
    else:
        pitch = (window.tokens + 63) // 64 * 64
        work = np.empty(pitch * (3 * channels + 18), np.uint8)
        error = int(
            run(
                pointer(words), words.size, pointer(freq), len(freq), pointer(table), pointer(slots), planes,
                pointer(dims(out, window, turns.shape[1])), pointer(kept),
                pointer(shifts) if transform else None, pointer(transform.inverse) if transform else None,
                pointer(by.mean), pointer(scale), pointer(turned), pointer(turns), pointer(work), pointer(out),
            )
        )  # fmt: skip
    rans.check(error)


def _moved(by: Transform, shifts: Shifts) -> Floats:
    """Mean [P, C] with the shifts in it. In two parts of 7 bits, whose sums are exact in float32."""
    planes, channels = by.mean.shape
    parts = np.zeros((planes, 2, channels), np.float32)
    row = 0
    for p, used in enumerate(by.kept):
        whole = shifts[row : row + used].astype(np.int32) + 64
        parts[p, 0, :used], parts[p, 1, :used] = whole >> 7, (whole & 127) - 64
        row += used
    sums = np.empty_like(parts)
    for p in range(planes):
        _numba().products(parts[p], by.inverse_plain[p], sums[p])
    high, low = sums.transpose(1, 0, 2).astype(np.int64)
    moved = (128 * high + low).astype(np.float32) * (by.scale * np.float32(0.125))
    return np.asarray(moved + by.mean)


def _forward_numba(
    values: Values,
    window: Window,
    by: Transform,
    turns: Floats,
    sym: rans.Symbols,
    shifts: Shifts,
    escaped: rans.Symbols,
) -> None:
    planes, channels = by.mean.shape
    whole = np.empty((window.tokens, channels), np.float64)
    row = 0
    for p in range(planes):
        bad = escaped[p]
        _numba().prepare(
            values[p], window.skip, values.dtype == np.float32, by.mean[p], by.in_scale[p], by.turned[p], turns, whole,
            bad,
        )  # fmt: skip
        used = int(by.kept[p])
        sums = np.empty((window.tokens, used), np.float64)
        _numba().products(whole, by.forward_plain[p, :, :used], sums)
        _numba().symbols_of(sums, by.out_scale[p], sym[row : row + used], shifts[row : row + used], bad)
        row += used
