"""What the codec bench compares: our codecs at their levels, and CacheGen as its first release has it.

The released CacheGen codes no differences: per token and layer one scale, 32 or 16 bins by layer, one distribution per
(layer, channel) and chunk in the blob. Counted kindly: its tables deflated, where the release ships them as they are.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pdxfer.codec import rans
from pdxfer.codec.base import ChunkSpec, Codec, Tables
from pdxfer.codec.cachegen import CacheGenCodec
from pdxfer.codec.calibrate_model import narrow, roundtrip, widen
from pdxfer.codec.fp8 import Fp8Codec
from pdxfer.codec.kernels.jit import JitKernels
from pdxfer.codec.klt import KltCodec
from pdxfer.codec.registry import codec as by_name

Array = npt.NDArray[Any]


class Arm(Protocol):
    """One point of the plot."""

    @property
    def name(self) -> str:
        """Shown."""
        ...

    @property
    def family(self) -> str:
        """Points of a family make a line."""
        ...

    def through(self, piece: Array, first_token: int) -> tuple[Array, int]:
        """bfloat16 bits [L, 2, H, T, D] as they come back, and the bytes between."""
        ...


@dataclass(frozen=True, slots=True)
class CodecArm:
    """One of our codecs at one level."""

    name: str
    family: str
    codec: Codec

    def through(self, piece: Array, first_token: int) -> tuple[Array, int]:
        """By a real encode and decode."""
        return roundtrip(self.codec, piece, first_token)


@dataclass(frozen=True, slots=True)
class Released:
    """CacheGen of the first release, with `factor` times its bins."""

    factor: int

    @property
    def name(self) -> str:
        """With its bins."""
        return f"cachegen released {32 * self.factor}/{16 * self.factor}"

    @property
    def family(self) -> str:
        """One line."""
        return "cachegen released"

    def bins(self, layer: int, is_value: bool) -> int:
        """LMCache's for 7B models: K 32 in layers 0-9, V 32 in layers 0-1, else 16."""
        return (32 if layer < (2 if is_value else 10) else 16) * self.factor

    def through(self, piece: Array, first_token: int) -> tuple[Array, int]:
        """Quantise as it does, code by rANS."""
        layers, _, heads, tokens, dim = piece.shape
        x = widen(piece).transpose(0, 1, 3, 2, 4).reshape(layers * 2, tokens, heads * dim)
        top = np.array([self.bins(p // 2, p % 2 == 1) // 2 - 1 for p in range(len(x))], np.float32)[:, None, None]
        largest = np.maximum(np.abs(x).max(2, keepdims=True), 1e-20)
        q = np.rint(x * (top / largest))
        sym = np.ascontiguousarray((q + top).astype(np.uint8).transpose(0, 2, 1)).reshape(-1, tokens)
        every = np.arange(len(sym), dtype=np.uint32)
        freq = rans.frequencies(rans.count(sym, every, len(sym)))
        num_bytes = 2 * rans.encode(sym, every, freq).size + len(zlib.compress(freq.tobytes(), 6)) + 2 * largest.size
        back = (q * (largest / top)).reshape(layers, 2, tokens, heads, dim).transpose(0, 1, 3, 2, 4)
        return narrow(np.ascontiguousarray(back)), num_bytes


def arms(tables: Tables) -> list[Arm]:
    """All of them."""
    single = [CodecArm(name, name, by_name(name)) for name in ("lossless", "zstd", "int8", "fp8", "int4")]
    found: list[Arm] = [*single]
    found += [CodecArm(f"klt {n}", "klt", KltCodec(n, tables)) for n in (3, 4, 5, 6)]
    found += [CodecArm(f"klt uncalibrated {n}", "klt uncalibrated", KltCodec(n)) for n in (3, 4, 5, 6)]
    found += [CodecArm(f"cachegen {n}", "cachegen", CacheGenCodec(n, tables)) for n in (1, 2, 3, 5)]
    found += [CodecArm(f"cachegen own tables {n}", "cachegen own tables", CacheGenCodec(n)) for n in (1, 3)]
    found += [Released(factor) for factor in (4, 2, 1)]
    return found


def timed(tables: Tables) -> dict[str, Codec]:
    """Codecs whose rates are taken: each at its default level, klt in four ways; `numba`: without the C library."""
    found = {name: by_name(name, 0, tables) for name in ("lossless", "zstd", "int8", "fp8", "int4", "cachegen", "klt")}
    return {
        **found,
        "fp8_numba": Fp8Codec(kernels=JitKernels()),
        "klt_uncal": KltCodec(),
        "klt_numba": KltCodec(0, tables, native=False),
        "klt_uncal_numba": KltCodec(native=False),
    }


def chunk_spec(piece: Array, first_token: int) -> ChunkSpec:
    """Of bfloat16 bits."""
    return ChunkSpec(dtype="bfloat16", shape=piece.shape, first_token=first_token)


def ratio_at(points: Sequence[tuple[float, float]], kl: float) -> float | None:
    """Ratio at this KL on a log-log line through (kl, ratio) points; None where they do not enclose it."""
    ordered = sorted(points)
    for (kl_0, ratio_0), (kl_1, ratio_1) in zip(ordered, ordered[1:], strict=False):
        if kl_0 <= kl <= kl_1 and kl_0 > 0:
            part = np.log(kl / kl_0) / np.log(kl_1 / kl_0) if kl_1 > kl_0 else 0.0
            return float(np.exp(np.log(ratio_0) + part * np.log(ratio_1 / ratio_0)))
    return None
