"""The wire bench: verdicts of pairs, options, and a small run on fake engines whose KV really crosses in frames."""

import json
import random
from pathlib import Path

import pytest

from pdxfer.bench import wire
from pdxfer.bench.verdict import MIN_PAIRS, interval, verdict
from pdxfer.core.errors import ConfigError


def ratios(middle: float, spread: float, count: int = MIN_PAIRS) -> list[float]:
    source = random.Random(1)
    return [middle + spread * source.uniform(-1, 1) for _ in range(count)]


@pytest.mark.parametrize(
    ("middle", "spread", "expected"),
    [(1.0, 0.02, "passed"), (1.1, 0.02, "failed"), (1.0, 0.4, "undecided")],
)
def test_the_interval_decides_or_says_that_it_cannot(middle: float, spread: float, expected: str) -> None:
    found = ratios(middle, spread)
    bounds = interval(found)
    assert bounds.low <= sorted(found)[len(found) // 2] <= bounds.high
    assert verdict(found, 1.03) == expected


def test_a_bar_near_one_takes_twenty_pairs_and_another_does_not() -> None:
    assert verdict(ratios(0.9, 0.01, MIN_PAIRS - 1), 1.03) == "undecided"
    assert verdict(ratios(0.6, 0.01, 9), 0.75) == "passed"


def test_arms_without_raw_and_unknown_ones_are_refused() -> None:
    assert wire.parse([]).arms == ("raw", "lossless", "wire")
    for arms in ("wire", "raw,zip"):
        with pytest.raises(ConfigError, match="--arms"):
            wire.parse(["--arms", arms])


@pytest.mark.slow
def test_a_small_run_prints_one_object_and_sends_frames(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Raw against lossless frames, over loopback: prefill takes long enough for decode's credits to be there."""
    argv = ["--links", "fast", "--arms", "raw,always", "--reps", "2", "--warmups", "1", "--len", "1024"]
    argv += ["--prefill-tokens-per-s", "4000", "--json", "--out", str(tmp_path)]
    assert wire.main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    raw, always = report["results"]
    assert (raw["arm"], raw["frames"], raw["vs_raw"]) == ("raw", 0, 1.0)
    assert always["frames"] > 0 and always["saved_mib"] > 0 and always["pairs"] == 2
    assert {"always_vs_raw_fast", "always_vs_raw_fast_95", "kv_bytes_per_token"} <= set(report["summary"])
    assert json.loads((tmp_path / "wire.json").read_text())["results"] == report["results"]
