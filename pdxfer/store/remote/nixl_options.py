"""What the configuration says of a `nixl-*` tier, as typed values. Used by nixl_storage.py."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from pdxfer.config.store import TierConfig
from pdxfer.core.errors import ConfigError
from pdxfer.store.disk_options import MIB, capacity_of
from pdxfer.store.remote.nixl_mover import Plugin
from pdxfer.store.remote.url import RemoteUrl, parse_url

_PLUGINS = {"nixl-posix": "POSIX", "nixl-gds": "GDS", "nixl-gds-mt": "GDS_MT", "nixl-obj": "OBJ"}
_COMMON = ("durable", "buffers_mib")
_FILE = (*_COMMON, "direct")
_GPU = (*_FILE, "device")
_OBJECT = (*_COMMON, "index", "endpoint", "region", "access_key_id", "secret_access_key", "session_token")
_SETTINGS = {"nixl-posix": _FILE, "nixl-gds": _GPU, "nixl-gds-mt": _GPU, "nixl-obj": _OBJECT}
_PREFIX = "pdxfer/"


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlOptions:
    """One tier's settings."""

    kind: str
    plugin: Plugin
    directory: str
    """Of the values' files; `nixl-obj`: of what is known of each object."""
    capacity_bytes: int
    buffer_bytes: int
    """Of values in flight."""
    durable: bool
    """fdatasync before a put returns."""
    direct: bool
    """O_DIRECT where the filesystem takes it."""
    device: int = 0
    """Number of the GPU through whose memory GDS moves values."""
    prefix: str = field(default="", repr=False)
    """What names of objects begin with."""


def read_nixl_options(config: TierConfig) -> NixlOptions:
    """From `nixl-posix:///DIR`, `nixl-gds:///DIR`, `nixl-obj://BUCKET/PREFIX?index=/DIR`. ConfigError names what to
    change."""
    kind = urlsplit(config.url).scheme
    if kind not in _PLUGINS:
        raise ConfigError(f"store.tiers: url {config.url!r}: NIXL tiers are {', '.join(sorted(_PLUGINS))}")
    url = parse_url(config, _SETTINGS[kind])
    objects, gpu = kind == "nixl-obj", kind.startswith("nixl-gds")
    return NixlOptions(
        kind=kind,
        plugin=Plugin(
            name=_PLUGINS[kind],
            parameters=_object_parameters(url) if objects else {},
            memory="VRAM" if gpu else "DRAM",
            storage="OBJ" if objects else "FILE",
        ),
        directory=_absolute(url.text("index"), url, "index=/DIR") if objects else _directory(url),
        capacity_bytes=capacity_of(config),
        buffer_bytes=int(url.number("buffers_mib", 128, least=1)) * MIB,
        durable=url.flag("durable"),
        direct=not objects and url.flag("direct", default=gpu),
        device=int(url.number("device", 0)),
        prefix=(url.path.rstrip("/") + "/" if url.path else _PREFIX) if objects else "",
    )


def _directory(url: RemoteUrl) -> str:
    if url.addresses or url.user:
        raise ConfigError(f"store.tiers: {url.shown} names a server; write {url.scheme}:///DIR with three slashes")
    return _absolute(f"/{url.path}" if url.path else "", url, f"{url.scheme}:///DIR")


def _absolute(path: str, url: RemoteUrl, form: str) -> str:
    if not path.startswith("/") or path == "/":
        raise ConfigError(f"store.tiers: {url.shown} needs a directory of its own, given as {form}; it has {path!r}")
    return path.rstrip("/")


def _object_parameters(url: RemoteUrl) -> Mapping[str, str]:
    """Of NIXL's OBJ plug-in. What is left out it takes from the usual sources of AWS."""
    if len(url.addresses) != 1 or url.addresses[0].port:
        raise ConfigError(f"store.tiers: {url.shown} must name one bucket: nixl-obj://BUCKET/PREFIX?index=/DIR")
    endpoint = url.text("endpoint")
    found = {
        "bucket": url.addresses[0].host,
        "access_key": url.user or url.text("access_key_id"),
        "secret_key": url.password or url.text("secret_access_key"),
        "session_token": url.text("session_token"),
        "region": url.text("region"),
        "endpoint_override": endpoint.partition("://")[2] or endpoint,
        "scheme": endpoint.partition("://")[0] if "://" in endpoint else "",
    }
    return {name: value for name, value in found.items() if value}
