"""A FakeEngine's scheduler half towards the router and its own node: says hello, sends, and hands messages on.

Messages come on IO threads; they are handed to the event loop, which owns all state of the fake.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.ids import new_incarnation
from pdxfer.metrics.spans import Spans, StageSpans
from pdxfer.router.api_wait import ApiWait
from pdxfer.router.client import ClientSecurity, MemberClient
from pdxfer.testing.fake_kv import FakeCache
from pdxfer.wire.halves import Generation, SchedulerEnd, ToScheduler, ToWorker, Welcome, WorkerReady
from pdxfer.wire.messages import Capacity, FromRouter, Heartbeat, Hello, Leg, LegFailed, Message, Role, Stage, Stamp

log = logging.getLogger(__name__)

M = TypeVar("M")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSettings:
    """How a fake engine takes part."""

    engine_id: str
    role: Role
    url: str
    """HTTP base under which the proxy reaches it."""
    served_names: tuple[str, ...]
    """The first is the model."""
    max_model_len: int
    router: str
    security: ClientSecurity | None
    halves_path: str
    prefill_tokens_per_s: float = float("inf")
    heartbeat_s: float = 0.5
    spans: Spans | None = None
    """Where its spans go."""
    step_tokens: int = 512
    """Prompt tokens computed, and made ready to send, in one step."""
    chunk_tokens: int = 256
    """Unit of the store."""


class FakeLink:
    """The sockets of a fake scheduler half. Made on the event loop; `on_message` and `on_fact` run on it."""

    def __init__(
        self,
        settings: MemberSettings,
        cache: FakeCache,
        on_message: Callable[[FromRouter], None],
        on_fact: Callable[[ToScheduler], None],
    ) -> None:
        self._settings, self._cache = settings, cache
        self._on_message, self._on_fact = on_message, on_fact
        self._loop = asyncio.get_running_loop()
        self.incarnation = new_incarnation()
        self.counts: Counter[str] = Counter()
        """Totals for the heartbeats, as a real engine has them (metrics.catalog.NODE_COUNTS)."""
        self.num_running = 0
        """Requests in the engine."""
        self.generation = 0
        """Grants taken back so far, for the next Grant."""
        self._fingerprint: dict[str, str] = {}
        self._router: MemberClient | None = None
        self.api: ApiWait | None = None
        self.traces = StageSpans(settings.spans) if settings.spans is not None else None
        self._is_closed = False
        self.num_losses = 0
        """How often the router was lost."""
        self._changed = asyncio.Event()
        self._halves = SchedulerEnd(settings.halves_path, 1, lambda fact: self._to_loop(self._take_fact, fact))
        self._halves.start()
        self._halves.broadcast(Welcome(incarnation=self.incarnation))

    def close(self) -> None:
        """Leave the cluster; blocks for a moment. Idempotent."""
        self._is_closed = True
        if self.api is not None:
            self.api.close()
        if self._router is not None:
            self._router.close("engine stops")
        self._halves.close()
        if self.traces is not None:
            self.traces.close()

    @property
    def is_connected(self) -> bool:
        """The router is there."""
        return self._router is not None and self._router.connected

    # ---- out -----------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """To the router; kept while it is away."""
        if self._router is not None:
            self._router.send(message)

    def stamp(self, transfer_id: str, stage: Stage, wall: float | None = None) -> None:
        """A stage is reached, now or at `wall`."""
        at = SYSTEM_CLOCK.wall() if wall is None else wall
        self.send(Stamp(transfer_id=transfer_id, stage=stage, wall=at))
        if self.traces is not None:
            self.traces.stamp(transfer_id, stage, at)

    def leg_failed(self, transfer_id: str, leg: Leg, reason: str) -> None:
        self.send(LegFailed(transfer_id=transfer_id, leg=leg, reason=reason[:1000]))

    def tell_node(self, message: ToWorker) -> None:
        """To our worker half."""
        self._halves.broadcast(message)

    # ---- in ------------------------------------------------------------------------------------------------------

    async def until(self, condition: Callable[[], bool], deadline: float | None = None) -> bool:
        """Wait for a condition that messages change. False: `deadline` (core clock) came first."""
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - SYSTEM_CLOCK.now())):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _to_loop(self, take: Callable[[M], None], message: M) -> None:
        """IO threads: have the event loop take it."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(take, message)

    def _take_message(self, message: FromRouter) -> None:
        self._on_message(message)
        self._changed.set()

    def _take_link(self, up: bool) -> None:
        log.info("router %s %s", self._settings.router, "reached" if up else "lost")
        self.num_losses += not up
        self._changed.set()

    def _take_fact(self, fact: ToScheduler) -> None:
        if isinstance(fact, WorkerReady):
            self._fingerprint = fact.fingerprint
            if self.api is None and not self._is_closed:
                self.api = ApiWait(self._settings.url, self._join)
        elif isinstance(fact, Generation):
            self.generation = fact.number
        else:
            self._on_fact(fact)
        self._changed.set()

    def _join(self) -> None:
        """The node is there and the HTTP server answers: join the router."""
        self._router = MemberClient(
            endpoint=self._settings.router,
            identity=f"{self._settings.engine_id}/sched",
            security=self._settings.security,
            hello=self._hello,
            beat=self._beat,
            on_message=lambda message: self._to_loop(self._take_message, message),
            on_link=lambda up: self._to_loop(self._take_link, up),
            heartbeat_s=self._settings.heartbeat_s,
        )

    def _hello(self) -> list[Message]:
        settings, layout = self._settings, self._cache.layout
        hello = Hello(
            engine_id=settings.engine_id,
            incarnation=self.incarnation,
            role=settings.role,
            url=settings.url,
            model=settings.served_names[0],
            served_names=list(settings.served_names),
            fingerprint=self._fingerprint,
            capacity=Capacity(
                num_blocks=layout.num_blocks, block_size=layout.block_size, max_model_len=settings.max_model_len
            ),
            world_size=1,
            free_blocks=self._cache.num_free,
        )
        return [hello]

    def _beat(self) -> Heartbeat:
        return Heartbeat(
            incarnation=self.incarnation,
            wall=SYSTEM_CLOCK.wall(),
            free_blocks=self._cache.num_free,
            num_running=self.num_running,
            counts=dict(self.counts),
        )
