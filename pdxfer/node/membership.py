"""A rank's place in the cluster: its endpoints, its channels to the peers, its connection to the router.

The node opens it when the scheduler half has said under which incarnation this engine lives, lets it join the router,
and hands it the router's word on who the peers are. It moves no KV, and does not decide what is said to the router.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from pdxfer.core.clock import Clock
from pdxfer.core.errors import ConfigError, PdxferError
from pdxfer.memory.region import Region
from pdxfer.node.settings import NodeSettings
from pdxfer.router.client import MemberClient
from pdxfer.transport.base import Channel, Endpoint, EndpointFactory, PeerId, Sink
from pdxfer.transport.pool import ChannelPool
from pdxfer.wire.messages import (
    ChannelAddress,
    FromRouter,
    Heartbeat,
    Message,
    PeerReady,
    Peers,
    StoreAddress,
    WorkerHello,
)

log = logging.getLogger(__name__)


class Membership:
    """Of one rank: `open`, `join`, `close`, in this order and never at once; everything else from any thread."""

    def __init__(
        self, settings: NodeSettings, region: Region, factories: Mapping[str, EndpointFactory], clock: Clock
    ) -> None:
        self._settings, self._region, self._factories, self._clock = settings, region, factories, clock
        self._lock = threading.Lock()
        self._endpoints: list[Endpoint] = []
        self._pool: ChannelPool | None = None
        self._router: MemberClient | None = None
        self._peers: list[PeerId] = []
        self._generations: tuple[int, ...] = ()

    # ---- the node's start and end ----------------------------------------------------------------------------------

    def open(self, me: PeerId, sink: Callable[[str], Sink]) -> Sequence[Endpoint]:
        """Open an endpoint of each kind that can be had. Raises ConfigError if none can."""
        for kind, factory in self._factories.items():
            try:
                self._endpoints.append(factory(self._settings.options, me, self._region, sink(kind)))
            except PdxferError as error:
                log.warning("channel kind %s is not available: %s", kind, error)
        if not self._endpoints:
            raise ConfigError(
                f"none of the channel kinds {list(self._factories)} can be used here (reasons above); "
                "run `pdxfer doctor`, or set transport.channels"
            )
        return self._endpoints

    def join(
        self,
        me: PeerId,
        store: StoreAddress | None,
        status: Callable[[], Heartbeat],
        on_message: Callable[[FromRouter], None],
    ) -> None:
        """Connect to the router, for good. The callbacks run on its client's thread."""

        def hello() -> list[Message]:
            self._generations = self._generations_now()
            return [
                WorkerHello(
                    engine_id=me.engine_id,
                    incarnation=me.incarnation,
                    rank=me.rank,
                    addresses=self.addresses(),
                    generation=sum(self._generations),
                    store=store,
                )
            ]

        def beat() -> Heartbeat:
            if self._generations != self._generations_now():
                for message in hello():
                    self.send(message)
            return status()

        with self._lock:
            self._pool = ChannelPool(self._endpoints, me, self._on_ready, self._clock)
            self._router = MemberClient(
                endpoint=self._settings.router,
                identity=f"{me.engine_id}/w{me.rank}",
                security=self._settings.security,
                hello=hello,
                beat=beat,
                on_message=on_message,
                on_link=_on_link,
            )

    def close(self) -> None:
        """Leave: close the channels, then the endpoints (which fences them), then the router's connection."""
        with self._lock:
            pool, endpoints, router = self._pool, self._endpoints, self._router
            self._pool, self._endpoints, self._router = None, [], None
        if pool is not None:
            pool.close()
        for endpoint in endpoints:
            endpoint.close()
        if router is not None:
            router.close()

    # ---- the cluster -----------------------------------------------------------------------------------------------

    def addresses(self) -> list[ChannelAddress]:
        """Where our endpoints listen now."""
        return [ChannelAddress(kind=e.kind, blob=e.address()) for e in self._endpoints]

    def send(self, message: Message) -> None:
        """To the router. Dropped without one: nobody asked then."""
        router = self._router
        if router is not None:
            router.send(message)

    def meet(self, peers: Peers) -> None:
        """All there are now: who may connect, and to whom channels are opened. Who is named no more stays known until
        it is cut off: it may write till then."""
        ids = [PeerId(engine_id=n.engine_id, incarnation=n.incarnation, rank=n.rank) for n in peers.nodes]
        with self._lock:
            self._peers = list(dict.fromkeys([*self._peers, *ids]))
            pool = self._pool
        for endpoint in self._endpoints:
            endpoint.admit(ids, peers.secret)
        with self._lock:
            self._peers = ids
        if pool is not None:
            pool.update(list(peers.nodes), peers.secret)
            pool.announce()

    def peers(self) -> Sequence[PeerId]:
        """The other nodes, as the router last named them."""
        with self._lock:
            return self._peers

    def channel(self, engine_id: str) -> Channel | None:
        """The best open channel to that engine now."""
        pool = self._pool
        return pool.channel(engine_id) if pool is not None else None

    def give_up(self, channel: Channel, reason: str) -> None:
        """This channel is dead or useless: another one is opened."""
        pool = self._pool
        if pool is not None:
            pool.report_failure(channel, reason)

    def _on_ready(self, peer: PeerId, kind: str, reason: str) -> None:
        self.send(PeerReady(engine_id=peer.engine_id, incarnation=peer.incarnation, kind=kind, reason=reason[:1000]))

    def _generations_now(self) -> tuple[int, ...]:
        return tuple(e.generation for e in self._endpoints)


def _on_link(up: bool) -> None:
    log.log(logging.INFO if up else logging.WARNING, "router %s", "reached" if up else "lost; transfers go on")
