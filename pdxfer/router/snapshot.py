"""What the controller, the metrics and `status` see of the router: a plain copy at one moment."""

from dataclasses import dataclass, field

from msgspec.structs import asdict, replace

from pdxfer.router.cluster import Cluster
from pdxfer.router.leases import Leases
from pdxfer.router.members import Engine, Proxy, Worker
from pdxfer.router.outbox import Outbox
from pdxfer.router.placement import Placement
from pdxfer.router.settings import LIVE, RouterSettings
from pdxfer.wire.messages import Role, Served


@dataclass(frozen=True, slots=True, kw_only=True)
class TierView:
    """One tier of one rank's store; counters since its open."""

    kind: str
    used_bytes: int
    capacity_bytes: int
    """0: the tier does not know."""
    num_values: int
    pinned_bytes: int
    leases: int
    hits: int
    misses: int
    puts: int
    evictions: int
    failures: int
    reachable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One worker half."""

    rank: int
    silent_s: float
    lag_s: float
    """How late its last heartbeat left."""
    log_level: str
    channels: dict[str, str]
    """Peer engine → kind of channel to it; empty: none."""
    closed: dict[str, str]
    """Peer engine → why there is no channel to it."""
    tiers: list[TierView]
    counts: dict[str, int]
    """Its totals, by name."""
    wire: str
    """Codecs on the wire: on or off by the live switch; empty: not configured."""
    problems: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowView:
    """Transfers from one engine to another, since start."""

    prefill: str
    decode: str
    num_live: int
    num_ended: int
    num_failed: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """One engine."""

    engine_id: str
    incarnation: int
    role: Role | None
    """What it does now; None until its scheduler half said hello."""
    started_role: Role | None
    """What it was started for."""
    state: str
    """joining, ready, draining or suspect."""
    url: str
    model: str
    served_names: list[str]
    num_ranks: int
    silent_s: float
    """Since the last word of its most silent half."""
    num_blocks: int
    block_size: int
    credit_blocks: int
    """What the router would still promise (decode)."""
    reserved_blocks: int
    """Promised and not yet in a report."""
    outstanding_tokens: int
    """Paired and not computed yet (prefill)."""
    num_running: int
    num_waiting: int
    num_transfers: int
    channels: dict[str, str]
    """Peer engine → kind of channel to it, of rank 0."""
    credit_limit: int | None = None
    """An operator's bound on credit; None: none."""
    lag_s: float = 0.0
    """How late the last heartbeat of its scheduler half left."""
    log_level: str = ""
    """Of its scheduler half's process; empty: not reported yet."""
    problems: list[str] = field(default_factory=list)
    """Of its scheduler half; those of ranks are with them."""
    counts: dict[str, int] = field(default_factory=dict)
    ranks: list[RankView] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyView:
    """One proxy."""

    proxy_id: str
    silent_s: float
    """Since its last word."""
    log_level: str
    """Empty: not reported yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The whole router."""

    is_ready: bool
    """At least one eligible pair, or an engine for both roles, and not stopping."""
    reasons: list[str]
    """What keeps engines and pairs from being used."""
    engines: list[EngineView]
    num_pairs: int
    """Combinations of prefill and decode engine that can take requests now."""
    num_proxies: int
    num_queued: int
    num_leases: int
    num_tokens: int
    """Prompt tokens that came over the wire since start."""
    num_bytes: int
    num_grants: int
    """Relayed since start."""
    answers: dict[str, int] = field(default_factory=dict)
    """pairing, local, busy → count since start."""
    refused: dict[str, int] = field(default_factory=dict)
    """Messages dropped since start, by reason."""
    ended: dict[str, int] = field(default_factory=dict)
    """Leases ended since start, by outcome."""
    proxies: list[ProxyView] = field(default_factory=list)
    flows: list[FlowView] = field(default_factory=list)
    policy: dict[str, int | float] = field(default_factory=dict)
    """Live settings, by name."""


