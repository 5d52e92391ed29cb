"""What klt knows of one model: a transform per plane, RoPE, and a step and classes per level.

Made by calibrate.py, stored by tables.py, used by klt.py. A plane is (layer, K or V, group of heads); groups keep the
transform at no more than 256 channels. `Model` is read-only after it was parsed; any thread.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pdxfer.codec import rans
from pdxfer.codec.planes import MAX_CHANNELS, NO_ANGLES, Floats, Transform, angles
from pdxfer.codec.tables import TableFile, TablesError

NAME = "klt"
NUM_CLASSES = 32
"""Channels share frequency tables by their spread, in steps of a quarter octave."""
CLASS_OF_ONE = 8
"""Class of a spread of one step."""
MAX_STREAMS = 8
"""One costs 256 bytes, and lets one thread more decode a chunk."""


def streams(num_planes: int) -> Iterator[slice]:
    """The planes of each stream of a chunk."""
    each = -(-num_planes // MAX_STREAMS)
    for first in range(0, num_planes, each):
        yield slice(first, min(first + each, num_planes))


def classes(spread_in_steps: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Class of each channel by its standard deviation in steps."""
    octaves = np.log2(np.maximum(spread_in_steps.astype(np.float64), 1e-6))
    return np.asarray(np.clip(np.rint(4 * octaves) + CLASS_OF_ONE, 0, NUM_CLASSES - 1), np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of one model."""

    transform: Transform
    """With this level's step in its scales."""
    table: rans.Rows
    """Class of each coded row, [sum of kept]."""
    parts: list[Transform]
    """The transform of each stream."""


class Model:
    """Parsed tables."""

    def __init__(self, file: TableFile) -> None:
        """Raises TablesError for arrays that do not belong together: the kernels rely on their sizes and bounds."""
        facts, arrays = file.facts, file.arrays
        try:
            self.digest = file.digest
            self.shape = tuple(int(n) for n in facts["shape"])
            self.groups = int(facts["groups"])
            self.default_level = int(facts["default_level"])
            self._wavelengths = np.array(facts["inverse_wavelengths"], np.float64)
            self._steps = {int(k): float(v) for k, v in facts["steps"].items()}
            layers, _, heads, dim = self.shape
            self._planes = layers * 2 * self.groups
            self._channels = heads // self.groups * dim
            self._arrays = {name: self._checked(name, arrays[name]) for name in _SHAPES}
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise TablesError(f"klt tables are damaged: {error}") from error
        self._check_bounds()
        self.levels = {level: self._level(level, i) for i, level in enumerate(sorted(self._steps))}

    def __repr__(self) -> str:
        return f"<klt Model {self.digest.hex()[:12]} shape={self.shape} groups={self.groups} levels={len(self.levels)}>"

    def fits(self, shape: tuple[int, int, int, int, int]) -> bool:
        """Made for chunks of this [L, 2, H, T, D], of any T."""
        return self.shape == (*shape[:3], shape[4])

    def angles(self, first_token: int, tokens: int) -> Floats:
        """RoPE of these positions; of none if the model's is not known."""
        if not self._wavelengths.size:
            return NO_ANGLES
        return angles(np.arange(first_token, first_token + tokens), self._wavelengths)

    def _checked(self, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        dtype, shape = _SHAPES[name]
        width = -(-self._channels // 16) * 16
        sizes = {"P": self._planes, "C": self._channels, "W": width, "h": self._channels // 2, "2": 2}
        expected = tuple(sizes.get(letter, len(self._steps)) for letter in shape)
        if array.dtype != dtype or array.shape != expected:
            raise TablesError(f"klt tables hold {name} as {array.dtype} {array.shape}, not {dtype} {expected}")
        return array

    def _check_bounds(self) -> None:
        layers, two, heads, dim = self.shape
        channels, kept = self._channels, self._arrays["kept"]
        if two != 2 or heads % self.groups or channels > MAX_CHANNELS or channels % 16 or layers < 1:
            raise TablesError(f"klt tables for {self.shape} in {self.groups} groups")
        if 2 * self._wavelengths.size > dim or kept.min() < 0 or kept.max() > channels:
            raise TablesError("klt tables have impossible RoPE or channel numbers")
        forward = np.abs(self._arrays["forward"].astype(np.int64)).sum((1, 3)).max()
        inverse = np.abs(self._arrays["inverse"].astype(np.int64)).sum((1, 3)).max()
        if forward * 8191 >= 1 << 31 or inverse * 127 >= 1 << 24 or self._arrays["classes"].max() >= NUM_CLASSES:
            raise TablesError("klt tables have weights or classes out of range")

    def _level(self, level: int, index: int) -> Level:
        a, step = self._arrays, np.float32(self._steps[level])
        kept = np.ascontiguousarray(a["kept"][index])
        rows = [a["classes"][index, p, :n] for p, n in enumerate(kept)]
        transform = Transform(
            mean=a["mean"], in_scale=a["in_scale"], forward=a["forward"],
            out_scale=np.asarray(a["out_scale"] / step, np.float32), inverse=a["inverse"],
            scale=np.asarray(a["scale"] * step, np.float32), kept=kept,
            turned=np.zeros(self._planes, np.uint8) if not self._wavelengths.size else self._is_key(),
        )  # fmt: skip
        return Level(
            transform=transform,
            table=np.concatenate(rows).astype(np.uint32),
            parts=[transform.part(s) for s in streams(self._planes)],
        )

    def _is_key(self) -> npt.NDArray[np.uint8]:
        return np.asarray(np.arange(self._planes) // self.groups % 2 == 0, np.uint8)


_SHAPES = {
    "mean": ("float32", "PC"),
    "in_scale": ("float32", "PC"),
    "forward": ("int16", "PhW2"),
    "out_scale": ("float32", "PW"),
    "inverse": ("int16", "PhC2"),
    "scale": ("float32", "PC"),
    "classes": ("uint8", "LPC"),
    "kept": ("int64", "LP"),
}
"""Array → dtype and shape: P planes, C channels, h half of them, W channels padded to 16, L levels. Transform says what
they mean; out_scale and scale are for a step of 1. In float32 so that every machine gets the same bits."""


def of_heads(whole: TableFile, heads: range) -> TableFile:
    """Tables for these heads alone: their planes. Raises TablesError where a transform spans others too."""
    layers, two, num_heads, dim = whole.facts["shape"]
    groups = whole.facts["groups"]
    each = num_heads // groups
    if heads.start % each or len(heads) % each:
        raise TablesError(
            f"klt transforms {each} KV heads together, heads {heads.start} to {heads.stop - 1} are no whole groups: "
            f"calibrate with --tensor-parallel {-(-num_heads // len(heads))}"
        )
    first, last = heads.start // each, heads.stop // each

    def cut(array: npt.NDArray[Any], axis: int) -> npt.NDArray[Any]:
        before, after = array.shape[:axis], array.shape[axis + 1 :]
        by_group = array.reshape(*before, layers * two, groups, *after)
        chosen = by_group[(slice(None),) * (axis + 1) + (slice(first, last),)]
        return chosen.reshape(*before, layers * two * (last - first), *after)

    facts = {**whole.facts, "shape": [layers, two, len(heads), dim], "groups": last - first, "first_head": heads.start}
    arrays = {name: cut(whole.arrays[name], shape.index("P")) for name, (_, shape) in _SHAPES.items()}
    return TableFile(NAME, facts, arrays)
