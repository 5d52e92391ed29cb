"""From answers to figures: result rows, percentiles, ratios of medians, and the keys that others read. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdxfer.bench.ttft_load import Answer
from pdxfer.bench.ttft_measure import Gaps

_PEERS = {
    "one": "vs_one_engine_{length}",
    "nixl-pull": "vs_nixl_pull_{length}",
    "nixl-push": "vs_nixl_push_{length}",
    "nixl-pull-stock": "vs_nixl_pull_{length}_stock",
    "nixl-push-stock": "vs_nixl_push_{length}_stock",
}
"""Arm → key of pdxfer's median TTFT over that arm's."""
_DIGITS = 4


@dataclass(slots=True, kw_only=True)
class Measured:
    """What one arm gave."""

    answers: dict[int, list[Answer]] = field(default_factory=dict)
    """Length → answers, one request at a time."""
    at_rate: list[Answer] = field(default_factory=list)
    gaps: Gaps | None = None
    link_bytes: int = 0
    """That crossed the link while `answers` were measured, and the KV of their prompts; 0 without a link."""
    kv_bytes: int = 0
    socket_s: dict[int, float] = field(default_factory=dict)
    """Length → time to send its KV by a plain socket over the same way."""

    def median_ttft_s(self, length: int) -> float | None:
        answers = self.answers.get(length)
        return statistics.median(answer.ttft_s for answer in answers) if answers else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Equality:
    """Outcome of the float32 pass."""

    num_equal: int
    num_total: int
    different_lens: tuple[int, ...] = ()


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed (nearest rank)."""
    assert values and 0 < percent <= 100
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[int(rank) - 1]


def summary(arms: Mapping[str, Measured], lens: Sequence[int], equality: Equality | None) -> dict[str, float | None]:
    """Ratios of medians and the other figures; None for what this run did not measure."""
    figures: dict[str, float | None] = {}
    ours = arms.get("pdxfer", Measured())
    for length in lens:
        for name, key in _PEERS.items():
            figures[key.format(length=length)] = _ratio(
                ours.median_ttft_s(length), arms.get(name, Measured()).median_ttft_s(length)
            )
        figures[f"exposed_fraction_{length}"] = exposed_fraction(ours, length)
    figures["outputs_equal"] = equality.num_equal if equality else None
    figures["outputs_total"] = equality.num_total if equality else None
    for name, suffix in (("pdxfer", ""), ("one", "_one_engine")):
        gaps = arms[name].gaps if name in arms else None
        figures[f"itl_under_prefill{suffix}"] = round(gaps.ratio, _DIGITS) if gaps else None
        figures[f"longest_stall_s{suffix}"] = round(gaps.longest_stall_s, _DIGITS) if gaps else None
    return figures


def exposed_fraction(measured: Measured, length: int) -> float | None:
    """Median time from the end of prefill to the last landed byte, over the time to send the same bytes after it."""
    exposed = _stage_ms(measured.answers.get(length, []), "exposed_transfer")
    return _ratio(statistics.median(exposed) / 1000, measured.socket_s.get(length)) if exposed else None


def rows(arms: Mapping[str, Measured], rate: float) -> list[dict[str, Any]]:
    """All results with all samples, a row for each arm and length, then open loop and gaps."""
    found: list[dict[str, Any]] = []
    for name, measured in arms.items():
        found += [_length_row(name, measured, length) for length in measured.answers]
        if measured.at_rate:
            found.append(_rate_row(name, measured, rate))
        if measured.gaps:
            found.append(_gaps_row(name, measured.gaps))
        if measured.link_bytes:
            found.append({"kind": "link", "arm": name, "bytes": measured.link_bytes, "kv_bytes": measured.kv_bytes})
    return found


def _length_row(name: str, measured: Measured, length: int) -> dict[str, Any]:
    answers = measured.answers[length]
    row: dict[str, Any] = {
        "kind": "ttft",
        "arm": name,
        "tokens": length,
        "ttft_median_s": measured.median_ttft_s(length),
        "ttft_s": [answer.ttft_s for answer in answers],
    }
    if length in measured.socket_s:
        row["socket_s"] = measured.socket_s[length]
    stages = {stage: _stage_ms(answers, stage) for answer in answers[:1] for stage in answer.stages_ms}
    if stages:
        row["stages_median_ms"] = {stage: statistics.median(values) for stage, values in stages.items()}
        row["exposed_transfer_ms"] = stages.get("exposed_transfer", [])
    moved = [answer.moved for answer in answers if answer.moved]
    if moved:
        row["num_bytes"] = [what.num_bytes for what in moved]
        row["num_units"] = [what.num_units for what in moved]
        row["channel"] = moved[0].channel
    return row


def _rate_row(name: str, measured: Measured, rate: float) -> dict[str, Any]:
    samples = [answer.ttft_s for answer in measured.at_rate]
    return {
        "kind": "rate",
        "arm": name,
        "rate": rate,
        "count": len(samples),
        **{f"ttft_p{percent}_s": percentile(samples, percent) for percent in (50, 90, 99)},
        "num_alone": sum(bool(answer.alone_because) for answer in measured.at_rate),
        "ttft_s": samples,
    }


def _gaps_row(name: str, gaps: Gaps) -> dict[str, Any]:
    return {
        "kind": "itl",
        "arm": name,
        "idle_median_s": statistics.median(gaps.idle_s),
        "busy_median_s": statistics.median(gaps.busy_s),
        "ratio": gaps.ratio,
        "longest_stall_s": gaps.longest_stall_s,
        "idle_s": list(gaps.idle_s),
        "busy_s": list(gaps.busy_s),
    }


def _stage_ms(answers: Sequence[Answer], stage: str) -> list[float]:
    return [answer.stages_ms[stage] for answer in answers if stage in answer.stages_ms]


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return round(ours / theirs, _DIGITS) if ours is not None and theirs else None
