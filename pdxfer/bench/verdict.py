"""What a run of interleaved pairs says about a bar: a bootstrap interval of the median ratio, and passed, failed or
undecided. A bar within a tenth of 1.0 is below what single rounds differ by: it takes MIN_PAIRS to judge it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_PAIRS = 20
NEAR = 0.1
_NUM_RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Interval:
    """95 % of the medians of resampled pairs."""

    low: float
    high: float


def interval(ratios: Sequence[float], seed: int = 0) -> Interval:
    """Of the median of these ratios, one a pair."""
    values = np.asarray(ratios, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, values.size, (_NUM_RESAMPLES, values.size))
    low, high = np.quantile(np.median(values[picks], axis=1), (0.025, 0.975))
    return Interval(float(low), float(high))


def verdict(ratios: Sequence[float], bar: float) -> str:
    """Whether the median is at most `bar`: `passed` or `failed` where the whole interval says so, else `undecided`."""
    if abs(bar - 1.0) <= NEAR and len(ratios) < MIN_PAIRS:
        return "undecided"
    found = interval(ratios)
    if found.high <= bar:
        return "passed"
    return "failed" if found.low > bar else "undecided"
