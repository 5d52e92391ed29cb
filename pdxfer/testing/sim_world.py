"""One simulated cluster on one thread: time, the event queue, the control network with its faults, the real router.

Parties (sim_proxy.py, sim_prefill.py, sim_decode.py) act only in events; a crashed one loses its events, a hung one
gets them late. The router is pdxfer.router.state.RouterState itself.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from pdxfer.core.errors import ProtocolError
from pdxfer.router.events import Received, Send, Tick, Unreachable
from pdxfer.router.settings import RouterSettings
from pdxfer.router.state import RouterState
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.testing.fault_plan import Fate, FaultPlan
from pdxfer.wire.messages import Ended, FromMember, FromRouter, HeartbeatAck
from pdxfer.wire.version import Decoder, encode

BEAT_S = 1.0
SETTINGS = RouterSettings(
    heartbeat_s=BEAT_S, missed_heartbeats=2, lease_s=3.0, max_wait_s=1.0, no_engine_wait_s=0.5, min_remote_tokens=17,
    forget_s=20.0,
)  # fmt: skip
_DECODER: Decoder[FromMember] = Decoder(FromMember)  # type: ignore[arg-type]
_ANSWERS: Decoder[FromRouter] = Decoder(FromRouter)  # type: ignore[arg-type]


class Party:
    """Something that can crash and hang."""

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name = world, name
        self.life = 1
        self.is_alive = True
        self.hung_until = 0.0
        self.cut_until = 0.0
        """No message between it and the router until then."""

    def crash(self, seconds: float) -> None:
        """Die; `restart` follows."""
        self.life += 1
        self.is_alive = False
        self.world.at(seconds, None, self.restart)

    def restart(self) -> None:
        """Be there again."""
        self.is_alive = True

    def told(self, route: bytes, message: FromRouter) -> None:
        """A message of the router arrived."""
        raise AssertionError("subclass")


class Router(Party):
    """The router's process: all it knows is lost with it."""

    def __init__(self, world: "World") -> None:
        super().__init__(world, "router")
        self.state = self._new()

    def _new(self) -> RouterState:
        return RouterState(SETTINGS, secret=b"s" * 32, mint=self.world.mint)

    def restart(self) -> None:
        self.world.check_router(at_end=False)
        self.state = self._new()
        super().restart()

    def hear(self, route: bytes, message: FromMember) -> None:
        """A member's message arrived."""
        self._act(Received(route, message, self.world.clock.wall()))

    def tick(self) -> None:
        """Time has passed."""
        if self.is_alive and self.hung_until <= self.world.now:
            self._act(Tick())
        self.world.at(BEAT_S / 2, None, self.tick)

    def unreachable(self, route: bytes) -> None:
        """That connection is gone."""
        self._act(Unreachable(route))

    def _act(self, event: Received | Tick | Unreachable) -> None:
        for action in self.state.handle(event, self.world.now):
            if isinstance(action, Send):
                if isinstance(action.message, Ended):
                    self.world.ended[action.message.transfer_id] += 1
                for route in action.routes:
                    self.world.to_member(route, action.message)


