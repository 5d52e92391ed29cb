"""What the configuration says of a disk tier, as typed values. Used by disk.py, lmdb_tier.py and sqlite_tier.py."""

from dataclasses import dataclass
from urllib.parse import unquote

from pdxfer.config.store import TierConfig
from pdxfer.core.errors import ConfigError
from pdxfer.store.remote.url import RemoteUrl, parse_url

DEFAULT_CAPACITY_BYTES = 10 << 30
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_SETTINGS = ("direct", "durable", "threads", "buffers_mib", "value_kib")
_FILE_SETTINGS = ("durable", "buffers_mib")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskOptions:
    """One disk tier's settings."""

    directories: tuple[str, ...]
    capacity_bytes: int
    """Of all directories together."""
    direct: bool
    """O_DIRECT where the filesystem takes it."""
    durable: bool
    """fdatasync before a put returns."""
    threads: int
    """Reads and writes at once, in each directory."""
    buffer_bytes: int
    """Of values in flight, in each directory."""
    value_bytes: int
    """Smallest average size of values for which the slot table is sized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions:
    """Settings of the lmdb and sqlite tiers."""

    path: str
    capacity_bytes: int
    durable: bool
    buffer_bytes: int


def read_options(config: TierConfig) -> DiskOptions:
    """From `file:///A,/B?durable=true` and `options`. ConfigError names what to change."""
    url = parse_url(config, _SETTINGS)
    return DiskOptions(
        directories=_paths(config),
        capacity_bytes=capacity_of(config),
        direct=url.flag("direct", True),
        durable=url.flag("durable"),
        threads=int(url.number("threads", 4, least=1)),
        buffer_bytes=_buffer_bytes(url),
        value_bytes=int(url.number("value_kib", 64, least=4)) * KIB,
    )


def read_file_options(config: TierConfig) -> FileOptions:
    """From `lmdb:///DIR` or `sqlite:///FILE`."""
    url = parse_url(config, _FILE_SETTINGS)
    paths = _paths(config)
    if len(paths) != 1:
        raise ConfigError(f"store.tiers: url {config.url!r} names {len(paths)} places; this kind of tier takes one")
    return FileOptions(
        path=paths[0],
        capacity_bytes=capacity_of(config),
        durable=url.flag("durable"),
        buffer_bytes=_buffer_bytes(url),
    )


def capacity_of(config: TierConfig) -> int:
    """The hard limit in bytes."""
    return int(config.capacity_gib * GIB) or DEFAULT_CAPACITY_BYTES


def _buffer_bytes(url: RemoteUrl) -> int:
    return int(url.number("buffers_mib", 128, least=1)) * MIB


def _paths(config: TierConfig) -> tuple[str, ...]:
    """`scheme:///A,/B` or `scheme:///A,scheme:///B`."""
    text = config.url.split("?")[0]
    scheme = text.split(":")[0]
    paths = [unquote(part.strip().removeprefix(f"{scheme}:").removeprefix("//")) for part in text.split(",")]
    for path in paths:
        if not path.startswith("/"):
            raise ConfigError(
                f"store.tiers: url {config.url!r}: {path!r} is not an absolute path; write {scheme}:///DIR with three"
                " slashes"
            )
    if len(set(paths)) != len(paths):
        raise ConfigError(f"store.tiers: url {config.url!r} names a directory twice; name each once")
    return tuple(path.rstrip("/") or "/" for path in paths)
