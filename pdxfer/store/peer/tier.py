"""`peer:` what other nodes keep in their own memory and on their own disks, read from there.

A lookup is answered from what the peers told, and asks nobody; so it may be wrong, and the get is then a miss (counted
as `stale`). Nothing is put here (`copy` and `move` with from_engine bring values to a node, pull.py), and a delete only
forgets that a peer said it had the value: it is the peer's.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK, Clock
from pdxfer.store.base import Buffer, Entry, Outcome, Reservation, TierStats
from pdxfer.store.lease import PooledBuffer
from pdxfer.store.peer.links import Link, Links
from pdxfer.store.remote.errors import Reason, ServerError
from pdxfer.store.remote.server import Server
from pdxfer.store.remote.tier import RemoteTier, give_back

log = logging.getLogger(__name__)

STALE = "stale"
"""A failure's reason: the peer has the value no more."""
MARGIN_S = 0.1
"""A peer that does not answer is given up so long before the deadline: it is that peer's failure, not the tier's."""
MAX_ASKED = 2
"""Peers that one get asks."""


class PeerTier(RemoteTier):
    """Implements base.Tier over Links, which the node owns."""

    def __init__(
        self,
        config: TierConfig,
        clock: Clock,
        *,
        links: Links,
        tenant_quota: Mapping[str, int] | None = None,
        pin_fraction: float = 0.5,
    ) -> None:
        super().__init__(config, clock, tenant_quota=tenant_quota, pin_fraction=pin_fraction)
        self._links = links
        links.follows, links.sessions, links.failed = True, self._sessions, self._counters.failed

    def __repr__(self) -> str:
        return f"<PeerTier {self._links} {self._pool}>"

    def servers(self) -> Iterable[Server]:
        """One a peer."""
        return [link.server for link in self._links]

    async def lookup(self, keys: Sequence[bytes], deadline: float) -> list[Entry | None]:
        """From the indexes. Sizes are not known (0)."""
        if not self._in_time(deadline):
            return [None] * len(keys)
        held = self._among(keys)
        return [Entry(key=key, num_bytes=0) if key in held else None for key in keys]

    async def reserve(self, key: bytes, num_bytes: int, deadline: float, tenant: str = "") -> Reservation | Outcome:
        """Never."""
        return self._refused(num_bytes, deadline) or Outcome.TOO_LARGE

    async def put(self, key: bytes, parts: Sequence[Buffer], deadline: float, tenant: str = "") -> Outcome:
        """Never."""
        return self._refused(0, deadline) or Outcome.TOO_LARGE

    async def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        """Forget that peers said they have them, until they say it again."""
        if not self._in_time(deadline):
            return 0
        held = self._among(keys)
        for link in self._links:
            link.index.forget(held)
        return len(held)

    async def scan(self, after: bytes, limit: int, deadline: float) -> list[Entry]:
        """Nothing: every node lists its own."""
        return []

    def stats(self) -> TierStats:
        """A peer that is away is no fault of the tier: the others answer."""
        return self._counters.stats(self.kind, reachable=not self._closed)

    async def close(self) -> None:
        """The links, too."""
        self._closed = True
        await self._links.close()
        self._pool.close()

    async def _get(self, key: bytes, deadline: float) -> PooledBuffer | None:
        end = self._end(deadline)
        end -= min(MARGIN_S, (end - SYSTEM_CLOCK.now()) / 4)
        lend = self._lender(end)
        for link in self._holders(key)[:MAX_ASKED]:
            index, heard = link.index, link.index.num_applied
            try:
                got = await link.server.run(lambda session: session.read(key, lend, end), end, drop=give_back)
            except ServerError as error:
                log.debug("%s: get of %s: %s", link.server.name, key.hex()[:12], error)
                if error.reason in (Reason.BUSY, Reason.TIMEOUT):
                    return None
                continue
            if got is not None:
                return got
            if link.index is index and index.num_applied == heard:  # else it may have come back: it says so only once
                index.forget((key,))
            self._counters.failed(STALE)
        return None

    def _among(self, keys: Sequence[bytes]) -> set[bytes]:
        wanted = set(keys)
        return set().union(*(link.among(wanted) for link in self._links))

    def _holders(self, key: bytes) -> list[Link]:
        """Peers that should have it, beginning with another one for each key."""
        holders = [link for link in self._links if link.among({key})]
        first = key[0] % len(holders) if holders else 0
        return holders[first:] + holders[:first]
