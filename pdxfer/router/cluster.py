"""Membership: who has joined, who is suspect, who may exchange KV with whom.

Applies hellos, heartbeats and silence to the records of members.py, and derives from them the eligible pairs, the
lists of peers for the workers, and the reasons why nothing is ready. Ending transfers is left to the caller, who is
told about each lost engine.
"""

import math
from collections.abc import Callable

from pdxfer.router.eligibility import Mismatches, is_eligible, kind_of, may_exchange, peer_node, reasons, store_nodes
from pdxfer.router.members import Engine, Identity, Link, Proxy, Worker, difference
from pdxfer.router.outbox import Outbox
from pdxfer.router.settings import RouterSettings
from pdxfer.wire.messages import (
    Heartbeat,
    HeartbeatAck,
    Hello,
    PeerReady,
    Peers,
    ProxyHello,
    Refused,
    Role,
    WorkerHello,
)

MAX_ENGINES = 1024
MAX_PROXIES = 1024
_MAX_PEER_READY = 4096

Pairs = list[tuple[Engine, list[Engine]]]
"""Usable decode engines, each with the prefill engines that can reach it."""


class Cluster:
    """All members. `on_lost(engine, reason)` is called when an engine is suspect, replaced, forgotten or left."""

    def __init__(
        self, settings: RouterSettings, secret: bytes, out: Outbox, on_lost: Callable[[Engine, str], None]
    ) -> None:
        self.engines: dict[str, Engine] = {}
        self.proxies: dict[bytes, Proxy] = {}
        self.routes: dict[bytes, tuple[Engine, Link]] = {}
        self._settings = settings
        self._secret = secret
        self._out = out
        self._on_lost = on_lost
        self._mismatches: Mismatches = {}
        self._pairs: dict[str, Pairs] = {}
        """By model; empty after any change."""
        self._peers_changed = False
        self._first_tick = math.inf

    # ---- hellos ----------------------------------------------------------------------------------------------

    def hello(self, route: bytes, identity: Identity, hello: Hello, now: float, wall: float) -> None:
        """A scheduler half is there."""
        if not identity.is_scheduler:
            self._refuse(route, f"Hello came from {identity.name}/{identity.part}, not from a scheduler half")
            return
        engine = self._admit(route, identity, hello.engine_id, hello.incarnation, now)
        if engine is None:
            return
        if engine.hello is None:
            engine.credit.report(hello.free_blocks, now)
        engine.hello = hello
        engine.sched = self._link(route, engine, engine.sched, now)
        self._acknowledge(route, engine, wall)

    def worker_hello(self, route: bytes, identity: Identity, hello: WorkerHello, now: float, wall: float) -> None:
        """A rank is there."""
        if identity.rank != hello.rank:
            self._refuse(route, f"WorkerHello of rank {hello.rank} came from {identity.name}/{identity.part}")
            return
        engine = self._admit(route, identity, hello.engine_id, hello.incarnation, now)
        if engine is None:
            return
        worker = engine.workers.get(hello.rank)
        link = self._link(route, engine, worker.link if worker else None, now)
        ready = worker.ready if worker else {}
        engine.workers[hello.rank] = Worker(link=link, hello=hello, ready=ready)
        self._acknowledge(route, engine, wall)

    def proxy_hello(self, route: bytes, identity: Identity, hello: ProxyHello, now: float, wall: float) -> None:
        """A proxy is there."""
        if not identity.is_proxy or identity.part != hello.proxy_id:
            self._refuse(route, f"ProxyHello of {hello.proxy_id} came from {identity.name}/{identity.part}")
        elif self.proxy(route, identity, now) is not None:
            self._out.send(HeartbeatAck(known=True, wall=wall), route)

    def proxy(self, route: bytes, identity: Identity, now: float) -> Proxy | None:
        """The proxy behind a connection, registered on first sight; None if there are too many."""
        proxy = self.proxies.get(route)
        if proxy is None:
            if len(self.proxies) >= MAX_PROXIES:
                self._refuse(route, f"there are {MAX_PROXIES} proxies already")
                return None
            link = Link(route=route, last_seen=now)
            proxy = self.proxies[route] = Proxy(proxy_id=identity.part, link=link)
            self._out.happened("proxy_joined", proxy_id=proxy.proxy_id)
        proxy.link.last_seen = now
        return proxy

    def proxy_offset(self, route: bytes) -> float:
        """Our wall clock − that proxy's; 0.0 while it is unknown."""
        proxy = self.proxies.get(route)
        return (proxy.link.clock_offset if proxy is not None else None) or 0.0

    # ---- life ------------------------------------------------------------------------------------------------

    def heartbeat(self, route: bytes, beat: Heartbeat, now: float, wall: float) -> None:
        """A member reports; `known` False in the answer asks for its hello."""
        known = self.routes.get(route)
        if known is None:
            proxy = self.proxies.get(route)
            if proxy is not None:
                proxy.link.heard(beat, now, wall)
            self._out.send(HeartbeatAck(known=proxy is not None, wall=wall), route)
            return
        engine, link = known
        if beat.incarnation != engine.incarnation:
            self._out.count("refused", "incarnation")
            self._out.send(HeartbeatAck(known=False, wall=wall), route)
            return
        self._note_changes(engine, link.beat, beat)
        link.heard(beat, now, wall)
        if link is engine.sched:
            engine.num_running, engine.num_waiting = beat.num_running, beat.num_waiting
            if beat.free_blocks >= 0:
                engine.credit.report(beat.free_blocks, now)
        self._out.send(HeartbeatAck(known=True, wall=wall), route)
        if engine.is_suspect and engine.silent_s(now) <= self._settings.suspect_s:
            self._back(engine)

    def peer_ready(self, engine: Engine, link: Link, ready: PeerReady) -> None:
        """A worker opened its channel to a peer node, or could not."""
        if not ready.kind and ready.engine_id not in self.engines:
            return  # that engine has left: nobody misses the channel
        for worker in engine.workers.values():
            if worker.link is link and (ready.engine_id in worker.ready or len(worker.ready) < _MAX_PEER_READY):
                before = worker.ready.get(ready.engine_id)
                worker.ready[ready.engine_id] = ready
                self._pairs.clear()
                if before is not None and before.kind != ready.kind:
                    self._channel_changed(engine, before, ready)

    def excuse(self, seconds: float, now: float) -> None:
        """We did not listen for so long: nobody's silence. Who is suspect already stays so until heard."""
        if seconds > 0.0:
            links = [link for engine in self.engines.values() if not engine.is_suspect for link in engine.links]
            for link in (*links, *(proxy.link for proxy in self.proxies.values())):
                link.last_seen = min(now, link.last_seen + seconds)

    def tick(self, now: float) -> None:
        """Judge silence, a tick early rather than a tick late; tell workers their peers if those changed."""
        for engine in list(self.engines.values()):
            silent_s = engine.silent_s(now)
            if all(now - link.last_seen > self._settings.forget_s for link in engine.links):
                self.remove(engine, f"silent for {self._settings.forget_s:g} s, forgotten")
            elif silent_s > self._settings.suspect_s - self._settings.tick_s and not engine.is_suspect:
                self.suspect(engine, f"no heartbeat for {silent_s:.1f} s")
        self._first_tick = min(self._first_tick, now)
        if self._peers_changed and now >= self._first_tick + self._settings.settle_s:
            self._peers_changed = False
            self._tell_peers()

    def suspect(self, engine: Engine, reason: str) -> None:
        """No new pairings; its transfers go on without it. It is back with its next heartbeats."""
        engine.is_suspect = True
        self._pairs.clear()
        self._out.log("warning", f"engine {engine.engine_id} is suspect: {reason}; no new pairings until it is back")
        self._out.happened("suspect", engine_id=engine.engine_id, reason=reason)
        self._on_lost(engine, reason)

    def remove(self, engine: Engine, reason: str) -> None:
        """The engine is no member any more."""
        del self.engines[engine.engine_id]
        for link in engine.links:
            self.routes.pop(link.route, None)
        for pair in [pair for pair in self._mismatches if engine.engine_id in pair]:
            del self._mismatches[pair]
        for worker in (worker for other in self.engines.values() for worker in other.workers.values()):
            worker.ready.pop(engine.engine_id, None)
        self._changed()
        self._out.log("info", f"engine {engine.engine_id} left: {reason}")
        self._out.happened("left", engine_id=engine.engine_id, reason=reason)
        self._on_lost(engine, reason)

    def set_drain(self, engine: Engine, on: bool) -> None:
        """Take an engine out of, or back into, new pairings."""
        engine.is_draining = on
        self._pairs.clear()
        self._out.log("info", f"engine {engine.engine_id} {'drains' if on else 'takes new work again'}")
        self._out.happened("drain" if on else "undrain", engine_id=engine.engine_id)

    def set_role(self, engine: Engine, role: Role) -> None:
        """Have an engine that can do both do this."""
        engine.given_role = role
        self._changed()
        self._out.log("info", f"engine {engine.engine_id} does {role} from now on")
        self._out.happened("role", engine_id=engine.engine_id, role=role)
        if engine.is_joined:
            self._compare(engine)

    def apply(self, settings: RouterSettings) -> None:
        """These settings from now on."""
        self._settings = settings

    # ---- views -----------------------------------------------------------------------------------------------

    def pairs(self, model: str) -> Pairs:
        """Usable decode engines for a model, with their prefill engines."""
        found = self._pairs.get(model)
        if found is None:
            usable = [engine for engine in self.engines.values() if engine.is_usable and engine.serves(model)]
            prefills = [engine for engine in usable if engine.can_prefill]
            found = [
                (decode, [prefill for prefill in prefills if is_eligible(prefill, decode, self._mismatches)])
                for decode in usable
                if decode.can_decode
            ]
            if found:
                self._pairs[model] = found
        return found

    def has_pair(self) -> bool:
        """Whether a request could be served as intended: an eligible pair, or one engine for both roles."""
        return any(partners or decode.can_prefill for decode, partners in self.pairs(""))

    def reasons(self, now: float) -> list[str]:
        """What keeps engines and pairs from being used, one sentence each."""
        return reasons(self.engines.values(), self._mismatches, now)

    # ---- joining ---------------------------------------------------------------------------------------------

    def _admit(self, route: bytes, identity: Identity, engine_id: str, incarnation: int, now: float) -> Engine | None:
        """The record for this life of an engine, new if need be; None if the hello was refused."""
        if identity.name != engine_id:
            self._refuse(route, f"this connection is {identity.name}/{identity.part}, its hello names {engine_id}")
            return None
        known = self.engines.get(engine_id)
        if known is not None and incarnation == known.incarnation:
            return known
        if known is not None and incarnation < known.incarnation and not known.is_suspect:
            self._refuse(
                route,
                f"engine_id {engine_id} belongs to a later start "
                f"(incarnation {known.incarnation}, yours {incarnation}): stop one of the two, or give each its own id",
            )
            return None
        if known is not None:
            self.remove(known, f"replaced by incarnation {incarnation}")
        elif len(self.engines) >= MAX_ENGINES:
            self._refuse(route, f"there are {MAX_ENGINES} engines already")
            return None
        engine = self.engines[engine_id] = Engine(engine_id=engine_id, incarnation=incarnation)
        return engine

    def _link(self, route: bytes, engine: Engine, old: Link | None, now: float) -> Link:
        if old is not None and old.route == route:
            old.last_seen = now
            return old
        if old is not None:
            self.routes.pop(old.route, None)
        link = Link(route=route, last_seen=now)
        self.routes[route] = (engine, link)
        return link

    def _acknowledge(self, route: bytes, engine: Engine, wall: float) -> None:
        self._out.send(HeartbeatAck(known=True, wall=wall), route)
        was_joined, engine.is_joined = engine.is_joined, not engine.missing
        self._changed()
        if engine.is_joined and not was_joined:
            self._joined(engine)
        elif engine.is_joined:
            self._compare(engine)

    def _joined(self, engine: Engine) -> None:
        assert engine.hello is not None
        role, blocks = engine.hello.role, engine.hello.capacity.num_blocks
        self._out.log("info", f"engine {engine.engine_id} joined as {role}: {engine.hello.url}, {blocks} blocks")
        self._out.happened("joined", engine_id=engine.engine_id, role=role)
        self._compare(engine)

    def _compare(self, engine: Engine) -> None:
        """Fail closed on any difference between engines that would exchange KV; say so once."""
        for other in list(self.engines.values()):
            for prefill, decode in ((engine, other), (other, engine)):
                if other is engine or not (other.is_joined and prefill.can_prefill and decode.can_decode):
                    continue
                pair, text = (prefill.engine_id, decode.engine_id), difference(prefill, decode)
                if text and self._mismatches.get(pair) != text:
                    self._mismatches[pair] = text
                    self._out.log("warning", text)
                    self._out.happened("mismatch", prefill=pair[0], decode=pair[1], reason=text)
                elif not text:
                    self._mismatches.pop(pair, None)

    def _back(self, engine: Engine) -> None:
        engine.is_suspect = False
        self._pairs.clear()
        self._out.log("info", f"engine {engine.engine_id} is back")
        self._out.happened("back", engine_id=engine.engine_id)

    def _note_changes(self, engine: Engine, before: Heartbeat | None, beat: Heartbeat) -> None:
        """At most one event a tier and heartbeat, however many values went."""
        spilled = beat.counts.get("spilled_prompts", 0) - (before.counts.get("spilled_prompts", 0) if before else 0)
        if before is not None and spilled > 0:
            self._out.happened("spilled", engine_id=engine.engine_id, prompts=str(spilled))
        old = {tier.kind: tier for tier in before.tiers} if before is not None else {}
        for tier in beat.tiers:
            known = old.get(tier.kind)
            if known is not None and tier.evictions > known.evictions:
                count = str(tier.evictions - known.evictions)
                self._out.happened("evicted", engine_id=engine.engine_id, tier=tier.kind, values=count)
            if known is not None and tier.reachable != known.reachable:
                kind = "tier_back" if tier.reachable else "tier_away"
                self._out.happened(kind, engine_id=engine.engine_id, tier=tier.kind)

    def _channel_changed(self, engine: Engine, before: PeerReady, now: PeerReady) -> None:
        """A channel broke, came back, or was replaced by another kind."""
        kind = "channel_open" if now.kind else "channel_broken"
        self._out.happened(
            kind, engine_id=engine.engine_id, peer=now.engine_id, channel=now.kind or before.kind,
            reason=now.reason[:200],
        )  # fmt: skip

    def _refuse(self, route: bytes, reason: str) -> None:
        self._out.count("refused", "hello")
        self._out.log("warning", f"hello refused: {reason}")
        self._out.send(Refused(reason=reason[:2048]), route)

    def _changed(self) -> None:
        self._pairs.clear()
        self._peers_changed = True

    # ---- peers -----------------------------------------------------------------------------------------------

    def _tell_peers(self) -> None:
        joined = [engine for engine in self.engines.values() if engine.is_joined]
        stores = store_nodes(joined)
        for engine in joined:
            others = [e for e in joined if e is not engine and may_exchange(engine, e, self._mismatches)]
            kind = kind_of(engine)
            for rank, worker in engine.workers.items():
                nodes = [peer_node(other, rank) for other in others if rank in other.workers]
                peers = Peers(nodes=nodes, secret=self._secret, stores=stores.get((kind, rank), []))
                if peers != worker.told:
                    worker.told = peers
                    self._out.send(peers, worker.link.route)
