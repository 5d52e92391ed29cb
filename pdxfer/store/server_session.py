"""One engine attached to the store process: its requests, and everything it holds until it lets go or goes away."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import count

import msgspec

from pdxfer.core.clock import Clock
from pdxfer.core.errors import ProtocolError
from pdxfer.store.base import Entry, Outcome
from pdxfer.store.dram import DramTier
from pdxfer.store.piece_lease import PieceLease, PieceReservation
from pdxfer.store.shared_wire import (
    LONGEST_PAGE,
    Answer,
    Commit,
    Count,
    Delete,
    Drop,
    Ended,
    Entries,
    Figures,
    FrameBuffer,
    Get,
    Held,
    Lookup,
    Pin,
    Request,
    Reserve,
    Scan,
    Unpin,
    decode_request,
    pack,
)

log = logging.getLogger(__name__)

MOST_WAITING = 256
"""Reservations of one engine that wait for room; more are FULL at once."""
MOST_HELD = 65_536
"""Leases and reservations of one engine; more are refused."""
LONGEST_BACKLOG = 4 << 20
"""Bytes an engine has not read, beyond which it is told nothing unasked."""


class Session(asyncio.Protocol):
    """Loop thread only. Everything but a reservation that has to wait is answered as it comes."""

    def __init__(self, tier: DramTier, clock: Clock, ended: Callable[["Session"], None]) -> None:
        self._tier = tier
        self._clock = clock
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self._frames = FrameBuffer()
        self._unsent: list[bytes] | None = None
        """Answers to what came together, while it is handled: they go together, too."""
        self._held: dict[int, PieceLease | PieceReservation] = {}
        self._handles = count(1)
        self._waiting: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Session held={len(self._held)} waiting={len(self._waiting)}>"

    # -- the connection -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        answers = self._unsent = []
        try:
            for body in self._frames.feed(data):
                self._handle(decode_request(body))
        except (msgspec.DecodeError, ProtocolError) as error:
            log.warning("store: detached an engine that does not speak our protocol: %s", error)
            self.end()
        finally:
            self._unsent = None
            if answers and self._transport is not None:
                self._transport.write(b"".join(answers))

    def pause_writing(self) -> None:
        """It asks faster than it reads answers."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """Everything back."""
        self._transport = None
        for task in self._waiting:
            task.cancel()
        held, self._held = self._held, {}
        for item in held.values():
            _give_back(item)
        if held:
            log.info("store: an engine went; %d leases and reservations taken back", len(held))
        self._ended(self)

    def end(self) -> None:
        """Close the connection; `ended` is told when it is closed."""
        if self._transport is not None:
            self._transport.abort()

    def tell(self, frame: bytes) -> None:
        """Send something unasked, unless the engine is far behind."""
        if self._transport is not None and self._transport.get_write_buffer_size() < LONGEST_BACKLOG:
            self._transport.write(frame)

    # -- requests ---------------------------------------------------------------------------------------------------

    def _handle(self, request: Request) -> None:
        tier = self._tier
        match request:
            case Drop(handle):
                self._drop(handle)
            case Commit(number, handle, deadline):
                self._end(number, self._commit(handle, deadline))
            case Get(number, key):
                self._lend(number, tier.lend(key))
            case Reserve():
                self._begin(request)
            case Lookup(number, keys):
                self._list(number, tier.entries(keys))
            case Scan(number, after, limit):
                self._list(number, tier.page(after, min(limit, LONGEST_PAGE)))
            case Delete(number, keys):
                self._count(number, tier.remove(keys))
            case Pin(number, keys, ttl_s):
                self._count(number, tier.hold(keys, ttl_s))
            case Unpin(number, keys):
                self._count(number, tier.let_go(keys))

    def _begin(self, request: Reserve) -> None:
        now = self._tier.try_reserve(request.key, request.num_bytes, request.tenant)
        if now is not None:
            self._reserved(request.id, now)
            return
        if len(self._waiting) >= MOST_WAITING:
            self._end(request.id, Outcome.FULL)
            return
        task = asyncio.ensure_future(self._reserve(request))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _reserve(self, request: Reserve) -> None:
        got = await self._tier.reserve_piece(request.key, request.num_bytes, request.deadline, request.tenant)
        self._reserved(request.id, got)

    def _reserved(self, number: int, got: PieceReservation | Outcome) -> None:
        if isinstance(got, Outcome):
            self._end(number, got)
        else:
            self._lend(number, got)

    def _lend(self, number: int, item: PieceLease | PieceReservation | None) -> None:
        if item is None:
            self._end(number, None)
        elif self._transport is None or len(self._held) >= MOST_HELD:
            _give_back(item)
            self._end(number, Outcome.FULL)
        else:
            handle = next(self._handles)
            self._held[handle] = item
            self._answer(Held(number, self._figures(), handle, item.piece.offset, item.piece.num_bytes))

    def _commit(self, handle: int, deadline: float) -> Outcome:
        item = self._held.pop(handle, None)
        if not isinstance(item, PieceReservation):
            raise ProtocolError(f"commit of handle {handle}, which is no open reservation of this engine")
        if self._clock.now() < deadline:
            return item.commit_now()
        item.abort()
        return Outcome.LATE

    def _drop(self, handle: int) -> None:
        item = self._held.pop(handle, None)
        if item is None:
            raise ProtocolError(f"release of handle {handle}, which this engine does not hold")
        _give_back(item)

    def _end(self, number: int, outcome: Outcome | None) -> None:
        self._answer(Ended(number, self._figures(), outcome))

    def _count(self, number: int, counted: int) -> None:
        self._answer(Count(number, self._figures(), counted))

    def _list(self, number: int, entries: Sequence[Entry | None]) -> None:
        self._answer(Entries(number, self._figures(), list(entries)))

    def _answer(self, answer: Answer) -> None:
        if self._unsent is not None:
            self._unsent.append(pack(answer))
        elif self._transport is not None:
            self._transport.write(pack(answer))

    def _figures(self) -> Figures:
        now = self._tier.stats()
        return Figures(now.used_bytes, now.capacity_bytes, now.num_values, now.pinned_bytes, now.evictions)


def _give_back(item: PieceLease | PieceReservation) -> None:
    if isinstance(item, PieceLease):
        item.release()
    else:
        item.abort()
