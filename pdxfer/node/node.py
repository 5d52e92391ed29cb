"""The runtime of one worker half: puts region, endpoints, pool, sender, receiver and router client together.

Made by the connector's worker half (or by FakeEngine) once the KV region exists. It waits for the scheduler half's
Welcome, then opens its endpoints and joins the router. The compute thread touches only begin_step and layers_done.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pdxfer.core.clock import SYSTEM_CLOCK, Clock
from pdxfer.core.errors import ConfigError, PdxferError
from pdxfer.kv.runs import Runs
from pdxfer.memory.region import Region
from pdxfer.node.integrity import Integrity
from pdxfer.node.lane import Lane, Report
from pdxfer.node.operator import Operator
from pdxfer.node.outgoing import Ready
from pdxfer.node.peering import Peering, PeeringSettings
from pdxfer.node.plan import SavePlan, SendPlan
from pdxfer.node.receiver import Receiver
from pdxfer.node.sender import Sender, no_codecs
from pdxfer.node.store_blocks import HostBlocks
from pdxfer.node.store_side import StoreSettings, StoreSide
from pdxfer.node.verbs import Cut, Verbs
from pdxfer.node.wire import Wire
from pdxfer.node.wire_settings import WireSettings
from pdxfer.router.client import ClientSecurity, MemberClient
from pdxfer.transport.base import (
    Abort,
    Channel,
    Control,
    Credit,
    Endpoint,
    EndpointFactory,
    EndpointOptions,
    PeerId,
    UnitFailed,
    UnitHeader,
)
from pdxfer.transport.device import device_problem, is_nixl_installed
from pdxfer.transport.pool import ChannelPool
from pdxfer.wire.halves import (
    Computed,
    Expect,
    Forget,
    Listening,
    Revoke,
    Settled,
    ToScheduler,
    ToWorker,
    Welcome,
    WorkerEnd,
    WorkerReady,
)
from pdxfer.wire.manage import SetWire, StoreArgs, StoreOp, StoreOpCancel
from pdxfer.wire.messages import (
    CancelGrant,
    ChannelAddress,
    FromRouter,
    Grant,
    Heartbeat,
    Message,
    PeerNode,
    PeerReady,
    Peers,
    WorkerHello,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """What a node needs to know; the connector fills it from the config."""

    engine_id: str
    rank: int
    halves_path: str
    """ipc address of the scheduler half (wire/halves.py)."""
    router: str
    """ZMQ endpoint of the router; empty: no router (store mode)."""
    security: ClientSecurity | None = None
    allow_insecure: bool = False
    """The operator does without keys (security.allow_insecure)."""
    options: EndpointOptions = field(default_factory=EndpointOptions)
    chunk_blocks: int = 2
    """Blocks a chunk."""
    digest_every: int = 1
    """Units per digest; 0 takes none (transport.integrity)."""
    drain_s: float = 0.2
    store: StoreSettings | None = None
    """None: KV is not kept."""
    wire: WireSettings | None = None
    """None: everything is sent as it is."""


class Node:
    """One rank's runtime."""

    def __init__(
        self,
        settings: NodeSettings,
        region: Region,
        fingerprint: dict[str, str],
        factories: Mapping[str, EndpointFactory],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Raises ConfigError if no channel can move the KV at all: vLLM's start then ends with that line."""
        if settings.router and not region.host and (problem := device_problem(list(factories), is_nixl_installed())):
            raise ConfigError(problem)
        self._settings, self._region, self._factories, self._clock = settings, region, factories, clock
        self._lock = threading.Lock()
        self._is_closed = False
        self._me: PeerId | None = None
        self._endpoints: list[Endpoint] = []
        self._pool: ChannelPool | None = None
        self._router: MemberClient | None = None
        self._peers: list[PeerNode] = []
        self._generations: tuple[int, ...] = ()
        wire = Wire(settings.wire, region, fingerprint, settings.chunk_blocks, clock) if settings.wire else None
        self.wire, staging = wire, wire.staging if wire else None
        self.receiver = Receiver(settings.rank, region, self._report, clock, settings.drain_s, self._peer_ids, staging)
        self.sender = Sender(
            region.layout.num_layers,
            settings.chunk_blocks,
            self._open_lane,
            self._settled,
            settings.rank,
            wire.codecs_of if wire else no_codecs,
        )
        self.store: StoreSide | None = self._open_store(settings.store) if settings.store is not None else None
        self._integrity = Integrity(self.store.thread, clock) if self.store is not None else None
        self._operator = self._make_operator(self.store) if self.store is not None else None
        self._halves = WorkerEnd(settings.halves_path, settings.rank, self._on_half)
        self._halves.start()
        identity = settings.store.identity if settings.store is not None else {}
        self._halves.send(WorkerReady(rank=settings.rank, fingerprint=fingerprint, identity=identity))
        if self.store is not None:
            self.store.begin()

    # ---- from the compute thread ----------------------------------------------------------------------------------

    def begin_step(self, plans: tuple[SendPlan, ...]) -> None:
        """A step with these plans begins."""
        self.sender.begin_step(plans)

    def layers_done(self, first_layer: int, num_layers: int, ready: Ready = None) -> None:
        """These layers of the step are final."""
        self.sender.layers_done(first_layer, num_layers, ready)

    def computed(self, plans: tuple[SendPlan, ...]) -> None:
        """The step with these plans has been computed (hosts only: a device may still be at it)."""
        now = self._clock.wall()
        for plan in plans:
            if plan.is_last:
                self._halves.send(Computed(transfer_id=plan.transfer_id, wall=now))

    def save(self, plans: tuple[SavePlan, ...], ready: Ready = None) -> None:
        """The step with these plans has run, or will have when `ready` returns."""
        if self.store is not None:
            self.store.save(plans, ready)

    def close(self) -> None:
        """Leave: close the lanes, the channels (which fences them), the store, the links."""
        self.sender.close()
        self.receiver.close()
        if self.store is not None:
            self.store.close()
        with self._lock:
            self._is_closed = True
            pool, endpoints, router = self._pool, self._endpoints, self._router
            self._pool, self._endpoints, self._router = None, [], None
        if pool is not None:
            pool.close()
        for endpoint in endpoints:
            endpoint.close()
        if router is not None:
            router.close()
        self._halves.close()

    # ---- from the scheduler half ------------------------------------------------------------------------------------

    def _on_half(self, message: ToWorker) -> None:
        match message:
            case Welcome():
                self._join(message.incarnation)
            case Expect():
                self.receiver.expect(message)
            case Revoke():
                self.receiver.revoke(message.transfer_id, message.epoch, message.reason)
            case Forget():
                self.sender.forget(message.transfer_id, message.reason)
            case _:
                if self.store is not None:
                    self.store.on_half(message)

    def _open_store(self, settings: StoreSettings) -> StoreSide:
        block_size = self._region.layout.block_size
        blocks = settings.blocks or HostBlocks(self._region)
        return StoreSide(
            settings, self._settings.rank, block_size, blocks, self._report, self._clock, self._peering(settings)
        )

    def _peering(self, settings: StoreSettings) -> Peering | None:
        """Other nodes' stores are found through the router."""
        mine = self._settings
        if not mine.router:
            return None
        is_secure = mine.security is not None or mine.allow_insecure
        return Peering(PeeringSettings(options=mine.options, is_secure=is_secure), settings.config)

    def chunk_keys(self, args: StoreArgs) -> list[bytes]:
        """Keys of a prompt's chunks on this rank, where KV is kept."""
        assert self.store is not None
        return self._cut().keys(args, self.store.thread.store.coder.identity)

    def _make_operator(self, store: StoreSide) -> Operator:
        settings = self._settings
        verbs = Verbs(settings.engine_id, settings.rank, self._cut(), store.peering)
        return Operator(settings.rank, store.thread, verbs, self._tell_router, self._clock)

    def _cut(self) -> Cut:
        settings, block_size = self._settings, self._region.layout.block_size
        assert settings.store is not None
        config = settings.store.config
        in_blocks = config.chunking == "blocks"
        return Cut(
            chunk_tokens=block_size if in_blocks else settings.chunk_blocks * block_size,
            block_size=block_size,
            scheme=config.hash_scheme,
            with_partial=config.partial_chunks,
            adapter=settings.store.adapter,
        )

    def _tell_router(self, message: Message) -> None:
        """Dropped without a router: nobody asked then."""
        router = self._router
        if router is not None:
            router.send(message)

    def _join(self, incarnation: int) -> None:
        """Open the endpoints and join the router under this incarnation."""
        if self._me is not None or self._is_closed:
            return
        try:
            self._open_and_join(incarnation)
        except PdxferError as error:
            log.error("rank %d cannot join the router at %s: %s", self._settings.rank, self._settings.router, error)

    def _open_and_join(self, incarnation: int) -> None:
        settings = self._settings
        self._me = PeerId(engine_id=settings.engine_id, incarnation=incarnation, rank=settings.rank)
        if not settings.router:
            return  # store mode: nobody sends to us
        self._endpoints = self._open_endpoints(self._me)
        self.receiver.start(self._endpoints)
        if self.store is not None and self.store.peering is not None:
            self.store.peering.join(self._me, self.store.thread)
        self._halves.send(Listening(rank=settings.rank, addresses=self._addresses()))
        with self._lock:
            if self._is_closed:
                return
            self._pool = ChannelPool(self._endpoints, self._me, self._on_ready, self._clock)
            self._router = MemberClient(
                endpoint=settings.router,
                identity=f"{settings.engine_id}/w{settings.rank}",
                security=settings.security,
                hello=self._hello,
                beat=self._beat,
                on_message=self._on_router,
                on_link=self._on_link,
            )

    def _open_endpoints(self, me: PeerId) -> list[Endpoint]:
        endpoints: list[Endpoint] = []
        for kind, factory in self._factories.items():
            try:
                endpoints.append(factory(self._settings.options, me, self._region, _KindSink(self, kind)))
            except PdxferError as error:
                log.warning("channel kind %s is not available: %s", kind, error)
        if not endpoints:
            raise ConfigError(
                f"none of the channel kinds {list(self._factories)} can be used here (reasons above); "
                "run `pdxfer doctor`, or set transport.channels"
            )
        return endpoints

    # ---- router ----

    def _addresses(self) -> list[ChannelAddress]:
        return [ChannelAddress(kind=e.kind, blob=e.address()) for e in self._endpoints]

    def _hello(self) -> list[Message]:
        assert self._me is not None
        self._generations = tuple(e.generation for e in self._endpoints)
        peering = self.store.peering if self.store is not None else None
        return [
            WorkerHello(
                engine_id=self._me.engine_id,
                incarnation=self._me.incarnation,
                rank=self._me.rank,
                addresses=self._addresses(),
                generation=sum(self._generations),
                store=peering.address if peering is not None else None,
            )
        ]

    def _beat(self) -> Heartbeat:
        assert self._me is not None
        router = self._router
        if router is not None and self._generations != tuple(e.generation for e in self._endpoints):
            for message in self._hello():
                router.send(message)
        tiers = self.store.reports() if self.store is not None else []
        problems = [problem[:500] for problem in self._integrity.problems()][:8] if self._integrity else []
        counts = {"corrupt_units": self.receiver.num_corrupt, "rejected_units": self.receiver.num_rejected}
        if self.store is not None and self.store.peering is not None:
            counts |= self.store.peering.counts
        counts |= self.wire.counts() if self.wire else {}
        return Heartbeat(
            incarnation=self._me.incarnation,
            wall=self._clock.wall(),
            tiers=tiers,
            wire=_on(self.wire.is_on) if self.wire else "",
            counts=counts,
            problems=problems,
        )

    def _on_router(self, message: FromRouter) -> None:
        match message:
            case Grant():
                self.sender.grant(message)
            case CancelGrant():
                self.sender.forget(message.transfer_id, message.reason)
            case Peers():
                self._update_peers(message)
            case StoreOp() if self._operator is not None:
                self._operator.start(message)
            case StoreOpCancel() if self._operator is not None:
                self._operator.cancel(message.op_id)
            case SetWire() if self.wire is not None:
                self.wire.switch(message.is_on)
                log.info("codecs on the wire are %s from now on, as the controller says", _on(message.is_on))
            case _:
                log.debug("not for a worker half: %s", type(message).__name__)

    def _on_link(self, up: bool) -> None:
        log.log(logging.INFO if up else logging.WARNING, "router %s", "reached" if up else "lost; transfers go on")

    def _update_peers(self, peers: Peers) -> None:
        with self._lock:
            self._peers = list(peers.nodes)
            pool = self._pool
        for endpoint in self._endpoints:
            endpoint.admit(self._peer_ids(), peers.secret)
        if pool is not None:
            pool.update(list(peers.nodes), peers.secret)
            pool.announce()
        if self.store is not None and self.store.peering is not None:
            self.store.peering.meet(peers)
        self.sender.keep_lanes(frozenset(node.engine_id for node in peers.nodes))

    def _on_ready(self, peer: PeerId, kind: str, reason: str) -> None:
        router = self._router
        if router is not None:
            ready = PeerReady(engine_id=peer.engine_id, incarnation=peer.incarnation, kind=kind, reason=reason[:1000])
            router.send(ready)

    def _peer_ids(self) -> Sequence[PeerId]:
        with self._lock:
            nodes = self._peers
        return [PeerId(engine_id=n.engine_id, incarnation=n.incarnation, rank=n.rank) for n in nodes]

    # ---- sender and receiver ----

    def _open_lane(self, engine_id: str, report: Callable[[Report], None]) -> Lane:
        def channel() -> Channel | None:
            return self._pool.channel(engine_id) if self._pool is not None else None

        def failed(channel: Channel, reason: str) -> None:
            if self._pool is not None:
                self._pool.report_failure(channel.peer, channel.kind, reason)

        wire = self.wire.sender() if self.wire else None
        return Lane(engine_id, self._region, channel, report, failed, self._settings.digest_every, wire)

    def _settled(self, transfer_id: str, delivered: bool, reason: str) -> None:
        rank = self._settings.rank
        self._report(Settled(rank=rank, transfer_id=transfer_id, delivered=delivered, reason=reason[:1000]))

    def _report(self, fact: ToScheduler) -> None:
        self._halves.send(fact)


def _on(is_on: bool) -> str:
    return "on" if is_on else "off"


class _KindSink:
    """The Sink of one endpoint: routes Abort to the sender, everything else to the receiver."""

    def __init__(self, node: Node, kind: str) -> None:
        self._node, self._kind = node, kind

    @property
    def generation(self) -> int:
        return self._node.receiver.generation

    def claim(self, peer: PeerId, header: UnitHeader) -> Runs | None:
        return self._node.receiver.claim(peer, header, self._kind)

    def arrived(self, peer: PeerId, header: UnitHeader) -> bool:
        return self._node.receiver.arrived(peer, header)

    def failed(self, peer: PeerId, header: UnitHeader, reason: str) -> None:
        self._node.receiver.failed(peer, header, reason)

    def control(self, peer: PeerId, control: Control) -> None:
        sender = self._node.sender
        if isinstance(control, Abort):
            sender.abort(peer.engine_id, control.transfer_id, control.epoch, control.reason)
        elif isinstance(control, Credit):
            sender.credit(peer.engine_id, control)
        elif isinstance(control, UnitFailed) and not self._node.receiver.expects(control.header):
            header = control.header
            sender.abort(peer.engine_id, header.transfer_id, header.epoch, control.reason)
        else:
            self._node.receiver.control(peer, control)

    def lost(self, peer: PeerId, reason: str) -> None:
        self._node.receiver.lost(peer, reason, self._kind)
