"""The scheduler half's connections: to the router and to its worker halves. Incoming messages go into one inbox.

The engine joins the router when every rank has said WorkerReady and its HTTP server answers. Sending never blocks;
without a router, messages to it are dropped (store mode).
"""

import logging
import queue
import threading
from collections import Counter
from dataclasses import dataclass

from pdxfer.connector.presence import Presence
from pdxfer.connector.settings import ConnectorSettings
from pdxfer.core.clock import Clock
from pdxfer.core.errors import ConfigError
from pdxfer.core.ids import new_incarnation
from pdxfer.metrics.spans import Spans, StageSpans
from pdxfer.router.api_wait import ApiWait
from pdxfer.router.client import MemberClient
from pdxfer.wire.halves import Generation, Listening, SchedulerEnd, ToScheduler, ToWorker, Welcome, WorkerReady
from pdxfer.wire.messages import Capacity, FromRouter, Heartbeat, Hello, Leg, LegFailed, Message, Stage, Stamp

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the scheduler half knows of its engine, read once from vLLM's config."""

    model: str
    served_names: list[str]
    num_blocks: int
    block_size: int
    max_model_len: int
    world_size: int
    max_step_blocks: int
    """New blocks one step may take."""
    plans_ready_hits: bool
    """Prefix hits may be sent before their step: True where no step overlaps another (no async scheduling)."""


@dataclass(frozen=True, slots=True)
class RouterLost:
    """The router answers no more: what it had not relayed yet may never come."""


class Member:
    """One engine as the router sees it."""

    def __init__(self, settings: ConnectorSettings, facts: EngineFacts, clock: Clock) -> None:
        self._settings, self._facts, self._clock = settings, facts, clock
        self.inbox: queue.SimpleQueue[FromRouter | ToScheduler | RouterLost] = queue.SimpleQueue()
        """Messages for the hooks, in the order they came."""
        self.incarnation = new_incarnation()
        self.free_blocks = facts.num_blocks
        """Blocks a new request may take; the hooks keep it current, heartbeats report it."""
        self.presence = Presence()
        self.totals: Counter[str] = Counter()
        """Everything counted since the start, for heartbeats."""
        self._generations = [0] * facts.world_size
        self._fingerprints: dict[int, dict[str, str]] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._router: MemberClient | None = None
        self._api: ApiWait | None = None
        self._traces = _stage_spans(settings)
        self._halves = SchedulerEnd(settings.halves_path, facts.world_size, self._on_fact)
        self._halves.start()
        self._halves.broadcast(Welcome(incarnation=self.incarnation))

    def close(self) -> None:
        """Leave the router on purpose, close the half link."""
        with self._lock:
            self._is_closed = True
        if self._api is not None:
            self._api.close()
        if self._router is not None:
            self._router.close(goodbye="engine stops")
        self._halves.close()
        if self._traces is not None:
            self._traces.close()

    def tell_workers(self, message: ToWorker) -> None:
        """To every rank, in order."""
        self._halves.broadcast(message)

    def tell_worker(self, rank: int, message: ToWorker) -> None:
        """To one rank, in order with what all are told."""
        self._halves.send(rank, message)

    def tell_router(self, message: Message) -> None:
        """To the router; dropped with a warning when its queue is full."""
        if self._router is not None and not self._router.send(message):
            log.warning("router client's queue is full: %s dropped", type(message).__name__)

    def stamp(self, transfer_id: str, stage: Stage, wall: float | None = None) -> None:
        """A stage of the request's timeline was reached, now or at `wall`."""
        at = self._clock.wall() if wall is None else wall
        self.tell_router(Stamp(transfer_id=transfer_id, stage=stage, wall=at))
        if self._traces is not None:
            self._traces.stamp(transfer_id, stage, at)

    def leg_begins(self, transfer_id: str, traceparent: str) -> None:
        """For this request's trace."""
        if self._traces is not None:
            self._traces.begin(transfer_id, traceparent)

    def decode_over(self, transfer_id: str) -> None:
        """For this request's trace."""
        if self._traces is not None:
            self._traces.over(transfer_id, self._clock.wall())

    def leg_failed(self, transfer_id: str, leg: Leg, reason: str) -> None:
        """Our leg is over without having delivered."""
        self.tell_router(LegFailed(transfer_id=transfer_id, leg=leg, reason=reason[:1000]))

    @property
    def is_connected(self) -> bool:
        """The router is there."""
        return self._router is not None and self._router.connected

    @property
    def generations(self) -> list[int]:
        """By rank: grants taken back so far, for the next Grant; what a rank has not told yet is not in it."""
        return list(self._generations)

    # ---- other threads -----------------------------------------------------------------------------------------------

    def _on_fact(self, fact: ToScheduler) -> None:
        """Half link's thread."""
        if isinstance(fact, WorkerReady):
            self.inbox.put(fact)
            self._fingerprints[fact.rank] = fact.fingerprint
            if len(self._fingerprints) == self._facts.world_size and self._api is None and self._settings.router:
                with self._lock:
                    if not self._is_closed:
                        self._api = ApiWait(self._settings.url, self._join)
        elif isinstance(fact, Generation):
            self._generations[fact.rank] = fact.number
        elif isinstance(fact, Listening):
            log.info("rank %d listens: %s", fact.rank, ", ".join(a.kind for a in fact.addresses))
        else:
            self.inbox.put(fact)

    def _join(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._router = MemberClient(
                endpoint=self._settings.router,
                identity=f"{self._settings.engine_id}/sched",
                security=self._settings.security,
                hello=self._hello,
                beat=self._beat,
                on_message=self.inbox.put,
                on_link=self._on_link,
            )

    def _hello(self) -> list[Message]:
        facts, settings = self._facts, self._settings
        return [
            Hello(
                engine_id=settings.engine_id,
                incarnation=self.incarnation,
                role=settings.role,
                url=settings.url,
                model=facts.model,
                served_names=facts.served_names,
                fingerprint=self._fingerprints[0],
                capacity=Capacity(
                    num_blocks=facts.num_blocks, block_size=facts.block_size, max_model_len=facts.max_model_len
                ),
                world_size=facts.world_size,
                free_blocks=self.free_blocks,
            )
        ]

    def _beat(self) -> Heartbeat:
        return Heartbeat(
            incarnation=self.incarnation,
            wall=self._clock.wall(),
            free_blocks=self.free_blocks,
            num_running=self.presence.num_running,
            num_waiting=self.presence.num_waiting,
            counts=dict(self.totals),
        )

    def _on_link(self, up: bool) -> None:
        level = logging.INFO if up else logging.WARNING
        log.log(level, "router %s %s", self._settings.router, "reached" if up else "lost; running transfers go on")
        if not up:
            self.inbox.put(RouterLost())


def _stage_spans(settings: ConnectorSettings) -> StageSpans | None:
    """Where traces are wanted; an engine without the library runs without them."""
    if not settings.otlp_endpoint:
        return None
    try:
        return StageSpans(Spans(settings.engine_id, settings.otlp_endpoint))
    except ConfigError as error:
        log.warning("no spans of this engine: %s", error)
        return None
