"""The arithmetic of CacheGen's quantiser, and its offline tables: one distribution per (layer, K or V, channel).

A chunk's tokens form groups of 10: the first is the anchor, 8 bits with a scale per vector; the others are coded as
their difference to the decoded anchor, with a step that grows with depth. `Histograms` counts symbols over calibration
text; the tables of a level hold frequencies and steps. Used by cachegen.py and calibrate_model.py.

Shape letters: P planes (layer, K or V), T tokens, A anchors, E other tokens, C channels (heads and dims).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pdxfer.codec import rans
from pdxfer.codec.tables import TableFile, TablesError

Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

NAME = "cachegen"
GROUP = 10
"""Tokens of a group: the paper's."""
DEPTH_GRADES = (0.5, 1.0, 1.5)
"""Step of the first, second and last third of the layers: the paper's."""
LEVELS = {1: 0.2, 2: 0.3, 3: 0.5, 4: 0.7, 5: 1.0, 6: 1.5}
"""Level → factor on those, in standard deviations of the plane's differences; the paper's is 1."""
DEFAULT_LEVEL = 3
SYMBOL_LIMIT = 127
CHUNK = 256


def grades(num_layers: int) -> Floats:
    """[P]: the depth grade of each plane."""
    by_layer = [DEPTH_GRADES[layer * len(DEPTH_GRADES) // num_layers] for layer in range(num_layers)]
    return np.repeat(np.array(by_layer, np.float32), 2)


def is_anchor(num_tokens: int) -> npt.NDArray[np.bool_]:
    """[T]: the first of each group."""
    return np.asarray(np.arange(num_tokens) % GROUP == 0)


def code_anchors(anchors: Floats) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint16], Floats]:
    """[P, A, C] → symbols, scales [P, A] (bfloat16 bits), decoded."""
    largest = np.abs(anchors).max(2, initial=0)
    bits = (largest / SYMBOL_LIMIT).astype(np.float32).view(np.uint32)
    scales = np.where(largest > 0, (bits >> 16) + 1, 0x3F80).astype(np.uint16)  # rounded up: none overflows
    sym = (np.rint(anchors / widen(scales)[..., None]) + 128).astype(np.uint8)
    return sym, scales, decode_anchors(sym, scales)


def decode_anchors(sym: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint16]) -> Floats:
    """Back to [P, A, C]."""
    return np.asarray((sym.astype(np.float32) - np.float32(128)) * widen(scales)[..., None])


def widen(bits: npt.NDArray[np.uint16]) -> Floats:
    """bfloat16 bits → float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def differences(x: Floats, decoded: Floats) -> Floats:
    """[P, E, C]: other tokens minus their group's anchor."""
    anchor = is_anchor(x.shape[1])
    return np.asarray(x[:, ~anchor] - np.repeat(decoded, GROUP, axis=1)[:, : x.shape[1]][:, ~anchor])


