"""Serves this node's local tiers to its peers: reads, lookups, listings, removal after a move, and what they hold.

One thread a connection, behind the handshake of the data channels; the store's loop does the lookups. A value goes from
the tier's own memory into the socket (no copy in user space) under a lease that ends with the last byte.
"""

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from pdxfer.core.errors import ChannelError, PdxferError, ProtocolError
from pdxfer.store.base import Entry, Lease
from pdxfer.store.events import Batch
from pdxfer.store.manage_copy import remove_unpinned
from pdxfer.store.peer import wire
from pdxfer.store.runtime import StoreThread
from pdxfer.store.slot import TierSlot
from pdxfer.store.tiered import TieredStore
from pdxfer.transport.base import EndpointOptions, PeerId
from pdxfer.transport.frames import FrameType, Head
from pdxfer.transport.stream import Accepted, StreamServer
from pdxfer.transport.tcp import keep_alive, listen
from pdxfer.wire.messages import StoreAddress

log = logging.getLogger(__name__)
T = TypeVar("T")

SERVE_S = 5.0
"""For one question; tiers have shorter limits of their own."""
QUIET_S = 1.0
"""A listener hears something at least this often: who has gone is noticed."""
MAX_BEHIND = 4096
"""Batches that a listener has not taken, beyond which it is cut off; it comes back and begins with a snapshot."""


class PeerService(StreamServer):
    """Listens from construction on; `admit` before anybody gets in."""

    kind = wire.KIND

    def __init__(self, options: EndpointOptions, me: PeerId, thread: StoreThread) -> None:
        super().__init__(options, me, listen(options.bind, options.ports))
        self._thread = thread
        self._counting = threading.Lock()
        self.num_values = self.num_bytes = 0
        """Served since the start."""
        self._listeners: set[queue.Queue[Batch | None]] = set()
        self.address = StoreAddress(host=options.advertise, port=self._server.getsockname()[1])
        self.start()

    # ---- as a StreamServer -----------------------------------------------------------------------------------------

    def tune(self, sock: socket.socket) -> None:
        """As data channels."""
        keep_alive(sock, self.options.write_timeout_s)

    def serve(self, connection: Accepted, peer: PeerId, head: Head) -> None:
        """One question and its answer."""
        if head.type is not FrameType.CONTROL:
            raise ProtocolError(f"{head.type.name} frame where a question belongs")
        asked = wire.question(connection.frames.receive_meta(head))
        try:
            self._answer(connection, peer, asked)
        except (ChannelError, ProtocolError):
            raise
        except PdxferError as error:
            self._say(connection, wire.Failed(reason=str(error)[:1000]))

    def closing(self) -> None:
        """Wake those who wait for news to tell."""
        with self._lock:
            listeners = list(self._listeners)
        for batches in listeners:
            with contextlib.suppress(queue.Full):  # then it is awake
                batches.put_nowait(None)

    # ---- answers ---------------------------------------------------------------------------------------------------

    def _answer(self, connection: Accepted, peer: PeerId, asked: wire.Question) -> None:
        match asked:
            case wire.Read():
                self._read(connection, asked)
            case wire.Look():
                self._list(connection, self._ask(lambda store: _look(store, asked.keys)))
            case wire.Page():
                self._list(connection, self._ask(lambda store: _page(store, asked)))
            case wire.Remove():
                said = self._ask(lambda store: _remove(store, asked))
                log.info("store: %d values removed, which %s took over", said.count("removed"), peer.engine_id)
                self._say(connection, wire.Removed(said=said))
            case wire.Follow():
                self._tell(connection)
            case wire.Ping():
                self._say(connection, wire.Quiet())

    def _read(self, connection: Accepted, asked: wire.Read) -> None:
        found = self._ask(lambda store: _lend(store, asked), _release)
        if found is None:
            self._say(connection, wire.Absent())
            return
        value, lease = found
        try:
            connection.frames.send(FrameType.UNIT, wire.encode(value), [lease.view] if len(lease.view) else [])
            with self._counting:
                self.num_values, self.num_bytes = self.num_values + 1, self.num_bytes + len(lease.view)
        finally:
            lease.release()

    def _list(self, connection: Accepted, entries: Sequence[Entry | None]) -> None:
        items = [wire.Item.of(entry) if entry is not None else None for entry in entries]
        self._say(connection, wire.Entries(items=items))

    def _say(self, connection: Accepted, answer: wire.Answer) -> None:
        connection.frames.send(FrameType.CONTROL, wire.encode(answer))

    def _tell(self, connection: Accepted) -> None:
        """Until the connection ends."""
        batches: queue.Queue[Batch | None] = queue.Queue(MAX_BEHIND)

        def heard(batch: Batch) -> None:
            """Store's loop."""
            try:
                batches.put_nowait(batch)
            except queue.Full:
                connection.frames.cut()

        async def subscribe(store: TieredStore) -> Callable[[], None]:
            names = {slot.name for slot in served(store)}
            return store.subscribe(lambda batch: heard(batch) if batch.tier in names else None)

        end = self._ask(subscribe, lambda end: self._thread.call_soon(lambda store: end()))
        with self._lock:
            self._listeners.add(batches)
        try:
            self._pass_on(connection, batches)
        finally:
            self._thread.call_soon(lambda store: end())
            with self._lock:
                self._listeners.discard(batches)

    def _pass_on(self, connection: Accepted, batches: "queue.Queue[Batch | None]") -> None:
        seq = 0
        while not self._stopping.is_set():
            try:
                batch = batches.get(timeout=QUIET_S)
            except queue.Empty:
                batch = None
            if batch is None:
                self._say(connection, wire.Quiet())
                continue
            seq += 1
            told = wire.Told(
                seq=seq, tier=batch.tier, added=batch.added, evicted=batch.evicted, restart=batch.restart
            )  # fmt: skip
            self._say(connection, told)

    def _ask(
        self, call: Callable[[TieredStore], Coroutine[Any, Any, T]], dispose: Callable[[T], None] | None = None
    ) -> T:
        """On the store's loop. Raises ChannelError when there is no answer; what then still comes is disposed of."""
        future = self._thread.submit(call)
        try:
            return future.result(SERVE_S)
        except FutureTimeout as error:
            future.add_done_callback(lambda late: _disposed(late, dispose))
            raise ChannelError(f"the store did not answer within {SERVE_S:g} s") from error
        except CancelledError as error:
            raise ChannelError("the store is closed") from error


