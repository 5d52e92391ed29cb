"""Which Redis server holds a key: one or several plain servers, a sentinel's master, or a cluster's slot map.

Discovery (sentinel, cluster) is redis-py's, asked in a worker thread; the bytes go over our own sockets.
"""

import binascii
import logging
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pdxfer.core.errors import ConfigError
from pdxfer.core.install import pip_install
from pdxfer.store.remote.errors import Reason, ServerError
from pdxfer.store.remote.placement import Spread
from pdxfer.store.remote.redis_wire import RedisLogin
from pdxfer.store.remote.stream import remaining
from pdxfer.store.remote.url import Address

SLOTS = 16384


class Placement(Protocol):
    """An answer of discovery."""

    @property
    def addresses(self) -> Sequence[Address]:
        """All servers that hold keys."""
        ...

    def of(self, key: bytes) -> Address | None:
        """Who holds this key."""
        ...


@dataclass(frozen=True, slots=True)
class SlotMap:
    """A cluster: CRC16 of the hash tag (our key in hex), modulo 16384."""

    addresses: tuple[Address, ...]
    slots: Mapping[int, Address]

    def of(self, key: bytes) -> Address | None:
        """The slot's primary; None: nobody serves it now."""
        return self.slots.get(binascii.crc_hqx(key.hex().encode(), 0) % SLOTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """What to ask whom."""

    addresses: tuple[Address, ...]
    login: RedisLogin
    tls: Mapping[str, object]
    """redis-py's keyword arguments for TLS."""
    sentinel: str = ""
    """Name of the master the sentinels watch."""
    sentinel_password: str = ""
    cluster: bool = False

    @property
    def changes(self) -> bool:
        """Whether asking again may give another answer."""
        return self.cluster or bool(self.sentinel)

    def ask(self, end: float) -> Placement:
        """Blocking. Raises ServerError, or ConfigError if redis-py is missing."""
        if not self.changes:
            return Spread(self.addresses)
        redis = load_redis()
        logging.getLogger("redis").setLevel(logging.ERROR)
        try:
            return self._ask_cluster(redis, end) if self.cluster else self._ask_sentinel(redis, end)
        except (redis.RedisError, redis.exceptions.RedisClusterException, OSError) as error:
            reason = Reason.REFUSED if _refuses(redis.exceptions, error) else Reason.UNREACHABLE
            raise ServerError(reason, f"{self._who()}: {error}") from error
        except IndexError as error:  # redis-py takes for granted that some node serves a slot
            raise ServerError(Reason.UNREACHABLE, f"{self._who()}: no node serves any slot yet") from error
        except (LookupError, TypeError, ValueError) as error:
            raise ServerError(Reason.PROTOCOL, f"{self._who()}: an answer nobody understands: {error!r}") from error

    def _who(self) -> str:
        return ("cluster at " if self.cluster else "sentinels ") + ", ".join(map(str, self.addresses))

    def _timeouts(self, end: float) -> dict[str, Any]:
        """One unreachable server must not eat the time of the others."""
        share = remaining(end) / max(2, len(self.addresses))
        return {"socket_timeout": share, "socket_connect_timeout": share}

    def _ask_cluster(self, redis: Any, end: float) -> Placement:
        client = redis.RedisCluster(
            startup_nodes=[redis.cluster.ClusterNode(a.host, a.port) for a in self.addresses],
            username=self.login.user or None,
            password=self.login.password or None,
            require_full_coverage=False,
            **self.tls,
            **self._timeouts(end),
        )
        try:
            slots = {
                slot: Address(host=nodes[0].host, port=nodes[0].port)
                for slot, nodes in client.nodes_manager.slots_cache.items()
                if nodes
            }
        finally:
            client.close()
        return SlotMap(tuple(sorted(set(slots.values()), key=str)), slots)

    def _ask_sentinel(self, redis: Any, end: float) -> Placement:
        settings = {"password": self.sentinel_password or None, **self.tls, **self._timeouts(end), "retry": None}
        sentinels = redis.sentinel.Sentinel([(a.host, a.port) for a in self.addresses], sentinel_kwargs=settings)
        try:
            host, port = sentinels.discover_master(self.sentinel)
        finally:
            for client in sentinels.sentinels:
                client.close()
        return Spread((Address(host=host, port=port),))


def _refuses(kinds: Any, error: BaseException | None) -> bool:
    """Whether it is, or was raised because of, a wrong password, missing rights or a certificate we do not trust."""
    refusals = (
        kinds.AuthenticationError, kinds.AuthorizationError, kinds.NoPermissionError, ssl.SSLCertVerificationError
    )  # fmt: skip
    while error is not None and not isinstance(error, refusals):
        error = error.__cause__ or error.__context__
    return error is not None


def load_redis() -> Any:
    """redis-py. Raises ConfigError saying what to install."""
    try:
        import redis
        import redis.cluster
        import redis.sentinel
    except ImportError as error:
        raise ConfigError(
            f"store.tiers: cluster and sentinel need redis-py ({error}): {pip_install('redis')}"
        ) from error
    return redis
