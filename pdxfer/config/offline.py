"""The `cache` argument of pdxfer.LLM → vLLM's kv_transfer_config. Imports no vllm."""

from collections.abc import Iterable
from difflib import get_close_matches
from operator import index
from os import PathLike
from pathlib import Path
from typing import Any, SupportsIndex
from urllib.parse import quote

import msgspec

from pdxfer.config.flags import CONNECTOR, CONNECTOR_MODULE
from pdxfer.config.load import load_config
from pdxfer.core.errors import ConfigError

CACHE_KEYS = {
    "chunk_size": "tokens of a chunk (256)",
    "local_cpu": "keep KV in memory: True, or GiB",
    "local_disk": "keep KV below this directory",
    "max_local_disk_size": "GiB the directory may take (10)",
    "remote_url": "keep KV at this URL: redis://, s3:// ...; or a list of them",
    "compression": "how disk and remote keep values: raw, lossless, zstd, int8, fp8, int4, cachegen, klt",
    "save_decoded": "keep what was generated too (True)",
    "config": "a pdxfer configuration file or name below these settings",
}
"""What `cache` may hold."""


def transfer_config(cache: dict[str, Any]) -> dict[str, Any]:
    """vLLM's kv_transfer_config for these settings. Raises ConfigError for a key that there is not, and for what the
    engine would refuse minutes later."""
    if not isinstance(cache, dict):
        raise ConfigError(f"pdxfer.LLM: cache is {cache!r}: write cache={{...}} with {', '.join(CACHE_KEYS)}")
    for key in cache:
        if key not in CACHE_KEYS:
            near = get_close_matches(str(key), CACHE_KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(CACHE_KEYS)}"
            raise ConfigError(f"pdxfer.LLM: cache has no key {key!r}; {hint}")
    extra: dict[str, Any] = {"role": "both", "set": store_settings(cache)}
    if cache.get("config"):
        extra["config"] = str(cache["config"])
    try:
        load_config([extra["config"]] if "config" in extra else [], extra["set"])
    except ConfigError as error:
        raise ConfigError(f"pdxfer.LLM: cache: {error}") from error
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def as_tokens(token_ids: Iterable[SupportsIndex]) -> list[int]:
    """Token ids of any integer type, as plain numbers. Raises ConfigError for anything else, such as text."""
    try:
        return [index(token) for token in token_ids]
    except TypeError as error:
        raise ConfigError(
            f"pdxfer.LLM: token_ids is a {type(token_ids).__name__}: give a list of token ids, as "
            "llm.get_tokenizer().encode(text) makes it"
        ) from error


def store_settings(cache: dict[str, Any]) -> list[str]:
    """As `--set` has them."""
    settings = ["store.enabled=true"]
    if cache.get("chunk_size"):
        settings.append(f"transport.chunk_tokens={cache['chunk_size']}")
    if "save_decoded" in cache:
        settings.append(f"store.save_decoded={str(bool(cache['save_decoded'])).lower()}")
    if tiers := _tiers(cache):
        settings.append(f"store.tiers={msgspec.json.encode(tiers).decode()}")
    return settings


def _tiers(cache: dict[str, Any]) -> list[dict[str, Any]]:
    """Fastest first. Nothing said: the configuration's own."""
    codec = str(cache.get("compression") or "raw")
    tiers: list[dict[str, Any]] = []
    memory = cache.get("local_cpu", not cache.get("config"))
    if memory:
        size = 0.0 if memory is True else _gib("local_cpu", memory)
        tiers.append({"url": "dram:", "capacity_gib": size})
    if cache.get("local_disk"):
        size = _gib("max_local_disk_size", cache.get("max_local_disk_size", 0.0))
        if not isinstance(cache["local_disk"], str | PathLike):
            raise ConfigError(f"pdxfer.LLM: cache: local_disk is {cache['local_disk']!r}: name a directory")
        directory = Path(cache["local_disk"]).expanduser().absolute()
        tiers.append({"url": f"file://{quote(str(directory))}", "capacity_gib": size, "codec": codec})
    remote = cache.get("remote_url") or []
    tiers += [{"url": str(url), "codec": codec} for url in ([remote] if isinstance(remote, str) else remote)]
    _refuse_useless(cache, has_tiers=bool(tiers))
    return tiers


def _refuse_useless(cache: dict[str, Any], *, has_tiers: bool) -> None:
    """What would be ignored, or leave nothing to keep KV in."""
    if not has_tiers and not cache.get("config"):
        raise ConfigError("pdxfer.LLM: cache: local_cpu is off, and there is no local_disk and no remote_url: name one")
    if cache.get("max_local_disk_size") and not cache.get("local_disk"):
        raise ConfigError("pdxfer.LLM: cache: max_local_disk_size without local_disk: name the directory")
    if cache.get("compression") and not (cache.get("local_disk") or cache.get("remote_url")):
        raise ConfigError("pdxfer.LLM: cache: compression is of local_disk and remote_url: name one, or leave it out")


def _gib(key: str, value: object) -> float:
    if isinstance(value, int | float):
        return float(value)
    raise ConfigError(f"pdxfer.LLM: cache: {key} is {value!r}: expected a number of GiB")
