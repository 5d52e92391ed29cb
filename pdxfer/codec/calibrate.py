"""From statistics of a model's KV to the tables of klt: pure arithmetic, no model.

`Moments` collects them window by window (calibrate_model.py feeds it): mean and covariance of the values with RoPE off,
and the mean square of the gradient of the model's log probabilities by each channel, which is how much one unit of
error there costs in KL (Fisher information). Channels are scaled by its root; then one step for all of them is the best
there is, and a principal component analysis takes out what they share.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pdxfer.codec import planes
from pdxfer.codec.klt_tables import NAME, classes
from pdxfer.codec.tables import TableFile
from pdxfer.core.errors import ConfigError

Array = npt.NDArray[Any]

MAX_PLANE_CHANNELS = 256
"""Of a transform: cost per value grows with it."""
SHRINK = 0.5
"""Part of a plane's mean weight that is added to each channel: text that was not seen may need what this did not."""
TARGET_KL = {1: 0.0005, 2: 0.001, 3: 0.002, 4: 0.004, 5: 0.008, 6: 0.016, 7: 0.032}
"""Level → KL it is made for."""
DEFAULT_LEVEL = 4
IN_RANGE = 24.0
"""Standard deviations from the mean that the transform's input holds; beyond, a token is kept exact."""
IN_LIMIT, OUT_LIMIT = 8191, 127
WEIGHT_LIMIT = 32767


