"""A place on a local medium and the buffer it will be written from (base.Reservation). Made by disk_writer.py."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from pdxfer.store.base import Outcome
from pdxfer.store.counters import TierCounters
from pdxfer.store.lease import Once, PooledBuffer


class LocalReservation:
    """`write` owns the buffer and the place from commit on (a thread may still use them after the deadline)."""

    def __init__(
        self,
        buffer: PooledBuffer,
        counters: TierCounters,
        *,
        write: Callable[[], Awaitable[Outcome]],
        abandon: Callable[[], None],
    ) -> None:
        self._buffer = buffer
        self._counters = counters
        self._write = write
        self._abandon = abandon
        self._loop = asyncio.get_running_loop()
        self._ended = Once()
        counters.reservation_opened()

    @property
    def view(self) -> memoryview:
        """Writable, as long as was reserved, page-aligned."""
        return self._buffer.view

    async def commit(self) -> Outcome:
        """Write and make visible, by the deadline of the reservation."""
        assert self._ended.first(), "commit of a reservation that has ended"
        try:
            return await self._write()
        finally:
            self._counters.reservation_closed()

    def abort(self) -> None:
        """Give place and buffer back; idempotent, any thread."""
        if not self._ended.first():
            return
        self._buffer.give_back()
        self._counters.reservation_closed()
        try:
            self._loop.call_soon_threadsafe(self._abandon)
        except RuntimeError:  # the loop is closed, and the tier with it
            return

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
