"""The first half of klt on tensors: what codec/planes.py's functions of the same names do with arrays.

Results are host arrays, ready for the entropy coder, which runs on the CPU. Called by codec/planes.py; any thread.
"""

from typing import Any

import numpy as np
import torch

from pdxfer.codec import rans
from pdxfer.codec.kernels import BF16, F32
from pdxfer.codec.kernels.gpu import klt
from pdxfer.codec.kernels.gpu.kernels import on, power
from pdxfer.codec.kernels.gpu.values import EXACT
from pdxfer.codec.planes import Floats, Shifts, Transform, Uniform, Window

TILE_VALUES = 2048
"""Values of a program."""
COLUMNS = 64


def stats(values: Any, window: Window) -> tuple[Floats, Floats]:
    """See planes.stats."""
    planes, heads, stride, dim = values.shape
    mean, deviation = (_new(values, (planes, heads * dim), torch.float32) for _ in range(2))
    each = float(np.float32(1) / np.float32(max(window.tokens, 1)))
    with on(values):
        klt.stats[(planes, -(-heads * dim // COLUMNS))](
            _words(values), mean, deviation, heads, dim, window.tokens, window.skip, stride, each,
            DTYPE=_dtype(values), BLOCK=COLUMNS, **EXACT,
        )  # fmt: skip
    return mean.cpu().numpy(), np.asarray(np.sqrt(deviation.cpu().numpy()))


def quantise(values: Any, window: Window, by: Uniform) -> tuple[rans.Symbols, rans.Symbols]:
    """See planes.quantise."""
    planes, heads, stride, dim = values.shape
    sym = _new(values, (planes * heads * dim, window.tokens), torch.uint8)
    escaped = _new(values, (planes, window.tokens), torch.uint8)
    mean, inverse = (_up(array, values.device) for array in (by.mean, np.float32(1) / by.step))
    wide, each = _tile(heads * dim)
    with on(values):
        klt.quantise[(planes, -(-window.tokens // each))](
            _words(values), mean, inverse, sym, escaped, heads, dim, window.tokens, window.skip, stride,
            DTYPE=_dtype(values), TOKENS=each, CHANNELS=wide, **EXACT,
        )  # fmt: skip
    return sym.cpu().numpy(), escaped.cpu().numpy()


def forward(values: Any, window: Window, by: Transform, turns: Floats) -> tuple[rans.Symbols, Shifts, rans.Symbols]:
    """See planes.forward."""
    planes, heads, stride, dim = values.shape
    tokens, channels, width = window.tokens, heads * dim, by.forward.shape[2]
    mean, in_scale, matrix, out_scale, kept, turned, starts = _tables(by, values.device)
    rotary = turns.shape[1]
    angles = _up(turns if turns.size else np.zeros(1, np.float32), values.device)
    whole = _new(values, (planes, tokens, channels), torch.int16)
    sums = _new(values, (planes, tokens, width), torch.int32)
    rows = int(by.kept.sum())
    shifts, sym = _new(values, (rows,), torch.int16), _new(values, (rows, tokens), torch.uint8)
    bad, escaped = (_new(values, (planes, tokens), torch.uint8) for _ in range(2))
    wide, each = _tile(max(channels, width))
    blocks, columns = -(-tokens // each), -(-width // COLUMNS)
    with on(values):
        klt.prepare[(planes, blocks)](
            _words(values), mean, in_scale, turned, angles, whole, bad, heads, dim, tokens, window.skip, stride, rotary,
            DTYPE=_dtype(values), TOKENS=each, CHANNELS=wide, **EXACT,
        )  # fmt: skip
        klt.products[(planes, -(-tokens // 32), columns)](
            whole, matrix, sums, tokens, channels, width, TOKENS=32, COLUMNS=COLUMNS, **EXACT
        )
        klt.shifts_of[(planes, columns)](
            sums, out_scale, bad, kept, starts, shifts, tokens, width, COLUMNS=COLUMNS, **EXACT
        )
        klt.symbols_of[(planes, blocks)](
            sums, out_scale, bad, kept, starts, shifts, sym, escaped, tokens, width, TOKENS=each, COLUMNS=wide, **EXACT
        )
    return sym.cpu().numpy(), shifts.cpu().numpy(), escaped.cpu().numpy()


def _tables(by: Transform, device: Any) -> tuple[Any, ...]:
    """Of the transform on this device, uploaded once."""
    if device not in by.uploaded:
        starts = np.cumsum(by.kept) - by.kept
        arrays = (by.mean, by.in_scale, by.forward, by.out_scale, by.kept, by.turned, starts)
        by.uploaded[device] = tuple(_up(array, device) for array in arrays)
    return by.uploaded[device]


def _tile(channels: int) -> tuple[int, int]:
    """(channels of a program, its tokens)."""
    wide = power(channels)
    return wide, max(TILE_VALUES // wide, 1)


def _dtype(values: Any) -> int:
    return F32 if values.dtype == torch.float32 else BF16


def _words(values: Any) -> Any:
    return values.view(torch.int32) if values.dtype == torch.float32 else values


def _new(like: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    return torch.empty(shape, dtype=dtype, device=like.device)


def _up(array: Any, device: Any) -> Any:
    return torch.tensor(array).to(device)
