"""What every remote tier does alike: deadlines, worker threads, buffers, counters, and servers that go and come.

A subclass names its servers and which of them holds a key; the protocol is a Session (session.py). Nothing blocks the
loop. Capacity, eviction, expiry and pins are the servers' business: `pin` answers 0, and quotas are not kept here.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK, Clock
from pdxfer.store.base import Buffer, Entry, Lease, Outcome, Reservation, TierStats
from pdxfer.store.counters import TierCounters
from pdxfer.store.lease import BufferLease, BufferPool, BufferReservation, PooledBuffer, copy_parts, total_bytes
from pdxfer.store.remote.errors import Reason, ServerError
from pdxfer.store.remote.server import Server
from pdxfer.store.remote.session import Session
from pdxfer.store.remote.url import RemoteUrl, parse_url

log = logging.getLogger(__name__)

T = TypeVar("T")
COMMON = ("prefix", "connections", "buffer_mib")
"""Settings of every remote tier: what its keys begin with; connections, each with a thread, to one server; memory for
values in flight."""


class RemoteTier:
    """Implements base.Tier. Subclasses set `settings`, and implement `servers`, `place` and what opens them."""

    settings: tuple[str, ...] = ()
    """Names of settings beyond COMMON."""
    default_port = 0
    default_connections = 2
    default_prefix = "pdxfer:"
    trailer_bytes = 0
    """Bytes of ours behind each value, in what `write` of a session gets; only with `overruns`."""
    first_contact_s = 1.0
    """What opening waits for a server; one that takes longer is away, and looked for in the background."""
    overruns = False
    """Calls of the client library may last beyond their deadline: values are copied before it sees them."""

    def __init__(
        self,
        config: TierConfig,
        clock: Clock,
        *,
        tenant_quota: Mapping[str, int] | None = None,
        pin_fraction: float = 0.5,
    ) -> None:
        self._config, self._clock = config, clock
        self.url: RemoteUrl = parse_url(config, (*COMMON, *self.settings), self.default_port)
        self._prefix = self.url.text("prefix", self.default_prefix)
        self._sessions = int(self.url.number("connections", self.default_connections, least=1))
        self._counters = TierCounters()
        self._pool = BufferPool(int(self.url.number("buffer_mib", 256, least=1)) << 20)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._writing: dict[bytes, asyncio.Future[bool]] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url.shown} {list(self.servers())} {self._pool}>"

    @property
    def kind(self) -> str:
        """The URL's scheme, without its s for TLS."""
        return self.url.scheme

    # -- for subclasses -----------------------------------------------------------------------------------------------

    def servers(self) -> Iterable[Server]:
        """All there are now."""
        raise NotImplementedError

    def place(self, key: bytes) -> Server | None:
        """Who holds this key; None: nobody known."""
        raise NotImplementedError

    async def connect(self, end: float) -> None:
        """First contact with the servers. Raises ConfigError only."""
        await asyncio.gather(*(server.start(end) for server in self.servers()))

    def max_value_bytes(self) -> int:
        """Longest value the servers take."""
        return 1 << 40

    def server(self, name: str, connect: Callable[[float], Session], away: Callable[[], None] | None = None) -> Server:
        """A Server that counts its failures here."""
        failed = self._counters.failed
        return Server(name, connect, sessions=self._sessions, failed=failed, away=away or (lambda: None))

    # -- the contract -------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect; servers that are away are looked for in the background."""
        self._loop = asyncio.get_running_loop()
        if self._config.capacity_gib:
            log.warning("%s: capacity_gib is not kept by this tier: set the limit in the server", self.url.shown)
        await self.connect(SYSTEM_CLOCK.now() + self.first_contact_s)

    async def lookup(self, keys: Sequence[bytes], deadline: float) -> list[Entry | None]:
        """One question a server, all servers at once."""
        if not self._in_time(deadline):
            return [None] * len(keys)

        async def ask(server: Server, part: list[bytes], end: float) -> list[Entry | None]:
            return await server.run(lambda session: session.lookup(part, end), end)

        found: dict[bytes, Entry | None] = {}
        for part, entries in await self._spread(keys, deadline, ask):
            found.update(zip(part, entries or (), strict=False))
        return [found.get(key) for key in keys]

    async def reserve(self, key: bytes, num_bytes: int, deadline: float, tenant: str = "") -> Reservation | Outcome:
        """A buffer; the bytes go out with commit."""
        if (refused := self._refused(num_bytes, deadline)) is not None:
            return refused
        with_trailer = num_bytes + self.trailer_bytes
        if (buffer := await self._pool.take(with_trailer, deadline - self._clock.now())) is None:
            self._counters.failed(Reason.BUSY)
            return Outcome.LATE
        buffer.view = buffer.view[:num_bytes]

        async def write(full: PooledBuffer) -> Outcome:
            return await self._write(key, [full.block[:with_trailer]], num_bytes, deadline)

        return BufferReservation(buffer, self._counters, write)

    async def put(self, key: bytes, parts: Sequence[Buffer], deadline: float, tenant: str = "") -> Outcome:
        """Sent from where the parts lie, unless the client library could hold on to them."""
        num_bytes = total_bytes(parts)
        if (refused := self._refused(num_bytes, deadline)) is not None:
            return refused
        if not self.overruns:
            return await self._write(key, parts, num_bytes, deadline)
        reserved = await self.reserve(key, num_bytes, deadline, tenant)
        if isinstance(reserved, Outcome):
            return reserved
        async with reserved:
            copy_parts(reserved.view, parts)
            return await reserved.commit()

    async def get(self, key: bytes, deadline: float) -> Lease | None:
        """Received into a buffer of ours."""
        buffer = await self._get(key, deadline) if self._in_time(deadline) else None
        self._counters.got(buffer is not None)
        return BufferLease(buffer, self._counters) if buffer is not None else None

    async def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        """On each server its keys."""
        if not self._in_time(deadline):
            return 0

        async def remove(server: Server, part: list[bytes], end: float) -> int:
            return await server.run(lambda session: session.remove(part, end), end)

        return sum(removed or 0 for _, removed in await self._spread(keys, deadline, remove))

    async def pin(self, keys: Sequence[bytes], ttl_s: float | None, deadline: float) -> int:
        """None: what is evicted is the server's business."""
        return 0

    async def unpin(self, keys: Sequence[bytes], deadline: float) -> int:
        """None were pinned."""
        return 0

    async def scan(self, after: bytes, limit: int, deadline: float) -> list[Entry]:
        """The first of what all servers hold; nothing if one of them does not answer (pages would miss its keys)."""
        if not self._in_time(deadline):
            return []
        end = self._end(deadline)
        try:
            lists = await asyncio.gather(
                *(server.run(lambda session: session.scan(after, limit, end), end) for server in self.servers())
            )
        except ServerError as error:
            log.debug("%s: scan: %s", self.url.shown, error)
            return []
        return sorted((entry for part in lists for entry in part), key=lambda entry: entry.key)[:limit]

    def stats(self) -> TierStats:
        """What we did; what the servers hold is theirs to tell."""
        up = [server.up for server in self.servers()]
        return self._counters.stats(self.kind, reachable=bool(up) and all(up) and not self._closed)

    @property
    def partly_away(self) -> bool:
        """See base.SeveralServers."""
        return len({server.up for server in self.servers()}) > 1

    async def close(self) -> None:
        """Calls in progress fail."""
        self._closed = True
        await asyncio.gather(*(server.close() for server in self.servers()))
        self._pool.close()

    # -- steps --------------------------------------------------------------------------------------------------------

    def _in_time(self, deadline: float) -> bool:
        return not self._closed and deadline > self._clock.now()

    def _end(self, deadline: float) -> float:
        """The deadline as a moment of the system's clock, which sockets wait by."""
        return SYSTEM_CLOCK.now() + deadline - self._clock.now()

    def _refused(self, num_bytes: int, deadline: float) -> Outcome | None:
        if self._closed:
            return Outcome.FAILED
        if deadline <= self._clock.now():
            return Outcome.LATE
        if num_bytes > self.max_value_bytes() or not self._pool.fits(num_bytes + self.trailer_bytes):
            return Outcome.TOO_LARGE
        return None

    async def _spread(
        self, keys: Sequence[bytes], deadline: float, ask: Callable[[Server, list[bytes], float], Awaitable[T]]
    ) -> list[tuple[list[bytes], T | None]]:
        """Ask each server about its keys; None from those that failed."""
        end = self._end(deadline)
        shares: dict[Server, list[bytes]] = {}
        for key in dict.fromkeys(keys):
            if (server := self.place(key)) is not None:
                shares.setdefault(server, []).append(key)

        async def one(server: Server, part: list[bytes]) -> tuple[list[bytes], T | None]:
            try:
                return part, await ask(server, part, end)
            except ServerError as error:
                log.debug("%s: %s", server.name, error)
                return part, None

        return await asyncio.gather(*(one(server, part) for server, part in shares.items()))

    async def _write(self, key: bytes, parts: Sequence[Buffer], num_bytes: int, deadline: float) -> Outcome:
        """One writer of a key at a time; the others hear what became of it."""
        end = self._end(deadline)
        while (other := self._writing.get(key)) is not None:
            await asyncio.wait([other], timeout=max(0.0, end - self._clock.now()))
            if not other.done():
                return self._counters.put_ended(Outcome.LATE)
            if other.result():
                return self._counters.put_ended(Outcome.ALREADY)
        stored = self._writing[key] = asyncio.get_running_loop().create_future()
        outcome = Outcome.FAILED
        try:
            outcome = await self._send(key, parts, num_bytes, end)
        finally:
            del self._writing[key]
            stored.set_result(outcome in (Outcome.STORED, Outcome.ALREADY))
        return self._counters.put_ended(outcome)

    async def _send(self, key: bytes, parts: Sequence[Buffer], num_bytes: int, end: float) -> Outcome:
        server = self.place(key)
        if self._closed or server is None:
            return Outcome.FAILED
        try:
            return await server.run(
                lambda session: session.write(key, parts, num_bytes, end), end, borrows=not self.overruns
            )
        except ServerError as error:
            log.debug("%s: put of %s: %s", server.name, key.hex()[:12], error)
            late = error.reason in (Reason.TIMEOUT, Reason.BUSY)
            return Outcome.LATE if late else Outcome.FULL if error.reason is Reason.FULL else Outcome.FAILED

    async def _get(self, key: bytes, deadline: float) -> PooledBuffer | None:
        server, end = self.place(key), self._end(deadline)
        if server is None:
            return None
        lend = self._lender(end)
        try:
            return await server.run(lambda session: session.read(key, lend, end), end, drop=give_back)
        except ServerError as error:
            log.debug("%s: get of %s: %s", server.name, key.hex()[:12], error)
            return None

    def _lender(self, end: float) -> Callable[[int], PooledBuffer]:
        """For worker threads: a buffer now, or as soon as one comes back."""
        loop = self._loop
        assert loop is not None, "get before open"

        def lend(num_bytes: int) -> PooledBuffer:
            if not self._pool.fits(num_bytes):
                raise ServerError(Reason.DAMAGED, f"a value of {num_bytes} bytes is larger than buffer_mib")
            buffer = self._pool.try_take(num_bytes)
            if buffer is None:
                left = end - SYSTEM_CLOCK.now()
                buffer = asyncio.run_coroutine_threadsafe(self._pool.take(num_bytes, left), loop).result()
            if buffer is None:
                raise ServerError(Reason.BUSY, "no buffer came back in time: raise buffer_mib of the tier")
            return buffer

        return lend


def give_back(buffer: PooledBuffer | None) -> None:
    if buffer is not None:
        buffer.give_back()
