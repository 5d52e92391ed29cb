"""The `redis` tier: Redis and Valkey; one server, several, a cluster, or what a sentinel says; TLS, user and password.

    redis://[[USER]:PASSWORD@]HOST[:6379][,HOST...][/DB]      rediss:// and valkeys:// with TLS; valkey:// is the same

Values travel over our own sockets (redis_wire.py); topology is found by redis_topology.py and asked again when a
server goes away or says that a key has moved.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from functools import partial

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK, Clock
from pdxfer.core.errors import ConfigError
from pdxfer.store.remote.errors import ServerError
from pdxfer.store.remote.piece_session import PieceSession
from pdxfer.store.remote.pieces import MAX_PIECES
from pdxfer.store.remote.redis_topology import Discovery, Placement, load_redis
from pdxfer.store.remote.redis_wire import ROOM, RedisLogin, RedisTimes, RedisWire
from pdxfer.store.remote.server import PROBE_S, Server
from pdxfer.store.remote.tier import RemoteTier
from pdxfer.store.remote.tls import TLS_SETTINGS, tls_context, tls_for_redis_py
from pdxfer.store.remote.url import Address

log = logging.getLogger(__name__)
_REDISCOVER_S = 0.5
"""Topology is asked at most this often."""


class RedisTier(RemoteTier):
    """Implements base.Tier."""

    settings = ("cluster", "sentinel", "sentinel_password", *TLS_SETTINGS)
    default_port = 6379

    def __init__(
        self,
        config: TierConfig,
        clock: Clock,
        *,
        tenant_quota: Mapping[str, int] | None = None,
        pin_fraction: float = 0.5,
    ) -> None:
        super().__init__(config, clock, tenant_quota=tenant_quota, pin_fraction=pin_fraction)
        self._times = RedisTimes(
            ttl_ms=int(config.ttl_s * 1000), unfinished_ms=int(config.put_timeout_s * 1000) + 60_000
        )
        self._discovery = self._read_url()
        if self._discovery.changes:
            load_redis()
        self._placement: Placement | None = None
        self._servers: dict[Address, Server] = {}
        self._asking: asyncio.Task[None] | None = None
        self._ended: list[asyncio.Task[None]] = []

    @property
    def kind(self) -> str:
        """`redis`, also for Valkey."""
        return "redis"

    def servers(self) -> Iterable[Server]:
        """Those of the placement."""
        return self._servers.values()

    def place(self, key: bytes) -> Server | None:
        """By the placement. A slot that nobody serves is asked for again: its cluster may be starting."""
        if self._placement is None:
            return None
        address = self._placement.of(key)
        if address is None:
            self._away()
            return None
        return self._servers.get(address)

    def max_value_bytes(self) -> int:
        """What 65,535 pieces hold."""
        return MAX_PIECES * ROOM

    async def connect(self, end: float) -> None:
        """Ask for the topology, then meet the servers."""
        self._asking = asyncio.get_running_loop().create_task(self._ask(first=True), name="redis topology")
        await asyncio.wait((self._asking,), timeout=end - SYSTEM_CLOCK.now())
        await super().connect(end)

    async def close(self) -> None:
        """Also ends discovery."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        await super().close()
        await asyncio.gather(*self._ended)

    # -- topology -----------------------------------------------------------------------------------------------------

    def _read_url(self) -> Discovery:
        url = self.url
        if not url.addresses:
            raise ConfigError(f"store.tiers: {url.shown} names no server: redis://HOST:PORT/DB")
        if url.path and not url.path.isdigit():
            raise ConfigError(f"store.tiers: {url.shown}: the database is a number, not {url.path!r}")
        secure = url.scheme in ("rediss", "valkeys")
        discovery = Discovery(
            addresses=url.addresses,
            login=RedisLogin(
                user=url.user,
                password=url.password,
                db=int(url.path or 0),
                tls=tls_context(url) if secure else None,
            ),
            tls=tls_for_redis_py(url) if secure else {},
            sentinel=url.text("sentinel"),
            sentinel_password=url.text("sentinel_password"),
            cluster=url.flag("cluster"),
        )
        if discovery.cluster and (discovery.sentinel or discovery.login.db):
            raise ConfigError(f"store.tiers: {url.shown}: a cluster has neither sentinels nor databases")
        return discovery

    def _session(self, address: Address, end: float) -> PieceSession:
        prefix = self._prefix.encode()
        return PieceSession(RedisWire(address, self._discovery.login, self._times, prefix, end), prefix)

    def _away(self) -> None:
        """A server is away or a key has moved: ask again, unless that is being done."""
        if self._discovery.changes and not self._closed and (self._asking is None or self._asking.done()):
            self._asking = asyncio.get_running_loop().create_task(self._ask(), name="redis topology")

    async def _ask(self, first: bool = False) -> None:
        """Until there is an answer."""
        said = ""
        while True:
            if not first:
                await asyncio.sleep(_REDISCOVER_S)
            first = False
            try:
                placement = await asyncio.to_thread(self._discovery.ask, SYSTEM_CLOCK.now() + PROBE_S)
            except ServerError as error:
                self._counters.failed(error.reason)
                if said != error.reason:
                    said = error.reason
                    log.warning("%s: %s; asking again", self.url.shown, error)
                continue
            self._adopt(placement)
            return

    def _adopt(self, placement: Placement) -> None:
        """Servers that are new are made, those that left are closed."""
        for address in placement.addresses:
            if address not in self._servers:
                self._servers[address] = self.server(f"redis {address}", partial(self._session, address), self._away)
        for address in set(self._servers) - set(placement.addresses):
            leaving = self._servers.pop(address)
            self._ended.append(asyncio.get_running_loop().create_task(leaving.close()))
        if self._placement is not None and placement.addresses != self._placement.addresses:
            log.info("%s: now served by %s", self.url.shown, ", ".join(map(str, placement.addresses)))
        self._placement = placement
