"""From latencies to figures: table rows, ratios of medians, and the keys that others read. Pure."""

import statistics
from collections.abc import Mapping, Sequence

from pdxfer.bench.report import Value
from pdxfer.bench.reuse_measure import Figures, MissOnly
from pdxfer.bench.reuse_work import BURST
from pdxfer.bench.verdict import interval, verdict

_DIGITS = 4
_MISS_BAR = 1.03
_MISS_KEYS = tuple(f"miss_only_{what}{kind}" for what in ("ttft", "burst") for kind in ("", "_interval", "_verdict"))


def summary(arms: Mapping[str, Figures], misses: MissOnly | None) -> dict[str, Value]:
    """Ratios; None for what this run did not measure. Speed-ups are those of the memory tier over no cache at all."""
    none, dram, disk = (arms.get(name, Figures()) for name in ("none", "dram", "disk"))
    return {
        "warm_dram_3500": _ratio(dram.long_s, none.long_s),
        "warm_disk_3500": _ratio(disk.long_s, none.long_s),
        "vs_lmcache_mp": _ratio(dram.long_s, arms["lmcache-mp"].long_s) if "lmcache-mp" in arms else None,
        **(_misses(misses) if misses else dict.fromkeys(_MISS_KEYS)),
        "longdoc_speedup": _ratio(none.latencies_s.get("longdoc", ()), dram.latencies_s.get("longdoc", ())),
        "multiturn_speedup": _ratio(none.latencies_s.get("chat", ()), dram.latencies_s.get("chat", ())),
        "multiturn_even_speedup": _ratio(none.latencies_s.get("even chat", ()), dram.latencies_s.get("even chat", ())),
        "batch_speedup": round(none.batch_s / dram.batch_s, _DIGITS) if none.batch_s and dram.batch_s else None,
    }


def rows(arms: Mapping[str, Figures], misses: MissOnly | None) -> list[dict[str, Value]]:
    """One row for each arm and workload; latencies in ms, the batch as its rate."""
    found: list[dict[str, Value]] = []
    for name, figures in arms.items():
        for work, samples in figures.latencies_s.items():
            found.append(_row(name, work, samples))
        found.append(_row(name, "long prompt again, first token", figures.long_s))
        rate = figures.num_batch / figures.batch_s if figures.batch_s else None
        found.append(
            {"arm": name, "workload": "batch", "count": figures.num_batch, "median_ms": None, "max_ms": None,
             "requests_per_s": rate, "tokens_loaded": figures.loaded_tokens}
        )  # fmt: skip
    if misses is not None:
        found.append(_row("none", "new prompt, first token", misses.plain_s))
        found.append(_row("dram", "new prompt, first token", misses.stored_s))
        found.append(_row("none", f"{BURST} new prompts at once", misses.plain_burst_s))
        found.append(_row("dram", f"{BURST} new prompts at once", misses.stored_burst_s))
    return found


def _misses(misses: MissOnly) -> dict[str, Value]:
    """Medians of the pairs' ratios, their bootstrap intervals, and whether 3 % are kept."""
    found: dict[str, Value] = {}
    for what, ours, theirs in (
        ("ttft", misses.stored_s, misses.plain_s),
        ("burst", misses.stored_burst_s, misses.plain_burst_s),
    ):
        ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
        around = interval(ratios)
        found[f"miss_only_{what}"] = round(statistics.median(ratios), _DIGITS)
        found[f"miss_only_{what}_interval"] = f"{around.low:.3f}..{around.high:.3f}"
        found[f"miss_only_{what}_verdict"] = verdict(ratios, _MISS_BAR)
    return found


def _row(arm: str, work: str, samples: Sequence[float]) -> dict[str, Value]:
    return {
        "arm": arm,
        "workload": work,
        "count": len(samples),
        "median_ms": statistics.median(samples) * 1000 if samples else None,
        "max_ms": max(samples) * 1000 if samples else None,
        "requests_per_s": None,
        "tokens_loaded": None,
    }


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    return round(statistics.median(ours) / statistics.median(theirs), _DIGITS) if ours and theirs else None
