"""From a URL of the configuration to an opened tier: scheme → class, imported only when named.

A tier class is constructed as

    Cls(config: TierConfig, clock: Clock, *, tenant_quota: Mapping[str, int] = {}, pin_fraction: float = 0.5)

(quotas in bytes), then `await tier.open()`. Third parties register such classes by the entry point group `pdxfer.tiers`
(name = scheme), or the URL is `module:Class`. `peer:` needs the node's links to its peers, so the node hands its class.
"""

import importlib
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from msgspec import structs

from pdxfer.config.redact import redacted
from pdxfer.config.store import StoreConfig, TierConfig
from pdxfer.core.clock import Clock
from pdxfer.core.errors import ConfigError
from pdxfer.store.base import Tier

TierFactory = Callable[..., Tier]

BUILT_IN = {
    "dram": "pdxfer.store.dram:DramTier",
    "shm": "pdxfer.store.shared:SharedDramTier",
    "file": "pdxfer.store.disk:DiskTier",
    "disk": "pdxfer.store.disk:DiskTier",
    "lmdb": "pdxfer.store.lmdb_tier:LmdbTier",
    "sqlite": "pdxfer.store.sqlite_tier:SqliteTier",
    "redis": "pdxfer.store.remote.redis:RedisTier",
    "rediss": "pdxfer.store.remote.redis:RedisTier",
    "valkey": "pdxfer.store.remote.redis:RedisTier",
    "valkeys": "pdxfer.store.remote.redis:RedisTier",
    "memcached": "pdxfer.store.remote.memcached:MemcachedTier",
    "s3": "pdxfer.store.remote.cloud:CloudTier",
    "gs": "pdxfer.store.remote.cloud:CloudTier",
    "az": "pdxfer.store.remote.cloud:CloudTier",
    "mooncake": "pdxfer.store.remote.mooncake:MooncakeTier",
    "infinistore": "pdxfer.store.remote.infinistore:InfiniStoreTier",
    "nixl-posix": "pdxfer.store.remote.nixl_storage:NixlStorageTier",
    "nixl-gds": "pdxfer.store.remote.nixl_storage:NixlStorageTier",
    "nixl-gds-mt": "pdxfer.store.remote.nixl_storage:NixlStorageTier",
    "nixl-obj": "pdxfer.store.remote.nixl_storage:NixlStorageTier",
}
"""Scheme → module:class."""

PEER = "peer"
"""Scheme of what other nodes hold (store/peer/tier.py)."""
ENTRY_POINTS = "pdxfer.tiers"
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):(?!:)", re.IGNORECASE)
_MODULE_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
GIB = 1 << 30


async def open_tier(
    config: TierConfig,
    clock: Clock,
    *,
    tenant_quota: Mapping[str, int] | None = None,
    pin_fraction: float = 0.5,
    given: Mapping[str, TierFactory] = MappingProxyType({}),
) -> Tier:
    """Find the class, construct and open. ConfigError names the URL and what to change."""
    factory = given.get(scheme_of(config.url)) or find_factory(config.url)
    tier = factory(config, clock, tenant_quota=tenant_quota or {}, pin_fraction=pin_fraction)
    await tier.open()
    return tier


async def open_tiers(
    config: StoreConfig, clock: Clock, given: Mapping[str, TierFactory] = MappingProxyType({})
) -> list[Tier]:
    """All of `store.tiers`, in order; what was opened is closed again if a later one cannot be. `given`: classes by
    scheme that only the caller can construct."""
    tiers: list[Tier] = []
    try:
        for tier in config.tiers:
            tiers.append(await open_tier(_shared(tier, config.shared_memory), clock, **limits(config), given=given))
    except BaseException:
        for tier_ in reversed(tiers):
            await tier_.close()
        raise
    return tiers


def limits(config: StoreConfig) -> dict[str, Any]:
    """Keyword arguments of tiers: quotas in bytes and the part that may be pinned."""
    quota = {tenant: int(gib * GIB) for tenant, gib in config.tenant_quota_gib.items()}
    return {"tenant_quota": quota, "pin_fraction": config.pin_quota_fraction}


def scheme_of(url: str) -> str:
    """The part before the colon, in lower case; the whole text if there is none."""
    scheme = _SCHEME.match(url)
    return scheme.group(1).lower() if scheme else url


def find_factory(url: str) -> TierFactory:
    """The class that serves this URL. ConfigError for an unknown scheme (nearest named) or a missing library."""
    name = scheme_of(url)
    if name == PEER:
        raise ConfigError(
            f"store.tiers: url {url!r} reads other nodes' tiers, which the router names: start the engine with a router"
        )
    if name in BUILT_IN:
        return _load(BUILT_IN[name], url)
    for entry in entry_points(group=ENTRY_POINTS, name=name):
        return _load(entry.value, url)
    if _MODULE_CLASS.fullmatch(url):
        return _load(url, url)
    raise ConfigError(_unknown(name, url))


def check_scheme(url: str) -> None:
    """Raise ConfigError if nobody serves this URL; imports nothing."""
    name = scheme_of(url)
    is_known = name in BUILT_IN or name == PEER or entry_points(group=ENTRY_POINTS, name=name)
    if not is_known and not _MODULE_CLASS.fullmatch(url):
        raise ConfigError(_unknown(name, url))


def _shared(tier: TierConfig, socket: str) -> TierConfig:
    """With a store process on the host, `dram:` is its memory."""
    if not socket or scheme_of(tier.url) != "dram":
        return tier
    return structs.replace(tier, url=f"shm:{Path(socket).expanduser()}")


def _load(path: str, url: str) -> TierFactory:
    module, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"store.tiers: url {redacted(url)!r} needs {path}, which cannot be imported: {error}; install what it names"
            " (extras of pdxfer: cloud, lmdb, nixl) or correct the url"
        ) from error
    return cast(TierFactory, found)


def _unknown(name: str, url: str) -> str:
    known = sorted({PEER, *BUILT_IN, *(entry.name for entry in entry_points(group=ENTRY_POINTS))})
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "known schemes: " + ", ".join(known)
    shown = redacted(url)
    return (
        f"store.tiers: url {shown!r} has the unknown scheme {name!r}; {hint} (or module:Class for a class of your own)"
    )
