"""Leases and reservations in the store process's segment: bytes in place, ended by a message to it."""

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from pdxfer.store.base import Outcome
from pdxfer.store.counters import TierCounters
from pdxfer.store.lease import Once
from pdxfer.store.shared_link import SharedLink
from pdxfer.store.shared_wire import Held


class SharedLease:
    """A value in the shared segment. Implements base.Lease. Once the store process is gone the bytes stay readable."""

    def __init__(self, link: SharedLink, held: Held, counters: TierCounters) -> None:
        self._link = link
        self._handle = held.handle
        self._view = link.segment.view[held.offset : held.offset + held.num_bytes].toreadonly()
        self._once = Once()
        self._counters = counters
        counters.lease_opened()

    @property
    def view(self) -> memoryview:
        """The stored bytes, read-only."""
        return self._view

    def release(self) -> None:
        """Tell the store process; idempotent, any thread."""
        if self._once.first():
            self._counters.lease_closed()
            self._link.drop(self._handle)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class SharedReservation:
    """Room in the shared segment that is being written. Implements base.Reservation."""

    def __init__(
        self, link: SharedLink, held: Held, counters: TierCounters, commit: Callable[[], Awaitable[Outcome]]
    ) -> None:
        self._link = link
        self._handle = held.handle
        self._view = link.segment.view[held.offset : held.offset + held.num_bytes]
        self._commit = commit
        self._once = Once()
        self._counters = counters
        counters.reservation_opened()

    @property
    def view(self) -> memoryview:
        """The bytes of the segment, writable."""
        return self._view

    async def commit(self) -> Outcome:
        """One round trip; FAILED if the store process has gone meanwhile."""
        assert self._once.first(), "commit of a reservation that has ended"
        try:
            return await self._commit()
        finally:
            self._counters.reservation_closed()

    def abort(self) -> None:
        """Tell the store process; idempotent, any thread."""
        if self._once.first():
            self._counters.reservation_closed()
            self._link.drop(self._handle)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
