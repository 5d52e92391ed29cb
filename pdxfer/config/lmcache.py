"""LMCache's settings (its YAML, and LMCACHE_* of the environment) → a configuration of ours, and what it has not.

Called by `pdxfer config import-lmcache`. Pure. Every key that was given is accounted for: taken over, always so here,
or without counterpart, with what to do. Keys as of LMCache 0.5.6; its GB are GiB, as its code has them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import Any
from urllib.parse import urlsplit

import yaml

from pdxfer.core.errors import ConfigError

PREFIX = "LMCACHE_"
NOT_SETTINGS = frozenset({"config_file", "track_usage", "log_level", "use_experimental"})
"""Variables of LMCache that are no keys of its configuration."""
DEFAULT_CPU_GIB = 5.0
CHUNK_STEP, MAX_CHUNK = 16, 8192
POLICIES = {"LRU": "lru", "LFU": "lfu"}
CODECS = {"naive": "raw", "cachegen": "cachegen", "fp8": "fp8"}
PLACES = frozenset({
    "local_cpu", "max_local_cpu_size", "local_disk", "max_local_disk_size", "remote_url", "remote_serde", "gds_path",
    "enable_p2p",
})  # fmt: skip
"""Keys that together make store.tiers."""
SAME_HERE = {
    "enable_async_loading": "loading never blocks the engine",
    "enable_lazy_memory_allocator": "memory is mapped at start and its pages come in the background",
    "py_enable_gc": "nothing to switch",
    "pin_timeout_sec": "pins end with the ttl they are given",
    "lookup_timeout_ms": "every lookup has a deadline (store.lookup_timeout_s)",
    "enable_kv_events": "engines tell the router what they keep",
}
ELSEWHERE = {
    "enable_blending": "CacheBlend is not built: only prefixes are reused",
    "enable_pd": "use `pdxfer launch --role prefill|decode|proxy|router` or `--role all`",
    "pd_role": "`pdxfer launch --role prefill` (sender) or `decode` (receiver)",
    "enable_controller": "the router is the controller: `pdxfer launch --role router`, then `pdxfer cache`",
    "lmcache_instance_id": "the engine's name is set by the launcher (topology.*.id)",
    "remote_storage_plugins": "a tier of your own: store.tiers[].url is module:Class, or the entry point pdxfer.tiers",
    "internal_api_server_enabled": "the management API is part of the router, with a token",
    "numa_mode": "option numa_node of the dram tier",
    "pre_caching_hash_algorithm": "keys need no seed and no PYTHONHASHSEED; sha256 is store.hash_scheme",
    "remote_config_url": "give files with --config",
}
ELSEWHERE_BY_PREFIX = {
    "blend_": "enable_blending",
    "pd_": "enable_pd",
    "nixl_": "enable_pd",
    "controller_": "enable_controller",
    "lmcache_worker_": "enable_controller",
    "p2p_": "peers find each other through the router",
    "internal_api_server_": "internal_api_server_enabled",
}


@dataclass(slots=True)
class Converted:
    """A configuration of ours as a tree, and what was not taken over as it is."""

    tree: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """`key: why`, one a key."""

    def set(self, section: str, key: str, value: object) -> None:
        """One setting of ours."""
        self.tree.setdefault(section, {})[key] = value

    def note(self, key: str, why: str) -> None:
        """A key that has no counterpart, or only nearly."""
        self.notes.append(f"{key}: {why}")

    def to_yaml(self) -> str:
        """As a file of ours."""
        return yaml.safe_dump(self.tree, sort_keys=False)


def read(text: str, name: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Settings of a YAML file and of the environment, which wins, as in LMCache's code."""
    try:
        loaded = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is no YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{name} holds a {type(loaded).__name__}, not settings of LMCache by name")
    settings = {str(key): value for key, value in loaded.items()}
    for variable, value in environ.items():
        key = variable.removeprefix(PREFIX).lower()
        if variable.startswith(PREFIX) and key not in NOT_SETTINGS:
            settings[key] = _typed(value)
    return settings


