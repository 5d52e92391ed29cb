"""The `mooncake` tier: a Mooncake store, through its own client (pip install mooncake-transfer-engine[-non-cuda]).

    mooncake://HOST:50051?metadata=http://HOST:8080/metadata[&protocol=tcp|rdma&device=mlx5_0&host=OUR_ADDRESS]

Others lend the memory (Mooncake's segments); we mount none. Objects are write-once and carry one byte more than the
value, since the store keeps no empty ones. rdma: written, never run.
"""

import asyncio
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from pdxfer.store.remote.stream import remaining
from pdxfer.store.remote.tier import RemoteTier

_ABSENT = (-703, -704)
"""Still being written (its replica is not ready), or not there."""
_LEASE_EXPIRED = -707
_FULL = (-200, -201)
_UNREACHABLE = (-900, -901)
_LOCAL_BUFFER_BYTES = 16 << 20


class MooncakeTier(RemoteTier):
    """Implements base.Tier."""

    settings = ("metadata", "protocol", "device", "host")
    default_port = 50051
    first_contact_s = 10.0
    """Its client takes half a second to set up on an idle machine."""
    overruns = True
    trailer_bytes = 1

    def __init__(
        self,
        config: TierConfig,
        clock: Clock,
        *,
        tenant_quota: Mapping[str, int] | None = None,
        pin_fraction: float = 0.5,
    ) -> None:
        super().__init__(config, clock, tenant_quota=tenant_quota, pin_fraction=pin_fraction)
        if len(self.url.addresses) != 1 or not self.url.text("metadata"):
            raise ConfigError(
                f"store.tiers: {self.url.shown} must name the master and its metadata server:"
                " mooncake://HOST:PORT?metadata=http://HOST:PORT/metadata"
            )
        self._library = _load()
        self._client: _Client | None = None
        self._lock = threading.Lock()
        self._locks = KeyLocks()
        self._server = self.server(f"mooncake {self.url.addresses[0]}", self._session)

    def servers(self) -> Iterable[Server]:
        """The one master."""
        return (self._server,)

    def place(self, key: bytes) -> Server | None:
        """The one master."""
        return self._server

    async def close(self) -> None:
        """Also ends the client, when the last call has left it."""
        await super().close()
        await asyncio.to_thread(self._end_client)

    def _end_client(self) -> None:
        """Not on the loop: a thread that waits for the master has the lock."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _session(self, end: float) -> "MooncakeSession":
        with self._lock:
            if self._client is None:
                self._client = _Client(self._connect())
            return MooncakeSession(self._client, self._prefix, self._locks)

    def _connect(self) -> Any:
        store, url = self._library.MooncakeDistributedStore(), self.url
        host, metadata = url.text("host", "127.0.0.1"), url.text("metadata")
        protocol, device = url.text("protocol", "tcp"), url.text("device")
        master = str(url.addresses[0])
        code = store.setup(host, metadata, 0, _LOCAL_BUFFER_BYTES, protocol, device, master)
        if code:
            raise ServerError(Reason.UNREACHABLE, f"Mooncake's client cannot reach {master}: code {code}")
        return store


class _Client:
    """The library's client; closing it under a running call would crash the process, so the last one out closes."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._users = 0
        self._closing = False

    @contextmanager
    def used(self) -> Iterator[Any]:
        """The client, for one call."""
        with self._lock:
            if self._closing:
                raise ServerError(Reason.UNREACHABLE, "the tier is closed")
            self._users += 1
        try:
            yield self._store
        finally:
            with self._lock:
                self._users -= 1
                last = self._closing and not self._users
            if last:
                self._store.close()

    def close(self) -> None:
        """Now, or after the last call."""
        with self._lock:
            self._closing = True
            idle = not self._users
        if idle:
            self._store.close()


