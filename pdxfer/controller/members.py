"""What members report with their heartbeats, as metrics of the process `node`: made anew at each scrape.

Nothing is remembered, so series vanish with their engine, and a counter restarts when its engine does.
"""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from pdxfer.metrics.catalog import CATALOG, NODE_COUNTS, Metric
from pdxfer.router.snapshot import EngineView, Snapshot

_ROWS = {row.name: row for row in CATALOG if row.process == "node"}
Labels = tuple[str, ...]
Family = CounterMetricFamily | GaugeMetricFamily


def render_members(snapshot: Snapshot) -> bytes:
    """All series of all engines, in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Once(list(_families(snapshot))))
    return generate_latest(registry)


class _Once:
    """Hands out what was made."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Family]:
        yield from self._families


def _families(snapshot: Snapshot) -> Iterator[Family]:
    values: dict[str, dict[Labels, float]] = {name: {} for name in _ROWS}
    for engine in snapshot.engines:
        for name, value in _figures(engine).items():
            values[f"pdxfer_node_{name}"][(engine.engine_id,)] = value
        for (tier, name), value in _tier_figures(engine).items():
            values[f"pdxfer_node_tier_{name}"][(engine.engine_id, tier)] = value
    for name, series in values.items():
        yield _family(_ROWS[name], series)


def _family(row: Metric, series: dict[Labels, float]) -> Family:
    kind = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
    family: Family = kind(row.name, row.help, labels=list(row.labels))
    for labels, value in series.items():
        family.add_metric(list(labels), value)
    return family


def _figures(engine: EngineView) -> dict[str, float]:
    counts = Counter(engine.counts)
    for rank in engine.ranks:
        counts.update(rank.counts)
    return {
        "credit_blocks": engine.credit_blocks,
        "free_blocks": engine.credit_blocks + engine.reserved_blocks,
        "running_requests": engine.num_running,
        "waiting_requests": engine.num_waiting,
        "lag_seconds": max([engine.lag_s, *(rank.lag_s for rank in engine.ranks)]),
        "silent_seconds": engine.silent_s,
        "open_channels": sum(len(rank.channels) for rank in engine.ranks),
        "closed_channels": sum(len(rank.closed) for rank in engine.ranks),
        "known_problems": len(engine.problems) + sum(len(rank.problems) for rank in engine.ranks),
        **{f"{name}_total": counts[name] for name in NODE_COUNTS},
    }


def _tier_figures(engine: EngineView) -> "Counter[tuple[str, str]]":
    found: Counter[tuple[str, str]] = Counter()
    for tier in (tier for rank in engine.ranks for tier in rank.tiers):
        for name, value in (
            ("used_bytes", tier.used_bytes), ("capacity_bytes", tier.capacity_bytes),
            ("pinned_bytes", tier.pinned_bytes), ("stored_values", tier.num_values), ("held_leases", tier.leases),
            ("unreachable_ranks", int(not tier.reachable)), ("hits_total", tier.hits), ("misses_total", tier.misses),
            ("puts_total", tier.puts), ("evictions_total", tier.evictions), ("failures_total", tier.failures),
        ):  # fmt: skip
            found[(tier.kind, name)] += value
    return found
