"""The router's decisions, without I/O: `handle(event, now)` returns what to send, log and show.

Composes membership (cluster), answers to proxies (placement), transfers (relay) and leases. Never reads a clock, never
fails on what members send: a message that does not fit is dropped and counted.
"""

from collections.abc import Callable

from pdxfer.core.ids import new_transfer_id
from pdxfer.router.attention import Attention
from pdxfer.router.cluster import Cluster
from pdxfer.router.events import (
    Action,
    Event,
    Received,
    SetCreditLimit,
    SetDrain,
    SetPolicy,
    SetRole,
    Stop,
    Tell,
    TellProxy,
    Tick,
    Unreachable,
)
from pdxfer.router.leases import Leases
from pdxfer.router.members import Engine, Identity, Link, parse_route
from pdxfer.router.outbox import Outbox
from pdxfer.router.placement import Placement
from pdxfer.router.relay import Relay
from pdxfer.router.settings import RouterSettings
from pdxfer.router.snapshot import Snapshot, shifted, take_snapshot
from pdxfer.wire.manage import StoreOpUpdate
from pdxfer.wire.messages import (
    CancelGrant,
    Drain,
    Ended,
    FromMember,
    Goodbye,
    Grant,
    Heartbeat,
    Hello,
    LegFailed,
    Pair,
    PeerReady,
    ProxyHello,
    Release,
    Resume,
    Served,
    Stamp,
    Started,
    WorkerHello,
)


