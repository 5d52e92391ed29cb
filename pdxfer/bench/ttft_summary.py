"""From answers to figures: result rows, percentiles, ratios of medians, and the keys that others read. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdxfer.bench.ttft_load import Answer
from pdxfer.bench.ttft_measure import Gaps
from pdxfer.bench.ttft_options import Options

_PEERS = {
    "one": "vs_one_engine_{length}",
    "nixl-pull": "vs_nixl_pull_{length}",
    "nixl-push": "vs_nixl_push_{length}",
    "nixl-pull-stock": "vs_nixl_pull_{length}_stock",
    "nixl-push-stock": "vs_nixl_push_{length}_stock",
}
"""Arm → key of pdxfer's median TTFT over that arm's."""
_DIGITS = 4
_MIB = 1 << 20


@dataclass(slots=True, kw_only=True)
class Measured:
    """What one arm gave."""

    answers: dict[int, list[Answer]] = field(default_factory=dict)
    """Length → answers, one request at a time."""
    at_rate: list[Answer] = field(default_factory=list)
    gaps: Gaps | None = None
    link_bytes: dict[int, int] = field(default_factory=dict)
    """Length → bytes that crossed the link while its answers were measured; empty without a link."""
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


def rows(arms: Mapping[str, Measured], options: Options) -> list[dict[str, Any]]:
    """All results, a row for each figure of each arm: plain values are columns of the table, lists and mappings (all
    samples, medians of the stages) are for the JSON only. Times in ms."""
    found: list[dict[str, Any]] = []
    for name, measured in arms.items():
        found += [_length_row(name, measured, length) for length in measured.answers]
        if measured.at_rate:
            found.append(_rate_row(name, measured, options.rate))
        if measured.gaps:
            found += _gaps_rows(name, measured.gaps, max(options.lens))
    return found


def _length_row(name: str, measured: Measured, length: int) -> dict[str, Any]:
    answers = measured.answers[length]
    row = _row("ttft", name, length, [answer.ttft_s for answer in answers])
    exposed = _stage_ms(answers, "exposed_transfer")
    if exposed:
        row["exposed_ms"] = statistics.median(exposed)
        row["all_exposed_ms"] = exposed
        row["all_landed_after_ms"] = [answer.landed_after_ms for answer in answers]
        row["stages_ms"] = {name: statistics.median(_stage_ms(answers, name)) for name in answers[0].stages_ms}
    if length in measured.socket_s:
        row["socket_ms"] = measured.socket_s[length] * 1000
    moved = [answer.moved for answer in answers if answer.moved]
    if moved:
        row |= {"kv_mib": max(what.num_bytes for what in moved) / _MIB, "channel": moved[0].channel}
        row["units"] = [what.num_units for what in moved]
    if length in measured.link_bytes:
        row["link_mib"] = measured.link_bytes[length] / len(answers) / _MIB
    return row


def _rate_row(name: str, measured: Measured, rate: float) -> dict[str, Any]:
    samples = [answer.ttft_s for answer in measured.at_rate]
    row = _row(f"ttft at {rate:g}/s", name, None, samples)
    row |= {f"p{percent}_ms": percentile(samples, percent) * 1000 for percent in (90, 99)}
    return row | {"alone": sum(bool(answer.alone_because) for answer in measured.at_rate)}


def _gaps_rows(name: str, gaps: Gaps, length: int) -> list[dict[str, Any]]:
    """Between two tokens of a running stream: alone, and while a prompt of `length` is read."""
    return [
        _row("token gap, idle", name, None, gaps.idle_s),
        _row("token gap, under prefill", name, length, gaps.busy_s),
    ]


def _row(measure: str, arm: str, length: int | None, samples_s: Sequence[float]) -> dict[str, Any]:
    return {
        "measure": measure,
        "arm": arm,
        "tokens": length,
        "count": len(samples_s),
        "median_ms": statistics.median(samples_s) * 1000,
        "max_ms": max(samples_s) * 1000,
        "all_ms": [sample * 1000 for sample in samples_s],
    }


def _stage_ms(answers: Sequence[Answer], stage: str) -> list[float]:
    return [answer.stages_ms[stage] for answer in answers if stage in answer.stages_ms]


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return round(ours / theirs, _DIGITS) if ours is not None and theirs else None
