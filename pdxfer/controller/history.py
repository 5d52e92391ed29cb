"""What the router's reports add up to over time: TTFT by bins, rates from counters, fallbacks. Pure; no clock, no I/O.

Fed by board.py with each Served report and with a snapshot a second. Everything is bounded, however busy the cluster.
"""

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

from pdxfer.client.model import FlowRate, RequestTimeline, TierTotal, TtftBin
from pdxfer.metrics.catalog import STAGES
from pdxfer.metrics.timeline import Timeline
from pdxfer.router.snapshot import Snapshot, TierView
from pdxfer.wire.messages import Served

BIN_S = 5.0
NUM_BINS = 120
RECENT_S = 60.0
MAX_REQUESTS = 4096
_MAX_SAMPLES = 2000
"""TTFT values kept a bin; later ones of the same bin are counted, not kept."""
_MAX_REASONS = 64
_MAX_FLOWS = 256
_RATE_SAMPLES = 3
"""A rate is the mean over so many samples: one transfer is more than a second's worth of some links."""
_PARTS = tuple(stage for stage in STAGES if stage != "ttft")


@dataclass(slots=True)
class _Bin:
    index: int
    paired: int = 0
    local: int = 0
    failed: int = 0
    sums_ms: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    ttfts_ms: list[float] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, served: Served, stages_ms: dict[str, float]) -> None:
        """One more request."""
        self.paired += served.mode == "pair"
        self.local += served.mode == "local"
        self.failed += served.outcome not in ("ok", "client_error")
        for stage in _PARTS if served.mode == "pair" else ():
            if stage in stages_ms:
                self.sums_ms[stage] = self.sums_ms.get(stage, 0.0) + stages_ms[stage]
                self.counts[stage] = self.counts.get(stage, 0) + 1
        if "ttft" in stages_ms and len(self.ttfts_ms) < _MAX_SAMPLES:
            self.ttfts_ms.append(stages_ms["ttft"])
        if served.reason:
            known = served.reason in self.reasons or len(self.reasons) < _MAX_REASONS
            self.reasons[served.reason if known else "other"] += 1


