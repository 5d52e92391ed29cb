"""The `infinistore` tier: InfiniStore over TCP, through its own client (pip install infinistore).

    infinistore://HOST[:12345]

A value is a body and, written after it, a head with its length and the body's number: InfiniStore knows neither sizes
nor "only if absent". Reading an absent key hangs its client (0.2.35), so existence is asked for first. rdma: not built.
"""

import importlib
import secrets
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import Clock
from pdxfer.core.errors import ConfigError
from pdxfer.store.base import Buffer, Entry, Outcome
from pdxfer.store.lease import PooledBuffer
from pdxfer.store.remote.errors import Reason, ServerError
from pdxfer.store.remote.library import KeyLocks, address_of
from pdxfer.store.remote.server import Server
from pdxfer.store.remote.session import Lend
from pdxfer.store.remote.stream import Stream, remaining
from pdxfer.store.remote.tier import RemoteTier
from pdxfer.store.remote.url import Address

_HEAD = struct.Struct("<4sIQ16s")
_MAGIC = b"PDXI"
_VERSION = 1
"""1: first (2026-11-29)."""


class InfiniStoreTier(RemoteTier):
    """Implements base.Tier."""

    default_port = 12345
    overruns = True

    def __init__(
        self,
        config: TierConfig,
        clock: Clock,
        *,
        tenant_quota: Mapping[str, int] | None = None,
        pin_fraction: float = 0.5,
    ) -> None:
        super().__init__(config, clock, tenant_quota=tenant_quota, pin_fraction=pin_fraction)
        if len(self.url.addresses) != 1:
            raise ConfigError(f"store.tiers: {self.url.shown} must name one server: infinistore://HOST:PORT")
        self._address = self.url.addresses[0]
        self._library = _load()
        self._locks = KeyLocks()
        self._connecting = threading.Lock()
        self._server = self.server(f"infinistore {self._address}", self._session)

    def servers(self) -> Iterable[Server]:
        """The one."""
        return (self._server,)

    def place(self, key: bytes) -> Server | None:
        """The one."""
        return self._server

    def _session(self, end: float) -> "InfiniStoreSession":
        return InfiniStoreSession(self._library, self._address, self._prefix, self._locks, self._connecting, end)


class InfiniStoreSession:
    """Implements Session."""

    def __init__(
        self,
        library: Any,
        address: Address,
        prefix: str,
        locks: KeyLocks,
        connecting: threading.Lock,
        end: float,
    ) -> None:
        """`connecting`: sys.stdout is the process's, so one thread at a time takes it away and gives it back."""
        self._prefix, self._locks = prefix, locks
        Stream(address, end).close()  # its own connect has no deadline
        config = library.ClientConfig(
            host_addr=address.host,
            service_port=address.port,
            connection_type=library.TYPE_TCP,
            log_level="error",
        )
        self._connection = library.InfinityConnection(config)
        if not connecting.acquire(timeout=remaining(end)):
            raise ServerError(Reason.TIMEOUT, f"InfiniStore at {address}: another connection is being made")
        try:
            with redirect_stdout(StringIO()):  # it prints
                self._connection.connect()
        except Exception as error:  # the library raises nothing narrower
            raise ServerError(Reason.UNREACHABLE, f"InfiniStore at {address}: {error}") from error
        finally:
            connecting.release()

    def ping(self, end: float) -> None:
        """Ask for anything."""
        self._exists(self._prefix + "ping")

    def lookup(self, keys: Sequence[bytes], end: float) -> list[Entry | None]:
        """By the heads."""
        found: list[Entry | None] = []
        for key in keys:
            remaining(end)
            head = self._head(key)
            found.append(None if head is None else Entry(key=key, num_bytes=head[0]))
        return found

    def read(self, key: bytes, lend: Lend, end: float) -> PooledBuffer | None:
        """One copy: the library returns an array of its own."""
        head = self._head(key)
        if head is None:
            return None
        num_bytes, body = head
        buffer = lend(num_bytes)
        if not num_bytes:
            return buffer
        try:
            remaining(end)
            data = self._fetch(body)
            if data is None or data.nbytes != num_bytes:
                self._drop([self._name(key)])
                raise ServerError(Reason.DAMAGED, f"the body of {key.hex()[:12]} is missing or cut", clean=True)
            buffer.view[:] = data
        except BaseException:
            buffer.give_back()
            raise
        return buffer

    def write(self, key: bytes, parts: Sequence[Buffer], num_bytes: int, end: float) -> Outcome:
        """Body, then head."""
        with self._locks.held(key, remaining(end)) as ours:
            if not ours:
                raise ServerError(Reason.TIMEOUT, "another writer of the key is slow", clean=True)
            if self._head(key) is not None:
                return Outcome.ALREADY
            put = secrets.token_hex(8)
            remaining(end)
            for part in parts:
                if num_bytes:
                    self._store(f"{self._name(key)}:{put}", memoryview(part))
            self._store(self._name(key), memoryview(bytearray(_HEAD.pack(_MAGIC, _VERSION, num_bytes, put.encode()))))
        return Outcome.STORED

    def remove(self, keys: Sequence[bytes], end: float) -> int:
        """Heads first."""
        removed = 0
        for key in keys:
            remaining(end)
            head = self._head(key)
            if head is not None:
                removed += self._drop([self._name(key)])
                self._drop([head[1]])
        return removed

    def scan(self, after: bytes, limit: int, end: float) -> list[Entry]:
        """The server cannot list its keys."""
        return []

    def abort(self) -> None:
        """Its calls cannot be ended."""

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    # -- steps --------------------------------------------------------------------------------------------------------

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    def _head(self, key: bytes) -> tuple[int, str] | None:
        """Length of the value and name of its body."""
        data = self._fetch(self._name(key))
        if data is None or data.nbytes != _HEAD.size:
            return None
        magic, version, num_bytes, put = _HEAD.unpack(data.tobytes())
        if magic != _MAGIC or version != _VERSION:
            return None
        return num_bytes, f"{self._name(key)}:{put.decode('ascii', 'replace')}"

    def _exists(self, name: str) -> bool:
        return bool(self._call(self._connection.check_exist, name))

    def _fetch(self, name: str) -> Any:
        return self._call(self._connection.tcp_read_cache, name) if self._exists(name) else None

    def _store(self, name: str, body: memoryview) -> None:
        self._call(self._connection.tcp_write_cache, name, address_of(body), body.nbytes)

    def _drop(self, names: list[str]) -> int:
        return int(self._call(self._connection.delete_keys, names))

    def _call(self, call: Any, *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:  # the library raises nothing narrower
            full = "-507" in str(error) or "ret = 507" in str(error)
            raise ServerError(Reason.FULL if full else Reason.UNREACHABLE, f"InfiniStore: {error}") from error


def _load() -> Any:
    try:
        return importlib.import_module("infinistore")
    except ImportError as error:
        raise ConfigError(f"store.tiers: infinistore needs its client ({error}): pip install infinistore") from error
