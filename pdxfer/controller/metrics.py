"""The router's metrics, brought up to date from a snapshot when somebody scrapes: nothing is recorded per message."""

import threading
from collections import Counter

from pdxfer.controller.history import stages_ms
from pdxfer.controller.members import render_members
from pdxfer.metrics.catalog import EVENTS, MetricSet
from pdxfer.metrics.exporter import render
from pdxfer.router.events import Observed
from pdxfer.router.server import EventRecord
from pdxfer.router.snapshot import Snapshot
from pdxfer.wire.messages import Served

_STATES = ("joining", "ready", "draining", "suspect")
_ROLES = ("prefill", "decode", "both", "unknown")


class RouterMetrics:
    """The metric set of the router process. Thread-safe."""

    def __init__(self) -> None:
        self._metrics = MetricSet("router")
        self._seen: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def render(self, snapshot: Snapshot) -> bytes:
        """All series as of `snapshot`, in Prometheus' text format."""
        with self._lock:
            self._count(snapshot)
            self._gauge(snapshot)
            return render(self._metrics) + render_members(snapshot)

    def on_router(self, item: Observed | EventRecord) -> None:
        """The router's thread: an event, or a request that is over."""
        if isinstance(item, EventRecord):
            if item.kind in EVENTS:
                self._metrics.inc("pdxfer_router_events_total", kind=item.kind)
        elif isinstance(item.report, Served) and item.report.mode in ("pair", "local"):
            for stage, ms in stages_ms(item.report).items():
                self._metrics.observe("pdxfer_router_stage_seconds", ms / 1000, mode=item.report.mode, stage=stage)

    def _count(self, snapshot: Snapshot) -> None:
        for value, total in snapshot.answers.items():
            self._metrics.inc("pdxfer_router_answers_total", self._new("answers", value, total), answer=value)
        for value, total in snapshot.refused.items():
            self._metrics.inc("pdxfer_router_refused_total", self._new("refused", value, total), reason=value)
        self._metrics.inc("pdxfer_router_grants_total", self._new("grants", "", snapshot.num_grants))
        for value, total in snapshot.ended.items():
            self._metrics.inc("pdxfer_router_leases_ended_total", self._new("ended", value, total), outcome=value)
        self._metrics.inc("pdxfer_router_transfer_tokens_total", self._new("tokens", "", snapshot.num_tokens))
        self._metrics.inc("pdxfer_router_transfer_bytes_total", self._new("bytes", "", snapshot.num_bytes))

    def _gauge(self, snapshot: Snapshot) -> None:
        self._metrics.set("pdxfer_router_pairs", snapshot.num_pairs)
        self._metrics.set("pdxfer_router_queued_requests", snapshot.num_queued)
        self._metrics.set("pdxfer_router_leases", snapshot.num_leases)
        self._metrics.set("pdxfer_router_proxies", snapshot.num_proxies)
        decodes = [engine for engine in snapshot.engines if engine.role in ("decode", "both")]
        self._metrics.set("pdxfer_router_credit_blocks", sum(engine.credit_blocks for engine in decodes))
        outstanding = sum(engine.outstanding_tokens for engine in snapshot.engines)
        self._metrics.set("pdxfer_router_outstanding_prefill_tokens", outstanding)
        engines: Counter[tuple[str, str]] = Counter((e.role or "unknown", e.state) for e in snapshot.engines)
        for role in _ROLES:
            for state in _STATES:
                self._metrics.set("pdxfer_router_engines", engines[(role, state)], role=role, state=state)

    def _new(self, name: str, value: str, total: int) -> int:
        """What was added since the last scrape."""
        added = total - self._seen[(name, value)]
        self._seen[(name, value)] = total
        return added
