"""Channels to all peers, opened before the first request: eager connect, probe, fall-back, retry, upgrade.

The node hands in the peers that the router names; for each that can receive, the pool keeps the best channel that
works, by the order of the endpoints. It says once in the log what was chosen and why. Connects run on its own threads.
"""

import logging
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from pdxfer.core.clock import SYSTEM_CLOCK, Clock
from pdxfer.core.cpus import unpin_current_thread
from pdxfer.core.errors import PdxferError
from pdxfer.transport.base import Channel, Endpoint, PeerId
from pdxfer.transport.breaker import Breaker
from pdxfer.transport.kinds import endpoint_factories
from pdxfer.wire.messages import PeerNode

__all__ = ["ChannelPool", "endpoint_factories"]

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
MAX_CONNECTING = 8
WATCH_S = 0.5
"""How often open channels are looked at for a quiet death."""
RETIRE_S = 60.0
"""A channel that a better one replaced stays open this long, for the sender that is still using it."""

OnReady = Callable[[PeerId, str, str], None]
"""(peer, kind, reason): a channel of `kind` is open; kind empty: none is, and why."""


@dataclass(slots=True)
class _Peer:
    """One engine's node, as a target."""

    node: PeerNode
    breakers: dict[str, Breaker]
    channel: Channel | None = None
    opened_at: float = 0.0
    connecting: bool = False
    told: str | None = None
    """Kind last reported to on_ready."""
    notes: dict[str, str] = field(default_factory=dict)
    """Why each kind that is not in use is not, by kind."""

    @property
    def id(self) -> PeerId:
        return PeerId(engine_id=self.node.engine_id, incarnation=self.node.incarnation, rank=self.node.rank)

    def address(self, kind: str) -> bytes | None:
        """The peer's address for a kind of channel."""
        return next((a.blob for a in self.node.addresses if a.kind == kind), None)


