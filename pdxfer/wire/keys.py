"""CURVE keys of one cluster: files in a directory, and the two values that sockets take.

``server.key/.pub`` belong to the router; ``client.key/.pub`` are shared by all members (engines and proxies). The
router admits every other ``*.pub`` it finds beside its own, so members may also have a pair each. Secrets never
appear in repr or messages.
"""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from pdxfer.core.errors import ConfigError

_PRIVATE = stat.S_IRWXG | stat.S_IRWXO
_KEY_CHARS = 40
"""Z85 text of 32 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSecurity:
    """What the router needs: its secret key and who may connect."""

    secret_key: bytes = field(repr=False)
    allowed: frozenset[bytes]
    """Public keys of admitted members, Z85."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSecurity:
    """What a member needs: the router's public key and its own pair."""

    server_key: bytes
    public_key: bytes
    secret_key: bytes = field(repr=False)


def new_keys(directory: Path) -> list[Path]:
    """Write a fresh server and client pair, readable by this user only. Never overwrites."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the directory {directory}: {error.strerror}; choose another") from error
    paths = [directory / f"{name}.{kind}" for name in ("server", "client") for kind in ("key", "pub")]
    existing = [str(path) for path in paths if path.exists()]
    if existing:
        raise ConfigError(
            f"keys exist already: {', '.join(existing)}. Members that hold the old ones would be locked out; "
            "choose another directory, or remove these files first"
        )
    for name in ("server", "client"):
        public, secret = zmq.curve_keypair()
        _write(directory / f"{name}.key", secret)
        _write(directory / f"{name}.pub", public)
    return paths


def load_server_security(directory: Path) -> ServerSecurity:
    """The router's side, from ``server.key`` and the members' ``*.pub``. Raises ConfigError with what to do."""
    secret = _read(directory / "server.key")
    members = [path for path in sorted(directory.glob("*.pub")) if path.name != "server.pub"]
    if not members:
        raise ConfigError(
            f"{directory} has no member's public key (client.pub): nobody could connect. "
            "Copy it there, or make a set with `pdxfer keys new DIR`"
        )
    return ServerSecurity(secret_key=secret, allowed=frozenset(_read(path) for path in members))


def load_client_security(directory: Path) -> ClientSecurity:
    """A member's side, from ``server.pub``, ``client.pub`` and ``client.key``. Raises ConfigError with what to do."""
    return ClientSecurity(
        server_key=_read(directory / "server.pub"),
        public_key=_read(directory / "client.pub"),
        secret_key=_read(directory / "client.key"),
    )


def _write(path: Path, key: bytes) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(key + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write key file {path}: {error.strerror}") from error


def _read(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        text = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read key file {path}: {error.strerror}. "
            "Make keys with `pdxfer keys new DIR` and copy them to each host"
        ) from error
    if path.suffix == ".key" and mode & _PRIVATE:
        raise ConfigError(f"secret key {path} is open to others (mode {mode & 0o777:o}): run `chmod 600 {path}`")
    if len(text) != _KEY_CHARS or not text.isascii():
        raise ConfigError(f"{path} is not a CURVE key: expected {_KEY_CHARS} characters, found {len(text)}")
    return text