def served(store: TieredStore, tier: str = "") -> list[TierSlot]:
    """Tiers that are this node's own, or the one named, if it is one of them."""
    return [slot for slot in store.slots if (slot.local or slot.in_memory) and tier in ("", slot.name)]


# ---- the store's loop ----------------------------------------------------------------------------------------------


async def _lend(store: TieredStore, asked: wire.Read) -> tuple[wire.Value, Lease] | None:
    """None: it is not here. PdxferError: a tier that has it, or may have, did not give it; who asks goes on knowing."""
    deadline, is_unsure = store.clock.now() + SERVE_S / 2, False
    for slot in served(store, asked.tier):
        found = await slot.lookup([asked.key], deadline)
        if found == [None]:
            continue
        entry = found[0] if found is not None else None
        lease = await slot.get(asked.key, deadline) if entry is not None else None
        if entry is not None and lease is not None:
            return wire.Value(tier=slot.name, tenant=entry.tenant), lease
        is_unsure = True
    if is_unsure:
        raise PdxferError("a tier that has the value, or may have it, did not give it")
    return None


async def _look(store: TieredStore, keys: Sequence[bytes]) -> list[Entry | None]:
    deadline = store.clock.now() + SERVE_S / 2
    found: list[Entry | None] = [None] * len(keys)
    for slot in served(store):
        said = await slot.lookup(keys, deadline) or [None] * len(keys)
        found = [have if have is not None else new for have, new in zip(found, said, strict=True)]
    return found


async def _page(store: TieredStore, asked: wire.Page) -> list[Entry | None]:
    deadline = store.clock.now() + SERVE_S / 2
    found: dict[bytes, Entry] = {}
    for slot in served(store, asked.tier):
        page = await slot.scan(asked.after, asked.limit, deadline)
        if page is None:
            raise PdxferError(f"tier {slot.name} does not answer, so its values are not known")
        found = {**{entry.key: entry for entry in page}, **found}
    return [found[key] for key in sorted(found)[: asked.limit]]


async def _remove(store: TieredStore, asked: wire.Remove) -> list[str]:
    """Memory that several engines share is left alone: who took the values over may be one of them."""
    slots = served(store, asked.tier)
    own = [slot for slot in slots if not slot.shared]
    said = [await remove_unpinned(store, own, key) for key in asked.keys]
    for slot in slots:
        if slot.shared:
            there = await slot.lookup(asked.keys, store.clock.now() + SERVE_S / 2) or [None] * len(said)
            said = ["kept_shared" if entry is not None else word for word, entry in zip(said, there, strict=True)]
    store.events.flush()
    return said


def _release(found: tuple[wire.Value, Lease] | None) -> None:
    if found is not None:
        found[1].release()


def _disposed(future: "Future[T]", dispose: Callable[[T], None] | None) -> None:
    if dispose is not None and not future.cancelled() and future.exception() is None:
        dispose(future.result())