def take_snapshot(
    settings: RouterSettings, cluster: Cluster, placement: Placement, leases: Leases, out: Outbox, now: float
) -> Snapshot:
    """Copy what others may see. Costs about 10 µs an engine."""
    reasons = cluster.reasons(now)
    if placement.is_stopping:
        reasons.insert(0, "the router is shutting down")
    return Snapshot(
        is_ready=cluster.has_pair() and not placement.is_stopping,
        reasons=reasons,
        engines=[_view(engine, leases, now) for engine in cluster.engines.values()],
        num_pairs=sum(len(partners) for _, partners in cluster.pairs("")),
        num_proxies=len(cluster.proxies),
        num_queued=len(placement.queue),
        num_leases=len(leases),
        num_tokens=out.num_tokens,
        num_bytes=out.num_bytes,
        num_grants=out.num_grants,
        answers={value: count for (name, value), count in out.counts.items() if name == "answers"},
        refused={value: count for (name, value), count in out.counts.items() if name == "refused"},
        ended={value: count for (name, value), count in out.counts.items() if name == "ended"},
        proxies=[_proxy_view(proxy, now) for proxy in cluster.proxies.values()],
        flows=[
            FlowView(
                prefill=prefill, decode=decode, num_live=flow.num_live, num_ended=flow.num_ended,
                num_failed=flow.num_failed, num_bytes=flow.num_bytes,
            )
            for (prefill, decode), flow in out.flows.items()
        ],
        policy={name: getattr(settings, name) for name in LIVE},
    )  # fmt: skip


def shifted(served: Served, offset: float) -> Served:
    """A proxy's report in the router's clock."""
    first_byte = served.first_byte + offset if served.first_byte is not None else None
    stamps = {stage: wall + offset for stage, wall in served.stamps.items()}
    return replace(
        served, arrival=served.arrival + offset, end=served.end + offset, first_byte=first_byte, stamps=stamps
    )


def _rank(rank: int, worker: Worker, now: float) -> RankView:
    beat = worker.link.beat
    return RankView(
        rank=rank,
        silent_s=now - worker.link.last_seen,
        lag_s=beat.lag_s if beat else 0.0,
        log_level=beat.log_level if beat else "",
        channels={peer: ready.kind for peer, ready in worker.ready.items() if ready.kind},
        closed={peer: ready.reason for peer, ready in worker.ready.items() if not ready.kind},
        tiers=[TierView(**asdict(tier)) for tier in beat.tiers] if beat else [],
        counts=dict(beat.counts) if beat else {},
        wire=beat.wire if beat else "",
        problems=list(beat.problems) if beat else [],
    )


def _state(engine: Engine) -> str:
    if engine.is_suspect:
        return "suspect"
    if not engine.is_joined:
        return "joining"
    return "draining" if engine.is_draining else "ready"


def _proxy_view(proxy: Proxy, now: float) -> ProxyView:
    beat = proxy.link.beat
    return ProxyView(
        proxy_id=proxy.proxy_id, silent_s=now - proxy.link.last_seen, log_level=beat.log_level if beat else ""
    )


def _view(engine: Engine, leases: Leases, now: float) -> EngineView:
    hello = engine.hello
    worker = engine.workers.get(0)
    beat = engine.sched.beat if engine.sched else None
    return EngineView(
        engine_id=engine.engine_id,
        incarnation=engine.incarnation,
        role=engine.role,
        started_role=hello.role if hello else None,
        state=_state(engine),
        url=hello.url if hello else "",
        model=hello.model if hello else "",
        served_names=list(hello.served_names) if hello else [],
        num_ranks=len(engine.workers),
        silent_s=engine.silent_s(now),
        num_blocks=hello.capacity.num_blocks if hello else 0,
        block_size=hello.capacity.block_size if hello else 0,
        credit_blocks=engine.credit.available,
        reserved_blocks=engine.credit.reserved,
        outstanding_tokens=engine.outstanding_tokens,
        num_running=engine.num_running,
        num_waiting=engine.num_waiting,
        num_transfers=len(leases.of_engine(engine.engine_id)),
        channels={peer: ready.kind for peer, ready in worker.ready.items() if ready.kind} if worker else {},
        credit_limit=engine.credit.limit,
        lag_s=beat.lag_s if beat else 0.0,
        log_level=beat.log_level if beat else "",
        problems=list(beat.problems) if beat else [],
        counts=dict(beat.counts) if beat else {},
        ranks=[_rank(rank, one, now) for rank, one in sorted(engine.workers.items())],
    )
