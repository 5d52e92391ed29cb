"""The one table of every metric of pdxfer, and `MetricSet`: the prometheus objects of one process.

To add a metric, add a row. Names start with pdxfer_<process>_, end in their unit (or _total for counts), and take
label values from closed sets only, so that a client can never grow the number of series. Rows hold no logic; they are
recorded in wrappers and at step ends.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

Process = Literal["proxy", "router", "node", "store"]
Kind = Literal["counter", "gauge", "histogram"]

MEMBERS: tuple[str, ...] = ()
"""Label values that are engine or tier names: bounded by the configuration, not listed here."""

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 600.0)
"""Buckets from a loopback hop to the longest request."""

ENDPOINTS = ("completions", "chat", "responses", "messages", "embeddings", "passthrough")
MODES = ("pair", "local", "none")
OUTCOMES = (
    "ok", "client_error", "engine_error", "overloaded", "busy", "unreachable", "timeout", "disconnected", "broken",
    "internal",
)  # fmt: skip
FALLBACKS = (
    "prompt_list", "n", "best_of", "echo", "prompt_logprobs", "beam_search", "prompt_embeds", "endpoint", "router",
    "router_unreachable", "replay",
)  # fmt: skip
EVENTS = (
    "joined", "left", "suspect", "back", "drain", "undrain", "drained", "mismatch", "role", "policy", "credit_limit",
    "lease_expired", "resumed", "fell_back", "channel_open", "channel_broken", "evicted", "spilled", "tier_away",
    "tier_back", "proxy_joined", "proxy_left",
)  # fmt: skip
"""Kinds of event; `GET /v1/events` has their details."""
NODE_COUNTS: dict[str, tuple[str, str]] = {
    "received_transfers": ("transfers", "Prompts whose KV was received completely."),
    "received_bytes": ("bytes", "KV bytes received and verified."),
    "received_units": ("units", "Units received and verified."),
    "resumed_transfers": ("transfers", "Receives whose prefill failed and that another prefill engine took over."),
    "failed_transfers": ("transfers", "Receives that failed; the missing tail was recomputed."),
    "recomputed_blocks": ("blocks", "Blocks recomputed after failed receives."),
    "fallbacks": ("prompts", "Prompts computed by decode although a prefill was paired."),
    "sent_transfers": ("transfers", "Prompts whose KV was sent completely."),
    "unsent_transfers": ("transfers", "Prompts whose KV was not (completely) sent."),
    "loaded_requests": ("prompts", "Prompts of which the store filled blocks."),
    "loaded_chunks": ("chunks", "Chunks loaded from the store and verified."),
    "loaded_bytes": ("bytes", "KV bytes loaded from the store."),
    "load_failures": ("loads", "Loads that came up short; the rest was computed."),
    "saved_chunks": ("chunks", "Chunks copied out for the store."),
    "saved_bytes": ("bytes", "KV bytes copied out for the store."),
    "dropped_saves": ("chunks", "Chunks that were not saved: too much was waiting."),
    "stored_values": ("values", "Values that tiers took; a chunk kept in two tiers counts twice."),
    "corrupt_chunks": ("chunks", "Stored values that were damaged or foreign, and were removed."),
    "spilled_prompts": ("prompts", "Prompts whose KV went to the store because no grant came."),
    "served_values": ("values", "Stored values that other nodes read from this one."),
    "served_bytes": ("bytes", "Their bytes."),
    "corrupt_units": ("units", "Units whose digest was wrong on arrival; they were not used."),
    "rejected_units": ("units", "Units that no live grant expected; they were not taken."),
    "wire_frames": ("units", "Units that were sent as codec frames."),
    "wire_raw_units": ("units", "Units that were sent as they are although codecs were allowed."),
    "wire_saved_bytes": ("bytes", "Bytes that codecs spared the wire."),
    "wire_bad_frames": ("frames", "Codec frames that were damaged, foreign or not allowed; they were not used."),
}
"""What engines count and send with their heartbeats: name → unit, help. Exported as pdxfer_node_<name>_total."""
STAGES = ("queue", "prefill", "exposed_transfer", "decode_wait", "first_decode", "ttft")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One row of the table."""

    name: str
    kind: Kind
    unit: str
    """Of the value: seconds, bytes, or what is counted."""
    help: str
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Label → its closed set of values; MEMBERS where configuration bounds it."""
    buckets: tuple[float, ...] = SECONDS
    """Histograms only."""

    @property
    def process(self) -> str:
        """Which process exports it: the second word of the name."""
        return self.name.split("_")[1]


_TIER_ROWS: tuple[tuple[str, Kind, str, str], ...] = (
    ("used_bytes", "gauge", "bytes", "Bytes in use."),
    ("capacity_bytes", "gauge", "bytes", "Limit; 0: the tier does not know."),
    ("pinned_bytes", "gauge", "bytes", "Bytes that may not be evicted."),
    ("stored_values", "gauge", "values", "Values there."),
    ("held_leases", "gauge", "leases", "Values that are being read."),
    ("unreachable_ranks", "gauge", "ranks", "Ranks whose tier does not answer."),
    ("hits_total", "counter", "values", "Values found."),
    ("misses_total", "counter", "values", "Values not found."),
    ("puts_total", "counter", "values", "Values written."),
    ("evictions_total", "counter", "values", "Values removed to make room."),
    ("failures_total", "counter", "calls", "Calls that the medium or server failed."),
)

CATALOG: tuple[Metric, ...] = (
    Metric(
        name="pdxfer_proxy_requests_total", kind="counter", unit="requests",
        help="Finished requests by endpoint, by how they were served, and by how they ended.",
        labels={"endpoint": ENDPOINTS, "mode": MODES, "outcome": OUTCOMES},
    ),
    Metric(
        name="pdxfer_proxy_stage_seconds", kind="histogram", unit="seconds",
        help="Stages of the time to first token of paired requests; ttft also of local ones.",
        labels={"mode": ("pair", "local"), "stage": STAGES},
    ),
    Metric(
        name="pdxfer_proxy_in_flight_requests", kind="gauge", unit="requests",
        help="Requests admitted and not finished.",
    ),
    Metric(
        name="pdxfer_proxy_fallbacks_total", kind="counter", unit="requests",
        help="Requests sent to a decode engine alone, by reason.",
        labels={"reason": FALLBACKS},
    ),
    Metric(
        name="pdxfer_proxy_leg_failures_total", kind="counter", unit="legs",
        help="Legs that did not deliver: no connection, an error status, a broken response, or the deadline.",
        labels={"leg": ("prefill", "decode"), "kind": ("connect", "status", "reset", "timeout")},
    ),
    Metric(
        name="pdxfer_proxy_retries_total", kind="counter", unit="requests",
        help="Requests sent a second time because their decode leg failed before its first byte.",
    ),
    Metric(
        name="pdxfer_proxy_replays_total", kind="counter", unit="requests",
        help="Streams whose decode engine was lost and that another one was asked to continue.",
    ),
    Metric(
        name="pdxfer_proxy_redispatches_total", kind="counter", unit="legs",
        help="Prefill legs sent to another engine because decode had lost the first one in mid-transfer.",
    ),
    Metric(
        name="pdxfer_proxy_transfers_total", kind="counter", unit="transfers",
        help="Settled transfers of this proxy's requests, by outcome at the decode engine.",
        labels={"outcome": ("delivered", "failed", "aborted", "unused")},
    ),
    Metric(
        name="pdxfer_proxy_transfer_bytes_total", kind="counter", unit="bytes",
        help="KV bytes that moved for this proxy's requests.",
    ),
    Metric(
        name="pdxfer_proxy_refused_total", kind="counter", unit="requests",
        help="Requests refused before any engine saw them.",
        labels={"reason": ("malformed", "too_large", "unauthorized", "unknown_path", "unknown_model", "draining")},
    ),
    Metric(
        name="pdxfer_router_answers_total", kind="counter", unit="requests",
        help="Answers to proxies that asked for a pair.",
        labels={"answer": ("pairing", "local", "busy")},
    ),
    Metric(
        name="pdxfer_router_leases_ended_total", kind="counter", unit="leases",
        help="Pairings that ended, by outcome.",
        labels={"outcome": ("delivered", "failed", "aborted", "unused")},
    ),
    Metric(
        name="pdxfer_router_transfer_tokens_total", kind="counter", unit="tokens",
        help="Prompt tokens whose KV came over the wire, as decode engines reported them.",
    ),
    Metric(
        name="pdxfer_router_transfer_bytes_total", kind="counter", unit="bytes",
        help="KV bytes that came over the wire, as decode engines reported them.",
    ),
    Metric(
        name="pdxfer_router_refused_total", kind="counter", unit="messages",
        help="Messages (and handshakes) that were dropped, by reason.",
        labels={
            "reason": (
                "hello", "identity", "stranger", "unexpected", "rate", "duplicate", "incarnation", "foreign", "stale",
                "late", "malformed", "handshake", "no_route", "full", "internal",
            )
        },
    ),
    Metric(
        name="pdxfer_router_pairs", kind="gauge", unit="pairs",
        help="Combinations of prefill and decode engine that can take requests now.",
    ),
    Metric(
        name="pdxfer_router_engines", kind="gauge", unit="engines",
        help="Known engines by role and state.",
        labels={
            "role": ("prefill", "decode", "both", "unknown"),
            "state": ("joining", "ready", "draining", "suspect"),
        },
    ),
    Metric(
        name="pdxfer_router_proxies", kind="gauge", unit="proxies",
        help="Connected proxies.",
    ),
    Metric(
        name="pdxfer_router_queued_requests", kind="gauge", unit="requests",
        help="Requests that wait for decode capacity.",
    ),
    Metric(
        name="pdxfer_router_leases", kind="gauge", unit="leases",
        help="Pairings that have not ended.",
    ),
    Metric(
        name="pdxfer_router_credit_blocks", kind="gauge", unit="blocks",
        help="KV blocks that decode engines can still promise, summed.",
    ),
    Metric(
        name="pdxfer_router_outstanding_prefill_tokens", kind="gauge", unit="tokens",
        help="Prompt tokens paired and not computed yet, summed over prefill engines.",
    ),
    Metric(
        name="pdxfer_router_grants_total", kind="counter", unit="grants",
        help="Grants relayed from decode to prefill engines.",
    ),
    Metric(
        name="pdxfer_router_events_total", kind="counter", unit="events",
        help="Events by kind: fallbacks, broken channels (the breaker), evictions, joins, losses.",
        labels={"kind": EVENTS},
    ),
    Metric(
        name="pdxfer_router_stage_seconds", kind="histogram", unit="seconds",
        help="Stages of the time to first token, as all proxies reported them.",
        labels={"mode": ("pair", "local"), "stage": STAGES},
    ),
    *(
        Metric(name=f"pdxfer_node_{name}_total", kind="counter", unit=unit, help=text, labels={"engine": MEMBERS})
        for name, (unit, text) in NODE_COUNTS.items()
    ),
    *(
        Metric(name=f"pdxfer_node_{name}", kind="gauge", unit=unit, help=text, labels={"engine": MEMBERS})
        for name, unit, text in (
            ("credit_blocks", "blocks", "KV blocks that the router would still promise of this engine."),
            ("free_blocks", "blocks", "KV blocks of its pool that are not promised and not in use."),
            ("running_requests", "requests", "Requests that run."),
            ("waiting_requests", "requests", "Requests that wait."),
            ("lag_seconds", "seconds", "How late the last heartbeat of its slowest half left."),
            ("silent_seconds", "seconds", "Since the last word of its most silent half."),
            ("open_channels", "channels", "Channels from its ranks to peers that are open."),
            ("closed_channels", "channels", "Channels from its ranks to peers that could not be opened, or broke."),
            ("known_problems", "problems", "Problems that its halves report of themselves (pdxfer nodes health)."),
        )
    ),
    *(
        Metric(
            name=f"pdxfer_node_tier_{name}", kind=kind, unit=unit, help=text,
            labels={"engine": MEMBERS, "tier": MEMBERS},
        )
        for name, kind, unit, text in _TIER_ROWS
    ),
)  # fmt: skip


class MetricSet:
    """The metrics of one process, in a registry of its own. Thread-safe, as prometheus_client is.

    A name or label value that is not in the table is our bug and asserts.
    """

    def __init__(self, process: Process, catalog: Iterable[Metric] = CATALOG) -> None:
        self.registry = CollectorRegistry()
        self._rows = {row.name: row for row in catalog if row.process == process}
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for row in self._rows.values():
            names = tuple(row.labels)
            if row.kind == "counter":
                self._counters[row.name] = Counter(row.name, row.help, names, registry=self.registry)
            elif row.kind == "gauge":
                self._gauges[row.name] = Gauge(row.name, row.help, names, registry=self.registry)
            else:
                self._histograms[row.name] = Histogram(
                    row.name, row.help, names, registry=self.registry, buckets=row.buckets
                )

    def inc(self, name: str, amount: float = 1.0, /, **labels: str) -> None:
        """Add to a counter."""
        self._check(name, labels)
        counter = self._counters[name]
        (counter.labels(**labels) if labels else counter).inc(amount)

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Set a gauge."""
        self._check(name, labels)
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set(value)

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """Record one value of a histogram."""
        self._check(name, labels)
        histogram = self._histograms[name]
        (histogram.labels(**labels) if labels else histogram).observe(value)

    def value(self, name: str, /, **labels: str) -> float:
        """Current value of a counter or gauge series (0 if it was never touched); for tests and status."""
        self._check(name, labels)
        return self.registry.get_sample_value(name, labels) or 0.0

    def _check(self, name: str, labels: dict[str, str]) -> None:
        row = self._rows.get(name)
        assert row is not None, f"metric {name} is not in metrics/catalog.py for this process"
        assert labels.keys() == row.labels.keys(), f"metric {name} has labels {list(row.labels)}, got {list(labels)}"
        for label, text in labels.items():
            allowed = row.labels[label]
            assert allowed is MEMBERS or text in allowed, f"metric {name}: {label}={text!r} is not one of {allowed}"