class Requests:
    """Requests that ended: the last ones by id, and all of them by time."""

    def __init__(self) -> None:
        self._bins: deque[_Bin] = deque(maxlen=NUM_BINS)
        self._by_id: OrderedDict[str, Served] = OrderedDict()

    def add(self, served: Served) -> None:
        """A proxy's report."""
        self._by_id.pop(served.request_id, None)
        self._by_id[served.request_id] = served
        if len(self._by_id) > MAX_REQUESTS:
            self._by_id.popitem(last=False)
        self._bin(int(served.end // BIN_S)).add(served, stages_ms(served))

    def get(self, request_id: str) -> RequestTimeline | None:
        """One of the last requests, by its id or its transfer's."""
        found = self._by_id.get(request_id)
        if found is None and request_id:
            found = next((one for one in reversed(self._by_id.values()) if one.transfer_id == request_id), None)
        return timeline(found) if found is not None else None

    def latest(self, count: int) -> list[str]:
        """Ids of the last requests, newest first."""
        ids = reversed(self._by_id)
        return [request_id for request_id, _ in zip(ids, range(count), strict=False)]

    def bins(self, now: float) -> list[TtftBin]:
        """The last ten minutes, oldest first; times without requests are bins too, once there was one."""
        last = int(now // BIN_S)
        known = {one.index: one for one in self._bins if last - NUM_BINS < one.index <= last}
        if not known:
            return []
        return [_shown(known.get(index) or _Bin(index)) for index in range(min(known), last + 1)]

    def recent(self, now: float) -> tuple[float, float | None, float | None]:
        """Requests a second, p50 and p99 of their TTFT in ms, of the last minute."""
        first = int((now - RECENT_S) // BIN_S)
        bins = [one for one in self._bins if one.index > first]
        values = sorted(value for one in bins for value in one.ttfts_ms)
        count = sum(one.paired + one.local for one in bins)
        return count / RECENT_S, quantile(values, 0.5), quantile(values, 0.99)

    def reasons(self, now: float) -> dict[str, int]:
        """Why requests were not served by the direct path; most frequent first."""
        total: Counter[str] = Counter()
        for one in self._bins:
            if one.index > int(now // BIN_S) - NUM_BINS:
                total.update(one.reasons)
        return dict(total.most_common(_MAX_REASONS))

    def _bin(self, index: int) -> _Bin:
        """The bin of that time; what comes too late goes to the oldest that may still change, the last one."""
        if not self._bins or self._bins[-1].index < index:
            self._bins.append(_Bin(index))
        return next((one for one in reversed(self._bins) if one.index == index), self._bins[-1])


class Rates:
    """Per-second figures from the counters of two snapshots."""

    def __init__(self) -> None:
        self._bytes: deque[tuple[float, dict[tuple[str, str], int]]] = deque(maxlen=_RATE_SAMPLES + 1)
        self._rates: dict[tuple[str, str], float] = {}
        self._tiers: deque[tuple[float, dict[str, tuple[int, int]]]] = deque(maxlen=int(RECENT_S) + 1)

    def sample(self, snapshot: Snapshot, now: float) -> None:
        """The state at `now` (monotonic seconds)."""
        totals = {(flow.prefill, flow.decode): flow.num_bytes for flow in snapshot.flows}
        self._bytes.append((now, totals))
        since, before = self._bytes[0]
        passed = max(now - since, 1e-3)
        self._rates = {key: max(0, total - before.get(key, 0)) / passed for key, total in totals.items()}
        if len(self._bytes) == 1:
            self._rates = dict.fromkeys(totals, 0.0)
        self._tiers.append((now, {kind: (hits, misses) for kind, hits, misses in _asked(snapshot)}))

    @property
    def bytes_per_s(self) -> float:
        """Over all flows."""
        return sum(self._rates.values())

    def flows(self, snapshot: Snapshot) -> list[FlowRate]:
        """All that moved something or is about to, fastest first."""
        channels = {engine.engine_id: engine.channels for engine in snapshot.engines}
        found = [
            FlowRate(
                prefill=flow.prefill, decode=flow.decode, num_live=flow.num_live,
                channel=channels.get(flow.prefill, {}).get(flow.decode, ""),
                bytes_per_s=self._rates.get((flow.prefill, flow.decode), 0.0),
                num_bytes=flow.num_bytes, num_failed=flow.num_failed,
            )
            for flow in snapshot.flows
            if flow.prefill in channels and flow.decode in channels
        ]  # fmt: skip
        return sorted(found, key=lambda f: (-f.bytes_per_s, -f.num_live, -f.num_bytes))[:_MAX_FLOWS]

    def tiers(self, snapshot: Snapshot) -> list[TierTotal]:
        """Each kind of tier over all ranks, in the order in which engines name them."""
        kinds: dict[str, list[TierView]] = {}
        for tier in _tiers(snapshot):
            kinds.setdefault(tier.kind, []).append(tier)
        before = self._tiers[0][1] if self._tiers else {}
        return [_total(kind, tiers, before.get(kind)) for kind, tiers in kinds.items()]


def stages_ms(served: Served) -> dict[str, float]:
    """Milliseconds by stage, as the proxy's header gives them."""
    return Timeline(
        mode=served.mode,
        arrival=served.arrival,
        first_byte=served.first_byte,
        stamps=dict(served.stamps),
    ).stages_ms()


def timeline(served: Served) -> RequestTimeline:
    """One report as the API shows it."""
    return RequestTimeline(
        request_id=served.request_id, transfer_id=served.transfer_id, endpoint=served.endpoint, mode=served.mode,
        outcome=served.outcome, reason=served.reason, prefill=served.prefill, decode=served.decode,
        channel=served.channel, arrival=served.arrival, first_byte=served.first_byte, end=served.end,
        stamps=dict(served.stamps), stages_ms=stages_ms(served), num_tokens=served.num_tokens,
        num_bytes=served.num_bytes,
    )  # fmt: skip


def quantile(ordered: list[float], q: float) -> float | None:
    """The value below which `q` of them are (nearest rank); None of nothing."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else None


def _shown(one: _Bin) -> TtftBin:
    values = sorted(one.ttfts_ms)
    return TtftBin(
        wall=one.index * BIN_S, num_paired=one.paired, num_local=one.local, num_failed=one.failed,
        stages_ms={stage: one.sums_ms[stage] / one.counts[stage] for stage in _PARTS if stage in one.sums_ms},
        p50_ms=quantile(values, 0.5), p99_ms=quantile(values, 0.99),
    )  # fmt: skip


def _tiers(snapshot: Snapshot) -> list[TierView]:
    return [tier for engine in snapshot.engines for rank in engine.ranks for tier in rank.tiers]


def _asked(snapshot: Snapshot) -> list[tuple[str, int, int]]:
    hits: Counter[str] = Counter()
    misses: Counter[str] = Counter()
    for tier in _tiers(snapshot):
        hits[tier.kind] += tier.hits
        misses[tier.kind] += tier.misses
    return [(kind, hits[kind], misses[kind]) for kind in hits]


def _total(kind: str, tiers: list[TierView], before: tuple[int, int] | None) -> TierTotal:
    hits, misses = sum(t.hits for t in tiers), sum(t.misses for t in tiers)
    old_hits, old_misses = before or (0, 0)
    return TierTotal(
        kind=kind,
        num_ranks=len(tiers),
        num_unreachable=sum(not t.reachable for t in tiers),
        used_bytes=sum(t.used_bytes for t in tiers),
        capacity_bytes=sum(t.capacity_bytes for t in tiers),
        num_values=sum(t.num_values for t in tiers),
        pinned_bytes=sum(t.pinned_bytes for t in tiers),
        hits=hits,
        misses=misses,
        evictions=sum(t.evictions for t in tiers),
        failures=sum(t.failures for t in tiers),
        hit_rate=_rate(hits, misses),
        recent_hit_rate=_rate(hits - old_hits, misses - old_misses),
    )


def _rate(hits: int, misses: int) -> float | None:
    return hits / (hits + misses) if hits >= 0 and misses >= 0 and hits + misses > 0 else None