def rows(sym: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """[P, n, C] → rows [P * C, n]."""
    planes, count, channels = sym.shape
    return np.ascontiguousarray(sym.transpose(0, 2, 1)).reshape(planes * channels, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offline:
    """Tables of one level."""

    shape: tuple[int, ...]
    """[L, 2, H, D]."""
    digest: bytes
    step: Floats
    """[P]."""
    anchors: rans.Freq
    """[P * C, 256]."""
    deltas: rans.Freq
    """[P * C, 256]."""

    @classmethod
    def parse(cls, data: bytes) -> "Offline":
        """Raises TablesError."""
        file = TableFile.from_bytes(data, NAME)
        try:
            shape = tuple(int(n) for n in file.facts["shape"])
            layers, two, heads, dim = shape
            found = cls(
                shape=shape, digest=file.digest, step=file.arrays["step"],
                anchors=file.arrays["anchors"], deltas=file.arrays["deltas"],
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise TablesError(f"cachegen tables are damaged: {error}") from error
        num_rows = layers * 2 * heads * dim
        sizes = (found.step.shape, found.anchors.shape, found.deltas.shape)
        dtypes = (str(found.step.dtype), str(found.anchors.dtype), str(found.deltas.dtype))
        if two != 2 or sizes != ((layers * 2,), (num_rows, 256), (num_rows, 256)):
            raise TablesError(f"cachegen tables for {shape} hold {sizes}")
        if dtypes != ("float32", "uint16", "uint16") or not (np.isfinite(found.step) & (found.step > 0)).all():
            raise TablesError(f"cachegen tables hold {dtypes}, or steps that are none")
        return found

    def fits(self, shape: tuple[int, int, int, int, int]) -> bool:
        """Made for chunks of this [L, 2, H, T, D], of any T."""
        return self.shape == (*shape[:3], shape[4])


class Histograms:
    """Symbol counts over calibration windows. Steps are those of the first window."""

    def __init__(self, shape: tuple[int, int, int, int]) -> None:
        layers, _, heads, dim = shape
        self._shape = shape
        num_rows = layers * 2 * heads * dim
        self._anchors = np.zeros((num_rows, 256), np.uint32)
        self._deltas = {level: np.zeros((num_rows, 256), np.uint32) for level in LEVELS}
        self._spread: Floats | None = None

    def add(self, values: Array) -> None:
        """`values`: float32 [L, 2, H, T, D]."""
        layers, _, heads, tokens, dim = values.shape
        x = np.ascontiguousarray(values.transpose(0, 1, 3, 2, 4)).reshape(layers * 2, tokens, heads * dim)
        every = np.arange(len(self._anchors), dtype=np.uint32)
        for first in range(0, tokens, CHUNK):
            sym, _, decoded = code_anchors(x[:, first : first + CHUNK][:, ::GROUP])
            delta = differences(x[:, first : first + CHUNK], decoded)
            if self._spread is None:
                self._spread = delta.std((1, 2)).astype(np.float32)
            self._anchors += rans.count(rows(sym), every, len(every))
            for level, counts in self._deltas.items():
                step = self._spread * grades(layers) * np.float32(LEVELS[level])
                q = np.clip(np.rint(delta / step[:, None, None]), -SYMBOL_LIMIT, SYMBOL_LIMIT) + 128
                counts += rans.count(rows(q.astype(np.uint8)), every, len(every))

    def tables(self, facts: Mapping[str, Any]) -> list[TableFile]:
        """One file a level."""
        assert self._spread is not None, "add came first"
        spread = np.maximum(self._spread, 1e-30)
        anchors = rans.frequencies(_smoothed(self._anchors))
        return [
            TableFile(
                NAME,
                {"shape": list(self._shape), "level": level, **facts},
                {
                    "step": spread * grades(self._shape[0]) * np.float32(factor),
                    "anchors": anchors,
                    "deltas": rans.frequencies(_smoothed(self._deltas[level])),
                },
            )
            for level, factor in LEVELS.items()
        ]


def of_heads(whole: TableFile, heads: range) -> TableFile:
    """Tables for these heads alone: the distributions of their channels."""
    layers, two, num_heads, dim = whole.facts["shape"]
    arrays = dict(whole.arrays)
    for name in ("anchors", "deltas"):
        by_head = arrays[name].reshape(layers * two, num_heads, dim * 256)
        arrays[name] = by_head[:, heads.start : heads.stop].reshape(-1, 256)
    facts = {**whole.facts, "shape": [layers, two, len(heads), dim], "first_head": heads.start}
    return TableFile(NAME, facts, arrays)


def _smoothed(counts: Array) -> Array:
    """Counts with the least chance for what lies between, or two beside, the symbols seen, and for 128."""
    seen = counts > 0
    order = np.arange(256)
    first = np.minimum(np.where(seen.any(1), seen.argmax(1), 128), 128) - 2
    last = np.maximum(np.where(seen.any(1), 255 - seen[:, ::-1].argmax(1), 128), 128) + 2
    near = (order >= first[:, None]) & (order <= last[:, None])
    return np.where(near, np.maximum(counts.astype(np.int64) * 16, 1), 0)
