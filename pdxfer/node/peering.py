"""This rank's store among the others: serves its local tiers, knows the peers that serve theirs.

Made with the store where there is a router; begins when the rank knows who it is (join). The router names the peers and
hands out the secret (meet). Bound to an address that others reach, it wants the cluster's keys, as everything else.
"""

import logging
from dataclasses import dataclass
from functools import partial

from pdxfer.config.network import is_loopback
from pdxfer.config.store import StoreConfig
from pdxfer.core.errors import ConfigError, PdxferError
from pdxfer.store.open import PEER, TierFactory, scheme_of
from pdxfer.store.peer.links import Link, Links
from pdxfer.store.peer.service import PeerService
from pdxfer.store.peer.tier import PeerTier
from pdxfer.store.runtime import StoreThread
from pdxfer.transport.base import EndpointOptions, PeerId
from pdxfer.wire.messages import Peers, StoreAddress

log = logging.getLogger(__name__)

CLOSE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeeringSettings:
    """Where to listen, and whether that may be."""

    options: EndpointOptions
    is_secure: bool
    """The cluster has keys, or its operator does without."""


class Peering:
    """`tiers` for opening the store, then `join`, `meet` as the router speaks, `close`. Any thread."""

    def __init__(self, settings: PeeringSettings, config: StoreConfig) -> None:
        """ConfigError where a `peer:` tier is configured and the secret would travel in the open."""
        self._settings = settings
        self._links = Links()
        self._service: PeerService | None = None
        self._thread: StoreThread | None = None
        self._is_open = settings.is_secure or is_loopback(settings.options.bind)
        if not self._is_open and any(scheme_of(tier.url) == PEER for tier in config.tiers):
            raise ConfigError(
                f"store.tiers has peer:, and network.bind is {settings.options.bind}, reachable from other machines, "
                "but no keys are set: make them with `pdxfer keys new DIR` and set security.keys_dir on every host"
            )

    @property
    def tiers(self) -> dict[str, TierFactory]:
        """For open_tiers."""
        return {PEER: partial(PeerTier, links=self._links)}

    @property
    def address(self) -> StoreAddress | None:
        """Where the service is; None: it is not."""
        return self._service.address if self._service is not None else None

    @property
    def counts(self) -> dict[str, int]:
        """For the heartbeat."""
        service = self._service
        return {"served_values": service.num_values, "served_bytes": service.num_bytes} if service is not None else {}

    def join(self, me: PeerId, thread: StoreThread) -> None:
        """This is us: begin to serve. Without a free port peers cannot read from us; everything else goes on."""
        self._thread = thread
        thread.call_soon(lambda store: self._links.join(me))
        if not self._is_open:
            log.warning(
                "store: not served to other nodes: network.bind is %s and no keys are set (security.keys_dir)",
                self._settings.options.bind,
            )
            return
        try:
            self._service = PeerService(self._settings.options, me, thread)
        except PdxferError as error:
            log.warning("store: not served to other nodes: %s", error)

    def meet(self, peers: Peers) -> None:
        """All there are now."""
        if self._thread is None:
            return
        if self._service is not None:
            ids = [PeerId(engine_id=n.engine_id, incarnation=n.incarnation, rank=n.rank) for n in peers.stores]
            self._service.admit(ids, peers.secret)
        self._thread.call_soon(lambda store: self._links.meet(peers.stores, peers.secret))

    def link(self, engine_id: str) -> Link:
        """A peer by name. Store's loop. Raises ConfigError."""
        link = self._links.get(engine_id)
        if link is None:
            known = ", ".join(one.way.peer.engine_id for one in self._links) or "none"
            raise ConfigError(
                f"the store of engine {engine_id} is not served to this one; those that are: {known}. It must have the "
                "same model, KV settings and number of ranks, a store, and keys if it listens beyond its machine"
            )
        return link

    def close(self) -> None:
        """Stop serving, then forget the peers. Before the store closes. Idempotent."""
        if self._service is not None:
            self._service.close()
        if self._thread is not None:
            closing = self._thread.submit(lambda store: self._links.close())
            self._thread = None
            try:
                closing.result(CLOSE_S)
            except TimeoutError:
                log.warning("store: links to peers did not close within %g s", CLOSE_S)
