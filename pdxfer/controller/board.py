"""The board: everything the status page, `top` and the event streams show, sampled once a second, shared by all.

However many events happen and however many look, the router is asked once a second and a frame is rendered once a
second. A viewer that is slow skips frames: it always gets the newest one.
"""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable

from pdxfer.client.model import EngineHealth, RankHealth, RequestTimeline, Summary
from pdxfer.controller.history import Rates, Requests
from pdxfer.core.clock import SYSTEM_CLOCK, Clock
from pdxfer.core.errors import DeadlineError
from pdxfer.router.events import Observed
from pdxfer.router.server import EventRecord, RouterServer
from pdxfer.router.snapshot import EngineView, RankView, Snapshot
from pdxfer.wire.messages import Served

log = logging.getLogger(__name__)

SAMPLE_S = 1.0
NUM_EVENTS = 40
_EVENT_WINDOW_S = 10
_LAGGING_S = 0.25
"""A heartbeat this late is worth a word."""


class Board:
    """Listens to a router from construction on; `start` makes it sample by itself. Thread-safe."""

    def __init__(self, router: RouterServer, clock: Clock = SYSTEM_CLOCK) -> None:
        self._router, self._clock = router, clock
        self._lock = threading.Lock()
        self._requests, self._rates = Requests(), Rates()
        self._reports: deque[Served] = deque(maxlen=65536)
        self._num_events = 0
        self._event_counts: deque[int] = deque([0], maxlen=_EVENT_WINDOW_S)
        self._summary: Summary | None = None
        self._sampled_at = 0.0
        self._watchers: list[Callable[[], None]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        router.listeners.append(self._on_router)

    def __repr__(self) -> str:
        return f"<Board watchers={len(self._watchers)} events={self._num_events}>"

    def start(self) -> None:
        """Sample each second from now on. Idempotent."""
        with self._lock:
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="pdxfer-board", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop sampling; every watcher is called once more. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2 * SAMPLE_S)
        self._tell()

    @property
    def is_closed(self) -> bool:
        """Streams end."""
        return self._stop.is_set()

    def watch(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """Call `on_change` (any thread, at once) after each sample. Returns how to stop that."""
        self.start()
        with self._lock:
            self._watchers.append(on_change)

        def stop() -> None:
            with self._lock:
                self._watchers.remove(on_change)

        return stop

    def summary(self) -> Summary:
        """The cluster now, at most a second old. Raises DeadlineError if the router does not answer."""
        with self._lock:
            if self._summary is None or self._clock.now() - self._sampled_at >= SAMPLE_S:
                self._sample()
            assert self._summary is not None
            return self._summary

    def request(self, request_id: str) -> RequestTimeline | None:
        """One of the last requests by its id, or its transfer's."""
        with self._lock:
            self._take_reports()
            return self._requests.get(request_id)

    def latest_requests(self, count: int) -> list[str]:
        """Ids of the last requests, newest first."""
        with self._lock:
            self._take_reports()
            return self._requests.latest(count)

    # ---- the router's thread ---------------------------------------------------------------------------------

    def _on_router(self, item: Observed | EventRecord) -> None:
        if isinstance(item, EventRecord):
            self._num_events += 1
        elif isinstance(item.report, Served):
            self._reports.append(item.report)

    # ---- sampling --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            try:
                with self._lock:
                    self._sample()
            except DeadlineError as error:
                log.warning("the status page stands still: %s", error)
            except Exception:
                log.exception("the status page failed on a sample: please report this")
            self._tell()

    def _tell(self) -> None:
        with self._lock:
            watchers = list(self._watchers)
        for watcher in watchers:
            with contextlib.suppress(RuntimeError):  # its event loop has ended
                watcher()

    def _take_reports(self) -> None:
        while self._reports:
            self._requests.add(self._reports.popleft())

    def _sample(self) -> None:
        snapshot = self._router.snapshot()
        now, wall = self._clock.now(), self._clock.wall()
        self._take_reports()
        self._rates.sample(snapshot, now)
        self._event_counts.append(self._num_events)
        self._summary, self._sampled_at = self._make(snapshot, wall), now

    def _make(self, snapshot: Snapshot, wall: float) -> Summary:
        per_s, p50, p99 = self._requests.recent(wall)
        span = max(1, len(self._event_counts) - 1)
        return Summary(
            wall=wall,
            ready=snapshot.is_ready,
            reasons=snapshot.reasons,
            nodes=snapshot.engines,
            num_proxies=snapshot.num_proxies,
            num_pairs=snapshot.num_pairs,
            num_queued=snapshot.num_queued,
            num_leases=snapshot.num_leases,
            bytes_per_s=self._rates.bytes_per_s,
            requests_per_s=per_s,
            ttft_p50_ms=p50,
            ttft_p99_ms=p99,
            flows=self._rates.flows(snapshot),
            tiers=self._rates.tiers(snapshot),
            ttft=self._requests.bins(wall),
            fallbacks=self._requests.reasons(wall),
            events=coalesced(self._router.events(), NUM_EVENTS),
            events_per_s=(self._event_counts[-1] - self._event_counts[0]) / span,
        )


def coalesced(events: list[EventRecord], count: int) -> list[EventRecord]:
    """The newest `count`, newest first; repetitions within one second become one with a `times`."""
    found: list[EventRecord] = []
    times: dict[int, int] = {}
    for event in reversed(events):
        same = next((e for e in found[-8:] if _same(e, event)), None)
        if same is not None:
            times[same.number] = times.get(same.number, 1) + 1
        elif len(found) == count:
            break
        else:
            found.append(event)
    return [
        EventRecord(
            number=e.number, wall=e.wall, kind=e.kind, detail={**e.detail, "times": str(times[e.number])}
        )
        if e.number in times
        else e
        for e in found
    ]  # fmt: skip


def _same(one: EventRecord, other: EventRecord) -> bool:
    """Whether two events differ only in the transfer they name."""
    if one.kind != other.kind or int(one.wall) != int(other.wall):
        return False
    return {**one.detail, "transfer_id": ""} == {**other.detail, "transfer_id": ""}


def health(engines: list[EngineView]) -> list[EngineHealth]:
    """What each engine and worker says of itself, and what the router sees of it."""
    return [_engine_health(engine) for engine in engines]


def _engine_health(engine: EngineView) -> EngineHealth:
    ranks = [_rank_health(rank) for rank in engine.ranks]
    problems = [*engine.problems, *_lag(engine.lag_s)]
    is_ok = engine.state in ("ready", "draining") and not problems and all(rank.ok for rank in ranks)
    return EngineHealth(
        engine_id=engine.engine_id, state=engine.state, ok=is_ok, lag_s=engine.lag_s, problems=problems, ranks=ranks
    )


def _rank_health(rank: RankView) -> RankHealth:
    away = [tier.kind for tier in rank.tiers if not tier.reachable]
    problems = [*rank.problems, *_lag(rank.lag_s)]
    return RankHealth(
        rank=rank.rank, ok=not (problems or away or rank.closed), silent_s=rank.silent_s, lag_s=rank.lag_s,
        problems=problems, unreachable_tiers=away, closed_channels=rank.closed,
    )  # fmt: skip


def _lag(lag_s: float) -> list[str]:
    return [f"its heartbeat left {lag_s:.2f} s late: the process is held up"] if lag_s > _LAGGING_S else []