def convert(settings: Mapping[str, Any]) -> Converted:
    """What these settings of LMCache are here."""
    settings = {key: value for key, value in settings.items() if value is not None}
    out = Converted()
    out.set("store", "enabled", True)
    out.set("store", "tiers", _tiers(settings, out))
    for key, value in settings.items():
        if key in PLACES:
            continue
        if key in RULES:
            RULES[key](out, value)
        elif key == "extra_config":
            _extra(out, value)
        else:
            out.note(key, _why_not(key))
    return out


# ---- places ----------------------------------------------------------------------------------------------------------


def _tiers(settings: Mapping[str, Any], out: Converted) -> list[dict[str, Any]]:
    policy = POLICIES.get(str(settings.get("cache_policy", "LRU")).upper())
    tiers: list[dict[str, Any]] = []
    if _truth("local_cpu", settings.get("local_cpu", True)):
        size = _number("max_local_cpu_size", settings.get("max_local_cpu_size", DEFAULT_CPU_GIB))
        tiers.append({"url": "dram:", "capacity_gib": size} | ({"eviction": policy} if policy else {}))
    elif settings.get("max_local_cpu_size"):
        out.note("max_local_cpu_size", "without local_cpu there is no memory tier; LMCache's was a staging buffer")
    if disk := _path(settings.get("local_disk")):
        size = _number("max_local_disk_size", settings.get("max_local_disk_size", 0) or 0)
        tiers.append({"url": f"file://{disk}", "capacity_gib": size} | ({"eviction": policy} if policy else {}))
    if gds := _path(settings.get("gds_path")):
        tiers.append({"url": f"nixl-gds://{gds}"})
    if _truth("enable_p2p", settings.get("enable_p2p")):
        tiers.append({"url": "peer:"})
    if remote := settings.get("remote_url"):
        tiers += _remote(str(remote), settings, out)
    elif settings.get("remote_serde") not in (None, "naive"):
        out.note("remote_serde", "there is no remote_url")
    return tiers


def _path(value: object) -> str:
    """LMCache takes a path, file:///PATH, or a list with commas of which we keep all."""
    text = "" if value in (None, False, "") else str(value)
    return ",".join(part.strip().removeprefix("file://").rstrip("/") for part in text.split(",") if part.strip())


def _remote(url: str, settings: Mapping[str, Any], out: Converted) -> list[dict[str, Any]]:
    ours = _remote_url(url)
    if ours is None:
        out.note("remote_url", f"no tier for {urlsplit(url).scheme}://; see store.tiers[].url for those there are")
        return []
    serde = str(settings.get("remote_serde") or "naive")
    codec = CODECS.get(serde)
    if codec is None:
        why = "a stub in LMCache that changes nothing" if serde == "kivi" else "unknown here"
        out.note("remote_serde", f"{serde} is {why}; values are kept raw (int4 is the nearest codec)")
    if ours.startswith("s3:") and not _has_region(ours):
        out.note("remote_url", "credentials, region and endpoint of s3 come from the environment or the URL's query")
    return [{"url": ours, "codec": codec or "raw"}]


def _remote_url(url: str) -> str | None:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"LMCache's remote_url is no URL: {error}") from error
    rest = url.partition("://")[2]
    match parts.scheme:
        case "redis" | "rediss" | "valkey" | "s3":
            return url
        case "redis-sentinel":
            hosts, _, master = rest.partition("/")
            return f"redis://{hosts}?sentinel={master or 'mymaster'}"
        case "redis-cluster" | "valkey-cluster":
            return f"redis://{rest}?cluster=true"
        case "infinistore":
            return url
        case "mooncakestore":
            return f"mooncake://{rest}"
        case "azure":
            return f"az://{rest}"
        case "fs":
            return f"file://{parts.path.rstrip('/')}"
    return None


def _has_region(url: str) -> bool:
    return "region=" in url or "endpoint=" in url


