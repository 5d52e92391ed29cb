"""Leases and reservations of the DRAM tier: the stored bytes themselves, held by a reference on their piece.

Also `fill`, the one copy of a put: large values are copied in a thread without the GIL, so the loop goes on.
"""

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import numpy as np

from pdxfer.memory.arena import Piece
from pdxfer.store.base import Buffer, Outcome
from pdxfer.store.counters import TierCounters
from pdxfer.store.lease import Once

COPY_INLINE_BYTES = 2 << 20
"""Up to this the hop to a thread costs more than the copy, and the loop waits no longer than for the hop's wake-ups."""


async def fill(view: memoryview, parts: Sequence[Buffer]) -> None:
    """Concatenate `parts` into `view`, which is exactly as long. When this returns or raises, nobody touches either."""
    if len(view) <= COPY_INLINE_BYTES:
        _copy_without_gil(view, parts)
        return
    copying = asyncio.get_running_loop().run_in_executor(None, _copy_without_gil, view, parts)
    cancelled = False
    while not copying.done():
        try:
            await asyncio.wait((copying,))
        except asyncio.CancelledError:  # the copy takes milliseconds and cannot be called off
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    copying.result()


def _copy_without_gil(view: memoryview, parts: Sequence[Buffer]) -> None:
    target = np.frombuffer(view, dtype=np.uint8)
    at = 0
    for part in parts:
        source = np.frombuffer(part, dtype=np.uint8)
        target[at : at + source.size] = source
        at += source.size
    assert at == target.size, (at, target.size)


class PieceLease:
    """A value of the arena, in place. Implements base.Lease; takes over one reference. `ended` hears of the release."""

    def __init__(self, piece: Piece, counters: TierCounters, ended: Callable[[], None]) -> None:
        self.piece = piece
        self._ended = ended
        self._view = piece.view.toreadonly()
        self._once = Once()
        self._counters = counters
        counters.lease_opened()

    @property
    def view(self) -> memoryview:
        """The stored bytes, read-only."""
        return self._view

    def release(self) -> None:
        """Let the piece go; idempotent, any thread."""
        if self._once.first():
            self._counters.lease_closed()
            self.piece.drop()
            self._ended()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class PieceReservation:
    """A piece that is being written in place. Implements base.Reservation; takes over one reference.

    `publish` makes it a value and takes the reference; whatever it answers, `ended` is called once the key is free.
    """

    def __init__(
        self,
        piece: Piece,
        counters: TierCounters,
        publish: Callable[[Piece], Outcome],
        ended: Callable[[], None],
    ) -> None:
        self.piece = piece
        self._view = piece.view
        self._once = Once()
        self._counters = counters
        self._publish = publish
        self._ended = ended
        counters.reservation_opened()

    @property
    def view(self) -> memoryview:
        """The bytes of the arena, writable."""
        return self._view

    async def commit(self) -> Outcome:
        """Visible from now on. No copy, no wait."""
        return self.commit_now()

    def commit_now(self) -> Outcome:
        """As commit."""
        assert self._once.first(), "commit of a reservation that has ended"
        outcome = self._publish(self.piece)
        if outcome is not Outcome.STORED:
            self.piece.drop()
        self._counters.reservation_closed()
        self._ended()
        return self._counters.put_ended(outcome)

    def abort(self) -> None:
        """Let the piece go; idempotent, any thread."""
        if self._once.first():
            self._counters.reservation_closed()
            self.piece.drop()
            self._ended()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