class MooncakeSession:
    """Implements Session over the tier's one client, which is thread-safe."""

    def __init__(self, client: _Client, prefix: str, locks: KeyLocks) -> None:
        self._client, self._prefix, self._locks = client, prefix, locks

    def ping(self, end: float) -> None:
        """Ask the master for anything."""
        self._checked(self._call("is_exist", self._prefix + "ping"), "is_exist")

    def lookup(self, keys: Sequence[bytes], end: float) -> list[Entry | None]:
        """First which are there, in one question, then their sizes."""
        found: list[Entry | None] = []
        for key, there in zip(keys, self._call("batch_is_exist", [self._name(key) for key in keys]), strict=True):
            remaining(end)
            size = self._size(key) if self._checked(there, "batch_is_exist") == 1 else None
            found.append(None if size is None else Entry(key=key, num_bytes=size))
        return found

    def read(self, key: bytes, lend: Lend, end: float) -> PooledBuffer | None:
        """Into a buffer that is registered meanwhile."""
        size = self._size(key)
        if size is None:
            return None
        buffer = lend(size + 1)
        try:
            got = _LEASE_EXPIRED
            while got == _LEASE_EXPIRED:  # its own lease ended before the bytes were here: they may be others' already
                remaining(end)
                got = self._with_memory(buffer.view, lambda at: self._call("get_into", self._name(key), at, size + 1))
            if self._checked(got, "get_into") != size + 1:
                raise ServerError(Reason.DAMAGED, f"{key.hex()[:12]}: {got} bytes instead of {size + 1}", clean=True)
        except FileNotFoundError:
            buffer.give_back()
            return None
        except BaseException:
            buffer.give_back()
            raise
        buffer.view = buffer.view[:size]
        return buffer

    def write(self, key: bytes, parts: Sequence[Buffer], num_bytes: int, end: float) -> Outcome:
        """A put of what is there succeeds without writing, so it is asked for first."""
        [body] = parts
        assert isinstance(body, memoryview) and body.nbytes == num_bytes + 1, "RemoteTier adds the trailer"
        with self._locks.held(key, remaining(end)) as ours:
            if not ours:
                raise ServerError(Reason.TIMEOUT, "another writer of the key is slow", clean=True)
            if self._checked(self._call("is_exist", self._name(key)), "is_exist") == 1:
                return Outcome.ALREADY
            remaining(end)
            code = self._with_memory(body, lambda at: self._call("put_from", self._name(key), at, num_bytes + 1))
            self._checked(code, "put_from")
        return Outcome.STORED

    def remove(self, keys: Sequence[bytes], end: float) -> int:
        """Also what was read a moment ago (Mooncake's own leases)."""
        removed = 0
        for key in keys:
            remaining(end)
            code = self._call("remove", self._name(key), True)
            if code not in _ABSENT:
                self._checked(code, "remove")
                removed += 1
        return removed

    def scan(self, after: bytes, limit: int, end: float) -> list[Entry]:
        """The store cannot list its keys."""
        return []

    def abort(self) -> None:
        """Its calls cannot be ended; they end by Mooncake's own deadlines."""

    def close(self) -> None:
        """The client is the tier's."""

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    def _size(self, key: bytes) -> int | None:
        try:
            return self._checked(self._call("get_size", self._name(key)), "get_size") - 1
        except FileNotFoundError:
            return None

    def _with_memory(self, view: memoryview, call: Callable[[int], int]) -> int:
        at = address_of(view)
        self._checked(self._call("register_buffer", at, view.nbytes), "register_buffer")
        try:
            return call(at)
        finally:
            self._call("unregister_buffer", at)

    def _call(self, verb: str, *args: Any) -> Any:
        with self._client.used() as store:
            return getattr(store, verb)(*args)

    def _checked(self, code: int, what: str) -> int:
        """The library's codes as errors."""
        if code >= 0:
            return code
        if code in _ABSENT:
            raise FileNotFoundError(what)
        if code in _FULL:
            raise ServerError(Reason.FULL, f"Mooncake's {what}: code {code}, no room", clean=True)
        reason = Reason.UNREACHABLE if code in _UNREACHABLE else Reason.PROTOCOL
        raise ServerError(reason, f"Mooncake's {what}: code {code}")


def _load() -> Any:
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ConfigError(
            f"store.tiers: mooncake needs its client ({error}): pip install mooncake-transfer-engine (or ...-non-cuda)"
        ) from error
