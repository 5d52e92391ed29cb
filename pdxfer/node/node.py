"""The runtime of one worker half: puts region, membership, sender, receiver, store and the link to the scheduler half
together, and passes each message to the part that it concerns.

Made by the connector's worker half (or by FakeEngine) once the KV region exists. It waits for the scheduler half's
Welcome, then opens its endpoints and joins the router. The compute thread touches only begin_step and layers_done.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial

from pdxfer.core.clock import SYSTEM_CLOCK, Clock
from pdxfer.core.errors import ConfigError, PdxferError
from pdxfer.memory.region import Region
from pdxfer.node.integrity import Integrity
from pdxfer.node.jobs import Report
from pdxfer.node.kind_sink import KindSink
from pdxfer.node.lane import Lane
from pdxfer.node.membership import Membership
from pdxfer.node.operator import Operator
from pdxfer.node.outgoing import Ready
from pdxfer.node.peering import Peering, PeeringSettings
from pdxfer.node.plan import SavePlan, SendPlan
from pdxfer.node.receiver import Receiver
from pdxfer.node.sender import Sender, no_codecs
from pdxfer.node.settings import NodeSettings
from pdxfer.node.store_blocks import HostBlocks
from pdxfer.node.store_side import StoreSettings, StoreSide
from pdxfer.node.verbs import Cut, Verbs
from pdxfer.node.wire import Wire
from pdxfer.transport.base import (
    EndpointFactory,
    PeerId,
)
from pdxfer.transport.device import device_problem, is_nixl_installed
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
    FromRouter,
    Grant,
    Heartbeat,
    Peers,
)

log = logging.getLogger(__name__)


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
        self._settings, self._region, self._clock = settings, region, clock
        self._joining = threading.Lock()
        self._is_closed = False
        self._me: PeerId | None = None
        self._members = members = Membership(settings, region, factories, clock)
        wire = Wire(settings.wire, region, fingerprint, settings.chunk_blocks, clock) if settings.wire else None
        self.wire, staging = wire, wire.staging if wire else None
        self.receiver = Receiver(settings.rank, region, self._report, clock, settings.drain_s, members.peers, staging)
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

    def stepped(self, num_tokens: int, elapsed_s: float) -> None:
        """A step of so many tokens has been computed in this time (hosts only)."""
        if self.wire is not None:
            self.wire.staging.steps.note(num_tokens, elapsed_s)

    def save(self, plans: tuple[SavePlan, ...], ready: Ready = None) -> None:
        """The step with these plans has run, or will have when `ready` returns."""
        if self.store is not None:
            self.store.save(plans, ready)

    def close(self) -> None:
        """Leave: close the lanes, the channels (which fences them), the store, the links."""
        with self._joining:  # what is being opened is closed with the rest
            self._is_closed = True
        self.sender.close()
        self.receiver.close()
        if self.store is not None:
            self.store.close()
        self._members.close()
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
        return Operator(settings.rank, store.thread, verbs, self._members.send, self._clock)

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

    def _join(self, incarnation: int) -> None:
        """Open the endpoints and join the router under this incarnation, once."""
        with self._joining:
            if self._me is not None or self._is_closed:
                return
            self._me = PeerId(engine_id=self._settings.engine_id, incarnation=incarnation, rank=self._settings.rank)
            if not self._settings.router:
                return  # store mode: nobody sends to us
            try:
                self._open_and_join(self._me)
            except PdxferError as error:
                log.error("rank %d cannot join the router at %s: %s", self._me.rank, self._settings.router, error)

    def _open_and_join(self, me: PeerId) -> None:
        self.receiver.start(self._members.open(me, partial(KindSink, self.receiver, self.sender)))
        peering = self.store.peering if self.store is not None else None
        if self.store is not None and peering is not None:
            peering.join(me, self.store.thread)
        self._halves.send(Listening(rank=me.rank, addresses=self._members.addresses()))
        self._members.join(me, peering.address if peering is not None else None, self._status, self._on_router)

    # ---- router ----

    def _status(self) -> Heartbeat:
        assert self._me is not None
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
                self._meet(message)
            case StoreOp() if self._operator is not None:
                self._operator.start(message)
            case StoreOpCancel() if self._operator is not None:
                self._operator.cancel(message.op_id)
            case SetWire() if self.wire is not None:
                self.wire.switch(message.is_on)
                log.info("codecs on the wire are %s from now on, as the controller says", _on(message.is_on))
            case _:
                log.debug("not for a worker half: %s", type(message).__name__)

    def _meet(self, peers: Peers) -> None:
        self._members.meet(peers)
        if self.store is not None and self.store.peering is not None:
            self.store.peering.meet(peers)
        self.sender.keep_lanes(frozenset(node.engine_id for node in peers.nodes))

    # ---- sender and receiver ----

    def _open_lane(self, engine_id: str, report: Callable[[Report], None]) -> Lane:
        wire = self.wire.sender(engine_id) if self.wire else None
        channel, give_up = partial(self._members.channel, engine_id), self._members.give_up
        return Lane(engine_id, self._region, channel, report, give_up, self._settings.digest_every, wire)

    def _settled(self, transfer_id: str, delivered: bool, reason: str) -> None:
        rank = self._settings.rank
        self._report(Settled(rank=rank, transfer_id=transfer_id, delivered=delivered, reason=reason[:1000]))

    def _report(self, fact: ToScheduler) -> None:
        self._halves.send(fact)


def _on(is_on: bool) -> str:
    return "on" if is_on else "off"
