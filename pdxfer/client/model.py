"""What the management API answers beyond the router's own views: made by the controller, read by client, top and page.

Plain frozen values; every one is also the JSON of its route.
"""

from dataclasses import dataclass, field

from pdxfer.router.server import EventRecord
from pdxfer.router.snapshot import EngineView


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftBin:
    """Requests that ended within some seconds."""

    wall: float
    """Where it begins, seconds since the epoch."""
    num_paired: int
    num_local: int
    num_failed: int
    stages_ms: dict[str, float]
    """Mean milliseconds by stage, of the paired ones."""
    p50_ms: float | None
    """Time to first token of all that had one."""
    p99_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowRate:
    """What moves from one engine to another now."""

    prefill: str
    decode: str
    channel: str
    """Kind of the channel; empty: none is open."""
    num_live: int
    """Transfers that have not ended."""
    bytes_per_s: float
    num_bytes: int
    """Since the router's start."""
    num_failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierTotal:
    """One kind of tier over all engines that have it."""

    kind: str
    num_ranks: int
    num_unreachable: int
    used_bytes: int
    capacity_bytes: int
    """0: not known."""
    num_values: int
    pinned_bytes: int
    hits: int
    misses: int
    evictions: int
    failures: int
    hit_rate: float | None
    """Since the members' start; None: nothing was asked."""
    recent_hit_rate: float | None
    """Of the last minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The cluster on one screen."""

    wall: float
    ready: bool
    reasons: list[str]
    nodes: list[EngineView]
    num_proxies: int
    num_pairs: int
    num_queued: int
    num_leases: int
    bytes_per_s: float
    requests_per_s: float
    """Ended, of the last minute."""
    ttft_p50_ms: float | None
    """Of the last minute."""
    ttft_p99_ms: float | None
    flows: list[FlowRate]
    """Those that have moved something, fastest first; bounded."""
    tiers: list[TierTotal]
    """Empty: no member has a store."""
    ttft: list[TtftBin]
    """Oldest first."""
    fallbacks: dict[str, int]
    """Why requests were not served by the direct path, of the last ten minutes."""
    events: list[EventRecord]
    """The last ones, newest first; equal ones of one second are one."""
    events_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimeline:
    """One request that ended lately."""

    request_id: str
    transfer_id: str
    endpoint: str
    mode: str
    outcome: str
    reason: str
    prefill: str
    decode: str
    channel: str
    arrival: float
    first_byte: float | None
    end: float
    stamps: dict[str, float]
    stages_ms: dict[str, float]
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHealth:
    """One worker."""

    rank: int
    ok: bool
    silent_s: float
    lag_s: float
    problems: list[str]
    """Allocator integrity and whatever else it reports."""
    unreachable_tiers: list[str]
    closed_channels: dict[str, str]
    """Peer engine → why there is no channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """One engine."""

    engine_id: str
    state: str
    ok: bool
    lag_s: float
    problems: list[str]
    ranks: list[RankHealth] = field(default_factory=list)
