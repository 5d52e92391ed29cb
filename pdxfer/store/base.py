"""The contract of a tier: a place that keeps values (frames, opaque here) by chunk key.

Called by tiered.py on the store's event loop; a tier may use threads inside but never blocks the loop. A tier knows
nothing of tokens, models or frames: identity is in the key, integrity in the frame, both checked above it. Rules every
tier keeps, proved by pdxfer/testing/tier_suite.py:

  * commit before visible: no lookup or get sees a value before all of its bytes are in place;
  * all or nothing: a value is returned whole, with the length it was put with, or not at all;
  * leases: what a Lease shows does not change or vanish until it is released, whatever is evicted meanwhile;
  * whatever goes wrong with the medium is a miss or an Outcome and a counter, never an exception to the caller
    (ConfigError at open, and asserts for our own bugs, excepted);
  * every call ends by its deadline (seconds of the clock's `now`), every byte, lease and reservation comes back;
    with a deadline already past it answers LATE, None or 0 and asks nobody;
  * after close every call answers FAILED, None or 0.

Keys are KEY_BYTES of anything (checked above); values are 0 bytes or more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

KEY_BYTES = 32

Buffer = memoryview | bytes


class Outcome(StrEnum):
    """What became of a put."""

    STORED = "stored"
    ALREADY = "already"
    """The key was there: values are immutable, nothing was written."""
    FULL = "full"
    """No room, and nothing may be evicted (pinned, leased, quota)."""
    TOO_LARGE = "too_large"
    """One value that can never fit."""
    FAILED = "failed"
    """Medium or server: counted, and the tier is asked again later."""
    LATE = "late"
    """The deadline came first; nothing is visible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One value as lookup and listing show it."""

    key: bytes
    num_bytes: int
    pinned: bool = False
    created_wall: float = 0.0
    """Seconds since the epoch; 0: the tier does not know."""
    hits: int = 0
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """A tier's figures now; counters since open."""

    kind: str
    used_bytes: int = 0
    capacity_bytes: int = 0
    """0: the tier does not know (remote)."""
    num_values: int = 0
    pinned_bytes: int = 0
    leases: int = 0
    reservations: int = 0
    hits: int = 0
    misses: int = 0
    puts: int = 0
    evictions: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    """Reason (a small closed set) → times."""
    reachable: bool = True
    """False while its server or medium does not answer."""


class Lease(Protocol):
    """A value held for reading. `async with`, or release() exactly once (idempotent)."""

    @property
    def view(self) -> memoryview:
        """The whole value, read-only; valid until release."""
        ...

    def release(self) -> None:
        """Give the value back; the view must not be used any more. Any thread."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Reservation(Protocol):
    """Room for one value that is being written. Ends by commit or abort, else by abort when the block ends."""

    @property
    def view(self) -> memoryview:
        """Writable, `num_bytes` long. Tiers without memory of their own lend a buffer."""
        ...

    async def commit(self) -> Outcome:
        """Make the value visible, by the deadline given to reserve. Once, and not after abort."""
        ...

    def abort(self) -> None:
        """Give the room back; nothing was ever visible. Idempotent, any thread."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Tier(Protocol):
    """One place. Constructed by store/open.py from a URL or a config section; `open` first, `close` last."""

    @property
    def kind(self) -> str:
        """`dram`, `disk`, `redis` ... ; unique within one store, the label of its metrics."""
        ...

    async def open(self) -> None:
        """Attach: map, rebuild the index, connect. Raises ConfigError for what a user has to change; a server that is
        merely away is no error (the tier starts unreachable)."""
        ...

    async def lookup(self, keys: Sequence[bytes], deadline: float) -> list[Entry | None]:
        """One answer a key, None for absent or unknown by the deadline. Takes no lease: a later get may still miss."""
        ...

    async def reserve(self, key: bytes, num_bytes: int, deadline: float, tenant: str = "") -> Reservation | Outcome:
        """Room for one value, waiting for evictions or other writers until the deadline; else why not."""
        ...

    async def put(self, key: bytes, parts: Sequence[Buffer], deadline: float, tenant: str = "") -> Outcome:
        """Store the concatenation of `parts`; they are no longer needed when this returns. Idempotent."""
        ...

    async def get(self, key: bytes, deadline: float) -> Lease | None:
        """The value, or None. In place where the tier is memory; else read into a buffer of the tier's."""
        ...

    async def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        """Remove; how many were there. Leased values vanish from lookup at once, their bytes after the last lease."""
        ...

    async def pin(self, keys: Sequence[bytes], ttl_s: float | None, deadline: float) -> int:
        """Never evict these, for `ttl_s` (None: until unpinned); survives a restart where values do. How many are now
        pinned: absent keys, and those beyond the tier's pin quota, are not."""
        ...

    async def unpin(self, keys: Sequence[bytes], deadline: float) -> int:
        """How many were pinned."""
        ...

    async def scan(self, after: bytes, limit: int, deadline: float) -> list[Entry]:
        """Up to `limit` entries with keys greater than `after`, in key order (management, gap snapshots)."""
        ...

    def stats(self) -> TierStats:
        """Figures now; cheap, no I/O, any thread."""
        ...

    async def close(self) -> None:
        """Finish or abort what runs, detach. Idempotent."""
        ...


@runtime_checkable
class SeveralServers(Protocol):
    """Optional, for tiers of several servers: one that is away does not stop what the others hold from being served."""

    @property
    def partly_away(self) -> bool:
        """Some servers answer and some do not. Cheap, no I/O."""
        ...


@runtime_checkable
class EvictionNotices(Protocol):
    """Optional, for tiers that drop values by themselves: the store tells the engines' local indexes with it."""

    def take_evicted(self) -> list[bytes] | None:
        """Keys that went since the last call, by eviction, ttl or damage (not by delete); None: too many to remember,
        the caller has to look for itself. Cheap, no I/O, any thread."""
        ...
