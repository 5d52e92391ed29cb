"""The contract between tier.py and a protocol: a Session is one connection, blocking, used by one thread at a time.

A session raises ServerError and nothing else; every call ends by `end` (a moment of the system's monotonic clock), or,
for libraries that cannot promise that, later (`overruns`): then values are copied before they are handed over.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from pdxfer.store.base import Buffer, Entry, Outcome
from pdxfer.store.lease import PooledBuffer

Lend = Callable[[int], PooledBuffer]
"""A buffer of so many bytes; raises ServerError(BUSY). Whoever asked gives it back if the read fails."""


class Session(Protocol):
    """One authenticated connection."""

    def ping(self, end: float) -> None:
        """Ask for a sign of life."""
        ...

    def lookup(self, keys: Sequence[bytes], end: float) -> list[Entry | None]:
        """One answer a key."""
        ...

    def read(self, key: bytes, lend: Lend, end: float) -> PooledBuffer | None:
        """The whole value in a lent buffer; None: absent. DAMAGED (clean) if what is there is not the value."""
        ...

    def write(self, key: bytes, parts: Sequence[Buffer], num_bytes: int, end: float) -> Outcome:
        """All or nothing: STORED, ALREADY, FULL or TOO_LARGE."""
        ...

    def remove(self, keys: Sequence[bytes], end: float) -> int:
        """How many were there."""
        ...

    def scan(self, after: bytes, limit: int, end: float) -> list[Entry]:
        """Entries with greater keys, in order."""
        ...

    def abort(self) -> None:
        """Make a call in progress fail soon; any thread."""
        ...

    def close(self) -> None:
        """Idempotent, does not wait for the server."""
        ...