class World:
    """Time, events and the wires between parties."""

    def __init__(
        self, seed: int, trace: Callable[[str], None] | None = None, grants_name_generation: bool = True
    ) -> None:
        self.grants_name_generation = grants_name_generation
        self.rng = random.Random(seed)
        self.plan = FaultPlan(self.rng)
        self.clock = FakeClock(now=100.0)
        self.now = self.clock.now()
        self.problems: list[str] = []
        self.num_events = 0
        self.ended: Counter[str] = Counter()
        """Ended messages that the router sent, by transfer."""
        self._trace = trace
        self._queue: list[tuple[float, int, Party | None, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_queued = self._num_minted = 0
        self._fifo: dict[object, float] = {}
        self.members: dict[bytes, Party] = {}
        """By connection to the router."""
        self.router = Router(self)

    def mint(self) -> str:
        self._num_minted += 1
        return f"t{self._num_minted}"

    def note(self, text: str) -> None:
        """A line of the trace."""
        if self._trace is not None:
            self._trace(f"{self.now - 100:8.4f}  {text}")

    def violated(self, text: str) -> None:
        """An invariant does not hold."""
        self.problems.append(f"{self.now - 100:.4f}: {text}")
        self.note(f"VIOLATED {text}")

    # ---- events ----------------------------------------------------------------------------------------------

    def at(
        self, delay: float, owner: Party | None, call: Callable[..., None], *args: Any, any_life: bool = False
    ) -> None:
        """Later, if `owner` still lives the same life then (`any_life`: or another one)."""
        self._push(self.now + delay, owner, call, args, any_life)

    def in_order(self, key: object, owner: Party | None, call: Callable[..., None], *args: Any) -> None:
        """Soon, after everything else with this key: a stream."""
        when = max(self._fifo.get(key, 0.0), self.now + self.plan.delay(set()))
        self._fifo[key] = when
        self._push(when, owner, call, args, False)

    def _push(
        self, when: float, owner: Party | None, call: Callable[..., None], args: tuple[Any, ...], any_life: bool
    ) -> None:
        self._num_queued += 1
        life = -1 if any_life or owner is None else owner.life
        heapq.heappush(self._queue, (when, self._num_queued, owner, life, call, args))

    def step(self) -> None:
        """The next event."""
        when, number, owner, life, call, args = heapq.heappop(self._queue)
        self.clock.advance(max(0.0, when - self.now))
        self.now = self.clock.now()
        self.num_events += 1
        if owner is not None:
            if not owner.is_alive or life not in (-1, owner.life):
                return
            if owner.hung_until > self.now:
                heapq.heappush(self._queue, (owner.hung_until, number, owner, life, call, args))
                return
        call(*args)

    # ---- control network -------------------------------------------------------------------------------------

    def to_router(self, sender: Party, route: bytes, message: FromMember) -> None:
        """Over ZMQ."""
        self.note(f"{route.decode()} → router: {type(message).__name__} {getattr(message, 'transfer_id', '')}")
        if sender.cut_until > self.now:
            return
        for delay in self._copies(message, _DECODER):
            self.at(delay, self.router, self.router.hear, route, message, any_life=True)

    def to_member(self, route: bytes, message: FromRouter) -> None:
        """Over ZMQ. A closed connection is noticed when something is sent."""
        if isinstance(message, HeartbeatAck) and message.known:
            return
        self.note(f"router → {route.decode()}: {type(message).__name__} {getattr(message, 'transfer_id', '')}")
        party = self.members.get(route)
        if party is None:
            self.at(self.plan.delay(set()), self.router, self.router.unreachable, route)
        elif party.cut_until <= self.now:
            for delay in self._copies(message, _ANSWERS):
                self.at(delay, party, party.told, route, message)

    def _copies(self, message: FromMember | FromRouter, decoder: Decoder[Any]) -> list[float]:
        fates = self.plan.fates()
        if Fate.CORRUPT in fates:
            self._refused(encode(message), decoder)
        if fates & {Fate.LOST, Fate.CORRUPT}:
            return []
        first = self.plan.delay(fates)
        return [first, first + self.plan.delay(fates)] if Fate.DUPLICATED in fates else [first]

    def _refused(self, data: bytes, decoder: Decoder[Any]) -> None:
        """A message that was cut short must not be taken for another one."""
        try:
            decoder.decode(data[: self.rng.randrange(len(data))])
        except ProtocolError:
            return
        self.violated("a message that was cut short was decoded")

    # ---- the router's invariants -----------------------------------------------------------------------------

    def check_router(self, *, at_end: bool) -> None:
        """Sums agree, every lease ended once; at the end nothing is left."""
        state = self.router.state
        answers = state.out.counts["answers", "pairing"]
        ended = sum(count for (name, _), count in state.out.counts.items() if name == "ended")
        if answers != ended + len(state.leases):
            self.violated(f"{answers} pairings, {ended} ends, {len(state.leases)} leases")
        for engine in state.cluster.engines.values():
            try:
                engine.credit.check()
            except AssertionError:
                self.violated(f"credit of {engine.engine_id} does not add up")
            if engine.outstanding_tokens < 0:
                self.violated(f"{engine.engine_id} has {engine.outstanding_tokens} tokens outstanding")
            if at_end and (engine.credit.reserved or engine.outstanding_tokens):
                self.violated(
                    f"{engine.engine_id}: {engine.credit.reserved} blocks reserved and {engine.outstanding_tokens} "
                    "tokens outstanding at the end"
                )
        for transfer_id, count in self.ended.items():
            if count > 1:
                self.violated(f"{transfer_id} ended {count} times")
        if at_end and (len(state.leases) or len(state.placement.queue)):
            self.violated(f"{len(state.leases)} leases and {len(state.placement.queue)} questions left")