class RouterState:
    """All that the router knows. `secret` goes to the workers, who prove it to each other."""

    def __init__(self, settings: RouterSettings, *, secret: bytes, mint: Callable[[], str] = new_transfer_id) -> None:
        self._settings = settings
        self._now = 0.0
        self._capacity_changed = False
        self._draining: set[str] = set()
        """Draining engines that still have transfers."""
        self.out = Outbox()
        self.leases = Leases()
        self.relay = Relay(
            self.leases,
            settings.lease_s,
            self.out,
            lambda lease, rest: self.placement.other_prefill(lease, rest),
            lambda route: self.cluster.proxy_offset(route),
        )
        self.cluster = Cluster(settings, secret, self.out, self._engine_lost)
        self.placement = Placement(settings, self.cluster, self.leases, self.out, mint)
        self._attention = Attention(settings.attention_s)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Apply one event. `now` never goes back."""
        self._now = now
        if isinstance(event, Received):
            self._received(event.route, event.message, event.wall)
        elif isinstance(event, Unreachable):
            self._unreachable(event.route)
        elif isinstance(event, SetDrain):
            self._set_drain(event.engine_id, event.on)
        elif isinstance(event, Stop):
            self.placement.stop(now)
        elif not isinstance(event, Tick):
            self._operate(event)
        else:
            self._tick()
        if self._capacity_changed and len(self.placement.queue):
            self._capacity_changed = False
            self.placement.place_waiting(now)
        return self.out.take()

    def snapshot(self, now: float) -> Snapshot:
        """A copy for others to read."""
        return take_snapshot(self._settings, self.cluster, self.placement, self.leases, self.out, now)

    # ---- messages --------------------------------------------------------------------------------------------

    def _received(self, route: bytes, message: FromMember, wall: float) -> None:
        known = self.cluster.routes.get(route)
        if known is not None:
            engine, link = known
            self._from_engine(engine, link, message, wall)
            return
        identity = parse_route(route)
        if identity is None:
            self.out.count("refused", "identity")
        elif identity.is_proxy:
            self._from_proxy(route, identity, message, wall)
        else:
            self._from_stranger(route, identity, message, wall)

    def _from_engine(self, engine: Engine, link: Link, message: FromMember, wall: float) -> None:
        if isinstance(message, Heartbeat):
            self.cluster.heartbeat(link.route, message, self._now, wall)
            self._capacity_changed = True
        elif isinstance(message, StoreOpUpdate):
            self.out.observed(engine.engine_id, message)
        elif isinstance(message, PeerReady):
            self.cluster.peer_ready(engine, link, message)
            self._capacity_changed = True
        elif isinstance(message, Hello | WorkerHello):
            self._hello(link.route, message, wall)
        elif link is not engine.sched:
            self.out.count("refused", "unexpected")
        else:
            self._from_scheduler(engine, link, message)

    def _from_scheduler(self, engine: Engine, link: Link, message: FromMember) -> None:
        if isinstance(message, Stamp):
            self.relay.stamp(engine, link, message)
        elif isinstance(message, Started):
            self.relay.started(engine, message, self._now)
        elif isinstance(message, Grant):
            self.relay.grant(engine, message, self._now)
        elif isinstance(message, Ended):
            self.relay.ended(engine, message, self._now)
            self._transfer_over()
        elif isinstance(message, CancelGrant):
            self.relay.cancel_grant(engine, message)
        elif isinstance(message, LegFailed):
            self.relay.leg_failed(engine, message, self._now)
            self._transfer_over()
        elif isinstance(message, Resume):
            self.relay.resume(engine, link, message)
            self._transfer_over()
        elif isinstance(message, Goodbye):
            self.cluster.remove(engine, f"goodbye: {message.reason}")
        else:
            self.out.count("refused", "unexpected")

    def _from_proxy(self, route: bytes, identity: Identity, message: FromMember, wall: float) -> None:
        if isinstance(message, Heartbeat):
            self.cluster.heartbeat(route, message, self._now, wall)
        elif isinstance(message, ProxyHello):
            self.cluster.proxy_hello(route, identity, message, self._now, wall)
        elif isinstance(message, Goodbye):
            self._proxy_gone(route, f"goodbye: {message.reason}")
        elif self.cluster.proxy(route, identity, self._now) is None:
            self.out.count("refused", "stranger")
        elif isinstance(message, Pair):
            self.placement.ask(route, message, self._now)
        elif isinstance(message, Served):
            self.out.observed("", shifted(message, self.cluster.proxy_offset(route)))
        elif isinstance(message, Release):
            if not self.placement.withdraw(route, message.transfer_id):
                self.relay.release(route, message, self._now)
            self._transfer_over()
        elif isinstance(message, LegFailed):
            self.relay.proxy_leg_failed(route, message, self._now)
            self._transfer_over()
        else:
            self.out.count("refused", "unexpected")

    def _from_stranger(self, route: bytes, identity: Identity, message: FromMember, wall: float) -> None:
        """An engine's connection that has not said hello to this router."""
        if isinstance(message, Hello | WorkerHello):
            self._hello(route, message, wall)
        elif isinstance(message, Heartbeat):
            self.cluster.heartbeat(route, message, self._now, wall)
        else:
            self.out.count("refused", "stranger")

    def _hello(self, route: bytes, message: Hello | WorkerHello, wall: float) -> None:
        identity = parse_route(route)
        assert identity is not None
        if isinstance(message, Hello):
            self.cluster.hello(route, identity, message, self._now, wall)
        else:
            self.cluster.worker_hello(route, identity, message, self._now, wall)
        self._capacity_changed = True

    # ---- the rest --------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self.cluster.excuse(self._attention.look(self._now), self._now)
        self.cluster.tick(self._now)
        self.relay.expire(self._now)
        self._transfer_over()
        self.placement.expire(self._now)
        for proxy in list(self.cluster.proxies.values()):
            if self._now - proxy.link.last_seen > 2 * self._settings.suspect_s:
                self._proxy_gone(proxy.link.route, "no heartbeat")

    def _set_drain(self, engine_id: str, on: bool) -> None:
        engine = self.cluster.engines.get(engine_id)
        if engine is None:
            return
        self.cluster.set_drain(engine, on)
        self.out.send_link(engine.sched, Drain(on=on))
        (self._draining.add if on else self._draining.discard)(engine_id)
        self._transfer_over()

    def _operate(self, event: SetRole | SetCreditLimit | SetPolicy | Tell | TellProxy) -> None:
        """What operators change while it runs."""
        if isinstance(event, SetPolicy):
            self._settings = event.settings
            self.relay.lease_s = event.settings.lease_s
            self.cluster.apply(event.settings)
            self.placement.apply(event.settings)
            self.out.happened("policy")
            self._capacity_changed = True
            return
        if isinstance(event, TellProxy):
            routes = [p.link.route for p in self.cluster.proxies.values() if p.proxy_id == event.proxy_id]
            self.out.send(event.message, *routes)
            return
        engine = self.cluster.engines.get(event.engine_id)
        if engine is None:
            return
        if isinstance(event, SetRole):
            if engine.hello is not None and engine.hello.role == "both":
                self.cluster.set_role(engine, event.role)
        elif isinstance(event, SetCreditLimit):
            engine.credit.limit = event.num_blocks
            shown = "none" if event.num_blocks is None else str(event.num_blocks)
            self.out.happened("credit_limit", engine_id=engine.engine_id, blocks=shown)
        else:
            self.out.send(event.message, *engine.worker_routes)
            if not event.workers_only:
                self.out.send_link(engine.sched, event.message)
        self._capacity_changed = True

    def _transfer_over(self) -> None:
        """A lease may have ended: capacity is back, a drain may be done."""
        self._capacity_changed = True
        for engine_id in [one for one in self._draining if not self.leases.of_engine(one)]:
            self._draining.discard(engine_id)
            self.out.log("info", f"engine {engine_id} is drained: no transfer is left")
            self.out.happened("drained", engine_id=engine_id)

    def _engine_lost(self, engine: Engine, reason: str) -> None:
        self.relay.engine_lost(engine, f"engine {engine.engine_id} lost: {reason}", self._now)
        self._transfer_over()

    def _unreachable(self, route: bytes) -> None:
        """Its connection is gone. Engines are suspect at once; a proxy may reconnect and keeps its leases."""
        known = self.cluster.routes.get(route)
        if known is not None and not known[0].is_suspect:
            known[1].last_seen = self._now - self._settings.suspect_s
            self.cluster.suspect(known[0], "its connection is closed")

    def _proxy_gone(self, route: bytes, reason: str) -> None:
        proxy = self.cluster.proxies.pop(route, None)
        if proxy is None:
            return
        self.placement.forget_proxy(route)
        for lease in self.leases.of_proxy(route):
            self.relay.give_up(lease, f"its proxy left: {reason}", self._now, tell_proxy=False)
        self.out.happened("proxy_left", proxy_id=proxy.proxy_id, reason=reason)
        self._transfer_over()