class Moments:
    """Sums over calibration windows; float64."""

    def __init__(
        self, shape: tuple[int, int, int, int], inverse_wavelengths: npt.NDArray[np.float64], num_ranks: int = 1
    ) -> None:
        """`shape`: [L, 2, H, D]. No wavelengths: RoPE stays on. `num_ranks`: that the tables can be cut for."""
        layers, _, heads, dim = shape
        self.shape = shape
        self.inverse_wavelengths = inverse_wavelengths
        self.groups = groups_of(heads, dim, num_ranks)
        self._channels = heads // self.groups * dim
        planes_shape = (layers * 2 * self.groups, self._channels)
        self._sum = np.zeros(planes_shape)
        self._products = np.zeros((*planes_shape, self._channels))
        self._weight = np.zeros(planes_shape)
        self._tokens = self._samples = 0

    def add_values(self, values: Array, first_token: int) -> None:
        """`values`: float32 [L, 2, H, T, D] of consecutive tokens."""
        for p, x in enumerate(self._turned(values, first_token)):
            wide = x.astype(np.float64)
            self._sum[p] += wide.sum(0)
            self._products[p] += wide.T @ wide
        self._tokens += values.shape[3]

    def add_gradients(self, gradients: Array, first_token: int, num_probes: int) -> None:
        """Gradients of the sum of log probabilities of `num_probes` sampled tokens, by the same values."""
        for p, g in enumerate(self._turned(gradients, first_token)):
            self._weight[p] += np.square(g.astype(np.float64)).sum(0) / num_probes
        self._samples += 1

    def _turned(self, values: Array, first_token: int) -> Array:
        layers, _, heads, tokens, dim = values.shape
        x = np.ascontiguousarray(values, dtype=np.float32).copy()
        if self.inverse_wavelengths.size:
            angles = planes.angles(np.arange(first_token, first_token + tokens), self.inverse_wavelengths)
            x[:, 0] = unturn(x[:, 0], angles)
        grouped = x.reshape(layers * 2 * self.groups, heads // self.groups, tokens, dim)
        return grouped.transpose(0, 2, 1, 3).reshape(len(grouped), tokens, self._channels)

    def result(self) -> "Statistics":
        """What was collected. Raises ConfigError where it is too little."""
        if self._tokens < 2 * self._channels or not self._samples:
            raise ConfigError(
                f"{self._tokens} calibration tokens are too few for {self._channels} channels a plane: give more text"
            )
        mean = self._sum / self._tokens
        covariance = self._products / self._tokens - mean[:, :, None] * mean[:, None, :]
        return Statistics(self, mean, covariance, self._weight / self._samples)


class Statistics:
    """Mean [P, C], covariance [P, C, C], weight [P, C] of a model's KV."""

    def __init__(self, moments: Moments, mean: Array, covariance: Array, weight: Array) -> None:
        self.shape, self.groups = moments.shape, moments.groups
        self.inverse_wavelengths = moments.inverse_wavelengths
        self.mean, self.covariance, self.weight = mean, covariance, weight

    def expected_step(self, kl: float) -> float:
        """Step that costs `kl` if errors are small and independent: KL = 1/2 sum(weight * error^2)."""
        return float(np.sqrt(24 * kl / self.mean.size))


def groups_of(heads: int, dim: int, num_ranks: int = 1) -> int:
    """Fewest equal groups of heads with at most MAX_PLANE_CHANNELS channels, a multiple of 16, none on two ranks."""
    if heads % num_ranks and num_ranks % heads:
        raise ConfigError(f"{heads} KV heads cannot be dealt to {num_ranks} ranks: neither divides the other")
    most = max(heads // num_ranks, 1)
    for groups in range(1, heads + 1):
        channels = heads // groups * dim
        if (
            heads % groups == 0
            and most % (heads // groups) == 0
            and channels <= MAX_PLANE_CHANNELS
            and channels % 16 == 0
        ):
            return groups
    raise ConfigError(f"klt cannot be calibrated for {heads} KV heads of {dim}: no group of heads fits the transform")


def unturn(x: Array, angles: Array) -> Array:
    """[..., T, D] with RoPE taken off its first 2 x half dims."""
    half = angles.shape[1] // 2
    cosine, sine = angles[:, :half], angles[:, half:]
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cosine + b * sine, b * cosine - a * sine, x[..., 2 * half :]], axis=-1)


def make_klt(found: Statistics, steps: Mapping[int, float], facts: Mapping[str, Any]) -> TableFile:
    """Tables with these steps per level; `facts` says how they were made."""
    scale = np.sqrt(found.weight + SHRINK * found.weight.mean(1, keepdims=True) + 1e-30)
    weighted = found.covariance * scale[:, :, None] * scale[:, None, :]
    variance, components = np.linalg.eigh(weighted)
    variance, components = variance[:, ::-1], components[:, :, ::-1]
    spread = np.sqrt(np.maximum(variance, 0))
    deviation = np.sqrt(np.maximum(np.einsum("pcc->pc", found.covariance), 1e-12))
    in_scale = (IN_LIMIT / IN_RANGE / deviation).astype(np.float32)
    forward = components.transpose(0, 2, 1) * (scale / in_scale)[:, None, :]
    inverse = components.transpose(0, 2, 1) / scale[:, None, :]
    forward_gain = _gain(np.abs(forward), axis=2, bound=((1 << 31) - 1) / IN_LIMIT)
    inverse_gain = _gain(np.abs(inverse), axis=1, bound=((1 << 24) - 1) / OUT_LIMIT)
    ordered = sorted(steps)
    kinds = np.stack([classes(spread / steps[level]) for level in ordered])
    return TableFile(
        NAME,
        {
            "shape": list(found.shape),
            "groups": found.groups,
            "inverse_wavelengths": found.inverse_wavelengths.tolist(),
            "steps": {str(level): steps[level] for level in ordered},
            "default_level": DEFAULT_LEVEL,
            **facts,
        },
        {
            "mean": found.mean.astype(np.float32),
            "in_scale": in_scale,
            "forward": _pairs(np.rint(forward * forward_gain[:, :, None]).transpose(0, 2, 1)),
            "out_scale": (1 / forward_gain).astype(np.float32),
            "inverse": _pairs(np.rint(inverse * inverse_gain[:, None, :])),
            "scale": (1 / inverse_gain).astype(np.float32),
            "classes": kinds,
            "kept": (kinds > 0).sum(2, dtype=np.int64),  # class 0, a spread below 0.27 steps, is not worth its time
        },
    )


def _gain(magnitudes: Array, axis: int, bound: float) -> Array:
    """Largest factor that keeps rounded weights in 16 bits and their sums below `bound`."""
    largest = np.maximum(magnitudes.max(axis), 1e-30)
    total = np.maximum(magnitudes.sum(axis), 1e-30)
    room = bound - magnitudes.shape[axis] / 2 - 1  # rounding may add half to each
    return np.asarray(np.minimum(WEIGHT_LIMIT / largest, room / total).astype(np.float64))


def _pairs(matrix: Array) -> npt.NDArray[np.int16]:
    """[P, n, m] → pair matrices [P, n / 2, m, 2]; m is a multiple of 16 as C is."""
    planes_, rows, columns = matrix.shape
    return np.ascontiguousarray(matrix.reshape(planes_, rows // 2, 2, columns).transpose(0, 1, 3, 2)).astype(np.int16)
