"""The peers that may write to one decode rank, and the endpoints over which they do: telling them, fencing them.

Used by the receiver and by the revoker, from any thread. What may be written is not decided here.
"""

import logging
import threading
from collections.abc import Callable, Collection, Sequence

from pdxfer.core.errors import ChannelError
from pdxfer.node.incoming import Connections, Incoming
from pdxfer.transport.base import Control, Endpoint, PeerId
from pdxfer.wire.halves import Expect

log = logging.getLogger(__name__)


class Writers:
    """Endpoints × the router's peers."""

    def __init__(self, peers: Callable[[], Sequence[PeerId]]) -> None:
        """`peers`: all there are now."""
        self._peers = peers
        self._endpoints: Sequence[Endpoint] = ()
        self._attending = threading.Lock()

    def start(self, endpoints: Sequence[Endpoint]) -> None:
        """Once; none are known before."""
        self._endpoints = endpoints

    def of(self, expect: Expect) -> list[PeerId]:
        """The ranks of the engine that this grant was given to."""
        return [p for p in self._peers() if p.engine_id == expect.prefill_id]

    def connections(self, *peers: PeerId) -> Connections:
        """All that these peers have to this rank now."""
        return frozenset((e.kind, one) for e in self._endpoints for peer in peers for one in e.connections(peer))

    def tell(self, peers: Sequence[PeerId], control: Control, kinds: Collection[str] = ()) -> bool:
        """Over every connection of these peers (of these kinds; of all, if none are named). True: one that was told
        writes into our memory by itself."""
        is_pushed = False
        for peer in peers:
            for endpoint in self._endpoints:
                if not kinds or endpoint.kind in kinds:
                    told = _tell(endpoint, peer, control)
                    is_pushed = is_pushed or (told and not endpoint.writes_here)
        return is_pushed

    def fence(self, incoming: Incoming) -> None:
        """After it returns nothing of this grant can land; see Endpoint.fence."""
        peers = self.of(incoming.expect)
        # Who is no peer any more has been cut off, but where the last hop is ours a copy may still be under way.
        holders = dict.fromkeys([*peers, *([incoming.peer] if incoming.peer is not None else [])])
        for endpoint in self._endpoints:
            if endpoint.writes_here or incoming.pushed or not incoming.told:
                for peer in holders if endpoint.writes_here else peers:
                    endpoint.fence(peer)

    def attend(self, is_active: Callable[[], bool]) -> None:
        """Grants are out, or none are: tell the endpoints."""
        with self._attending:  # the last to apply has seen the latest state
            active = is_active()
            for endpoint in self._endpoints:
                endpoint.attend(active)


def _tell(endpoint: Endpoint, peer: PeerId, control: Control) -> bool:
    try:
        endpoint.tell(peer, control)
    except ChannelError as error:
        log.debug("%s to %s over %s not sent: %s", type(control).__name__, peer.engine_id, endpoint.kind, error)
        return False
    return True
