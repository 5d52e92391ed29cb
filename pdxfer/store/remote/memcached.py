"""The `memcached` tier: one or several servers, keys spread by rendezvous hashing.

    memcached://HOST[:11211][,HOST[:PORT]...]

A server more or less moves only its own share of keys; keys of a server that is away are misses.
"""

from collections.abc import Iterable, Mapping
from functools import partial

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import Clock
from pdxfer.core.errors import ConfigError
from pdxfer.store.remote.memcached_wire import MAX_VALUE_BYTES, MemcachedWire
from pdxfer.store.remote.piece_session import PieceSession
from pdxfer.store.remote.placement import Spread
from pdxfer.store.remote.server import Server
from pdxfer.store.remote.tier import RemoteTier
from pdxfer.store.remote.url import Address

_MAX_PREFIX = 100
"""Names are at most 250 bytes; the rest of ours takes up to 90."""


class MemcachedTier(RemoteTier):
    """Implements base.Tier."""

    default_port = 11211

    def __init__(
        self,
        config: TierConfig,
        clock: Clock,
        *,
        tenant_quota: Mapping[str, int] | None = None,
        pin_fraction: float = 0.5,
    ) -> None:
        super().__init__(config, clock, tenant_quota=tenant_quota, pin_fraction=pin_fraction)
        if not self.url.addresses:
            raise ConfigError(f"store.tiers: {self.url.shown} names no server: memcached://HOST:PORT,HOST:PORT")
        if len(self._prefix) > _MAX_PREFIX or not self._prefix.isascii() or not self._prefix.isprintable():
            raise ConfigError(f"store.tiers: {self.url.shown}: prefix is at most {_MAX_PREFIX} printable letters")
        if " " in self._prefix or self.url.user or self.url.password or self.url.path:
            raise ConfigError(f"store.tiers: {self.url.shown}: memcached knows no users, paths, or blanks in prefix")
        self._spread_over = Spread(self.url.addresses)
        self._servers = {
            address: self.server(f"memcached {address}", partial(self._session, address))
            for address in self.url.addresses
        }

    def servers(self) -> Iterable[Server]:
        """Those of the URL."""
        return self._servers.values()

    def place(self, key: bytes) -> Server | None:
        """By rendezvous."""
        return self._servers[self._spread_over.of(key)]

    def max_value_bytes(self) -> int:
        """What fits the client flags."""
        return MAX_VALUE_BYTES

    def _session(self, address: Address, end: float) -> PieceSession:
        unfinished_s = self._config.put_timeout_s + 60.0
        wire = MemcachedWire(address, self._config.ttl_s, unfinished_s, self._clock.wall, end)
        return PieceSession(wire, self._prefix.encode())