class ChannelPool:
    """One node's outgoing channels."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        me: PeerId,
        on_ready: OnReady,
        clock: Clock = SYSTEM_CLOCK,
        seed: int | None = None,
    ) -> None:
        self._endpoints, self._me, self._on_ready, self._clock = list(endpoints), me, on_ready, clock
        self._rng = random.Random(seed)
        self._peers: dict[str, _Peer] = {}
        self._retired: list[tuple[float, Channel]] = []
        self._changed = threading.Condition()
        self._stop = False
        self._workers = ThreadPoolExecutor(MAX_CONNECTING, "pdxfer-pool", initializer=unpin_current_thread)
        self._thread = threading.Thread(target=self._run, name="pdxfer-pool", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        with self._changed:
            kinds = {e: p.channel.kind if p.channel else None for e, p in self._peers.items()}
        return f"<ChannelPool {kinds}>"

    # ---- called by the node ----------------------------------------------------------------------------------------

    def update(self, peers: Sequence[PeerNode], secret: bytes) -> None:
        """Replace the peers. `secret` has gone to the endpoints (Endpoint.admit) already; it is not used here."""
        gone: list[Channel] = []
        with self._changed:
            wanted = {n.engine_id: n for n in peers if n.role != "prefill" and n.engine_id != self._me.engine_id}
            for engine_id in list(self._peers):
                peer, node = self._peers[engine_id], wanted.get(engine_id)
                if node is None or node.incarnation != peer.node.incarnation:
                    del self._peers[engine_id]
                    if peer.channel is not None:
                        gone.append(peer.channel)
            # Nor may a sender go on over what was replaced: its transfers to that peer are about to be settled.
            stay = {peer.id for peer in self._peers.values()}
            gone += [channel for _, channel in self._retired if channel.peer not in stay]
            self._retired = [(at, channel) for at, channel in self._retired if channel.peer in stay]
            for engine_id, node in wanted.items():
                self._take(engine_id, node)
            self._changed.notify_all()
        for channel in gone:
            channel.close()

    def announce(self) -> None:
        """Tell on_ready of every open channel again: the router may be a new one."""
        with self._changed:
            open_now = [(peer.id, peer.channel.kind) for peer in self._peers.values() if peer.channel is not None]
        for peer, kind in open_now:
            self._on_ready(peer, kind, "")

    def channel(self, engine_id: str) -> Channel | None:
        """The best open channel to that engine now. Cheap: a sender asks whenever it has nothing in flight."""
        with self._changed:
            peer = self._peers.get(engine_id)
            if peer is None or peer.channel is None or peer.channel.dead:
                return None
            return peer.channel

    def report_failure(self, channel: Channel, reason: str) -> None:
        """The sender found that channel dead or useless: close it and find another. The one that has replaced it
        already stays."""
        with self._changed:
            known = self._peers.get(channel.peer.engine_id)
            if known is None or known.channel is not channel:
                return
            self._drop(known, channel, reason)
        channel.close()
        self._report(known, "", f"{channel.kind}: {reason}")

    def close(self) -> None:
        """Close every channel; idempotent."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self._thread.join(CONNECT_TIMEOUT_S)
        self._workers.shutdown(wait=True, cancel_futures=True)
        with self._changed:
            channels = [p.channel for p in self._peers.values() if p.channel is not None]
            channels += [channel for _, channel in self._retired]
            self._peers.clear()
            self._retired.clear()
        for channel in channels:
            channel.close()

    # ---- the pool's thread: decides who is tried --------------------------------------------------------------------

    def _take(self, engine_id: str, node: PeerNode) -> None:
        """A peer as the router names it now; a changed address gives its kind a fresh start."""
        peer = self._peers.get(engine_id)
        if peer is None:
            breakers = {endpoint.kind: Breaker(self._rng) for endpoint in self._endpoints}
            self._peers[engine_id] = _Peer(node, breakers)
            return
        before, peer.node = peer.node, node
        old = {a.kind: a.blob for a in before.addresses}
        for kind, breaker in peer.breakers.items():
            if old.get(kind) != peer.address(kind):
                breaker.reset()

    def _run(self) -> None:
        unpin_current_thread()
        while True:
            with self._changed:
                if self._stop:
                    return
                now = self._clock.now()
                dead = [p.channel for p in self._peers.values() if p.channel is not None and p.channel.dead]
                due = [p for p in self._peers.values() if not p.connecting and self._candidates(p, now)]
                late = [channel for at, channel in self._retired if at <= now]
                self._retired = [(at, channel) for at, channel in self._retired if at > now]
                if not (dead or due or late):
                    self._changed.wait(WATCH_S if self._peers else None)
                    continue
                for peer in due:
                    peer.connecting = True
            for channel in late:
                channel.close()
            for channel in dead:
                self.report_failure(channel, channel.dead)
            for peer in due:
                self._workers.submit(self._attempt, peer)

    def _candidates(self, peer: _Peer, now: float) -> list[Endpoint]:
        """Endpoints worth an attempt now: better than what is open, offered by the peer, not paused, able."""
        found = []
        for endpoint in self._endpoints:
            if peer.channel is not None and endpoint.kind == peer.channel.kind and not peer.channel.dead:
                break
            address = peer.address(endpoint.kind)
            if address is None:
                peer.notes[endpoint.kind] = "the peer does not offer it"
            elif not peer.breakers[endpoint.kind].allows(now):
                continue
            elif reason := self._excuse(peer, endpoint, address, now):
                peer.notes[endpoint.kind] = reason
            else:
                found.append(endpoint)
        return found

    def _excuse(self, peer: _Peer, endpoint: Endpoint, address: bytes, now: float) -> str:
        """Why this kind cannot work from here; empty if it can."""
        try:
            return endpoint.accepts(address)
        except Exception as error:
            # A plug-in's bug: the other kinds go on, on the pool's only thread.
            log.exception("%s cannot judge the address of %s: please report this", endpoint.kind, peer.node.engine_id)
            peer.breakers[endpoint.kind].refused(now, str(error))
            return f"bug: {type(error).__name__}: {error}"

    # ---- connecting: on a worker thread ------------------------------------------------------------------------------

    def _attempt(self, peer: _Peer) -> None:
        """Try the candidates in order until one works."""
        try:
            with self._changed:
                candidates = self._candidates(peer, self._clock.now())
            for endpoint in candidates:
                channel = self._open(peer, endpoint)
                if channel is not None:
                    self._install(peer, channel)
                    break
        except Exception:  # nobody asks for this thread's result
            log.exception("connecting to %s: please report this", peer.node.engine_id)
        finally:
            with self._changed:
                peer.connecting = False
                lacking = peer.channel is None
                reasons = "; ".join(f"{kind}: {note}" for kind, note in peer.notes.items())
                self._changed.notify_all()
            if lacking:
                self._report(peer, "", reasons)

    def _open(self, peer: _Peer, endpoint: Endpoint) -> Channel | None:
        address = peer.address(endpoint.kind)
        assert address is not None
        channel: Channel | None = None
        try:
            channel = endpoint.connect(peer.id, address, CONNECT_TIMEOUT_S)
            channel.probe(CONNECT_TIMEOUT_S)
            return channel
        except Exception as error:
            if not isinstance(error, PdxferError | OSError):  # a plug-in's bug is a refusal
                log.exception("connecting to %s over %s: please report this", peer.node.engine_id, endpoint.kind)
            if channel is not None:
                channel.close()
            with self._changed:
                peer.notes[endpoint.kind] = str(error)
                peer.breakers[endpoint.kind].refused(self._clock.now(), str(error))
            log.debug("%s to %s does not work: %s", endpoint.kind, peer.node.engine_id, error)
            return None

    def _install(self, peer: _Peer, channel: Channel) -> None:
        with self._changed:
            current = not self._stop and self._peers.get(peer.node.engine_id) is peer
            if current:
                now = self._clock.now()
                if peer.channel is not None:
                    self._retired.append((now + RETIRE_S, peer.channel))
                peer.channel, peer.opened_at = channel, now
                peer.notes.pop(channel.kind, None)
        if not current:
            channel.close()
            return
        self._report(peer, channel.kind, self._why(peer, channel.kind))

    def _why(self, peer: _Peer, kind: str) -> str:
        order = [endpoint.kind for endpoint in self._endpoints]
        better = [f"not {k}: {peer.notes[k]}" for k in order[: order.index(kind)] if k in peer.notes]
        worse = [k for k in order[order.index(kind) + 1 :] if peer.address(k) is not None]
        parts = better or ["first choice"]
        return "; ".join([*parts, f"also there: {', '.join(worse)}"] if worse else parts)

    def _drop(self, peer: _Peer, channel: Channel, reason: str) -> None:
        """Take its channel out of use (lock held)."""
        peer.channel = None
        now = self._clock.now()
        peer.breakers[channel.kind].broke(now, now - peer.opened_at, reason)
        peer.notes[channel.kind] = reason
        self._changed.notify_all()

    def _report(self, peer: _Peer, kind: str, reason: str) -> None:
        """Log and tell the node, once a change."""
        with self._changed:
            if peer.told == kind or self._stop:
                return
            peer.told = kind
        if kind:
            log.info("channel to %s: %s (%s)", peer.node.engine_id, kind, reason)
        else:
            log.warning("no channel to %s: %s", peer.node.engine_id, reason)
        self._on_ready(peer.id, kind, reason)