# ---- single keys -----------------------------------------------------------------------------------------------------


def _chunk_size(out: Converted, value: Any) -> None:
    size = int(_number("chunk_size", value))
    if size % CHUNK_STEP or not CHUNK_STEP <= size <= MAX_CHUNK:
        out.note(
            "chunk_size", f"{size} is not a multiple of {CHUNK_STEP} from {CHUNK_STEP} to {MAX_CHUNK}; 256 is taken"
        )
        return
    out.set("transport", "chunk_tokens", size)


def _cache_policy(out: Converted, value: Any) -> None:
    if str(value).upper() not in POLICIES:
        out.note("cache_policy", f"{value} has no counterpart; lru is taken (lfu, s3fifo and ttl are there)")


def _hash(out: Converted, value: Any) -> None:
    if str(value).startswith("sha256"):
        out.set("store", "hash_scheme", "sha256")
    else:
        out.note("pre_caching_hash_algorithm", f"{value}: {ELSEWHERE['pre_caching_hash_algorithm']}")


def _switch(name: str, section: str, key: str) -> Callable[[Converted, Any], None]:
    return lambda out, value: out.set(section, key, _truth(name, value))


def _seconds(name: str, section: str, key: str) -> Callable[[Converted, Any], None]:
    return lambda out, value: out.set(section, key, _number(name, value))


def _number(key: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = nan
    if not isfinite(number):
        raise ConfigError(f"LMCache's {key} is {value!r}: expected a number")
    return number


def _truth(key: str, value: Any) -> bool:
    """Also of text, as LMCache takes it."""
    if isinstance(value, bool | int | None):
        return bool(value)
    if str(value).lower() in ("true", "1", "yes", "on", "false", "0", "no", "off", ""):
        return str(value).lower() in ("true", "1", "yes", "on")
    raise ConfigError(f"LMCache's {key} is {value!r}: expected true or false")


RULES: dict[str, Callable[[Converted, Any], None]] = {
    "chunk_size": _chunk_size,
    "cache_policy": _cache_policy,
    "pre_caching_hash_algorithm": _hash,
    "save_decode_cache": _switch("save_decode_cache", "store", "save_decoded"),
    "save_unfull_chunk": _switch("save_unfull_chunk", "store", "partial_chunks"),
    "use_layerwise": _switch("use_layerwise", "transport", "layerwise"),
    "blocking_timeout_secs": _seconds("blocking_timeout_secs", "store", "load_timeout_s"),
}


def _extra(out: Converted, value: Any) -> None:
    """The free-form dictionary: NIXL storage is a tier; the rest is named."""
    extra = dict(value) if isinstance(value, Mapping) else {}
    if extra.pop("enable_nixl_storage", False):
        backend = str(extra.pop("nixl_backend", "POSIX")).lower().replace("_", "-")
        path = str(extra.pop("nixl_path", "") or "").rstrip("/")
        if backend in ("posix", "gds", "gds-mt", "obj") and (path or backend == "obj"):
            out.tree["store"]["tiers"].append({"url": f"nixl-{backend}://{path}"})
        else:
            out.note("extra_config.nixl_backend", f"{backend} with path {path!r} is no tier here")
        for key in ("nixl_pool_size", "nixl_buffer_size"):
            if extra.pop(key, None) is not None:
                out.note(f"extra_config.{key}", "set capacity_gib of the nixl tier")
    for key in extra:
        out.note(f"extra_config.{key}", "no counterpart")


def _why_not(key: str) -> str:
    if key in SAME_HERE:
        return f"always so here: {SAME_HERE[key]}"
    if key in ELSEWHERE:
        return ELSEWHERE[key]
    for prefix, other in ELSEWHERE_BY_PREFIX.items():
        if key.startswith(prefix):
            return ELSEWHERE.get(other, other)
    return "no counterpart"


def _typed(text: str) -> Any:
    """A value of the environment as YAML has it; what is no YAML is text."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
