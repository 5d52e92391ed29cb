"""What a local tier needs of its medium: the slab, an LMDB or an SQLite file. See disk_local.py, the only caller.

Methods marked *loop* are pure bookkeeping on the event loop; the others block, run in worker threads (several at once
where `threads` > 1) and raise OSError for whatever the medium refuses. A place that was freed may be given out again at
once: its erasure is queued, and every later `write` carries queued erasures out before it touches a byte.
"""

from collections.abc import Sequence
from typing import Protocol

from pdxfer.store.disk_index import Record


class DamagedError(Exception):
    """The bytes are not those that were stored. The value is dropped and counted under `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Medium(Protocol):
    """A place of fixed capacity that keeps values by Record."""

    @property
    def threads(self) -> int:
        """Calls it takes at once."""
        ...

    @property
    def unit_bytes(self) -> int:
        """Room is given out in multiples of this."""
        ...

    @property
    def room_bytes(self) -> int:
        """Of the largest value when nothing else is there."""
        ...

    def open(self) -> list[Record]:
        """Attach and tell what is there, oldest first. ConfigError for what the user has to change. After a failure,
        or `close`, it may be called again."""
        ...

    def take_damage(self) -> dict[str, int]:
        """Reason → times of what `open` found damaged, once. *loop*"""
        ...

    def check(self) -> None:
        """OSError if the place that was opened is not there any more."""
        ...

    def close(self) -> None:
        """Detach; no other call is running. Idempotent."""
        ...

    def place(self, record: Record) -> bool:
        """Give `record` room; False: none left. *loop*"""
        ...

    def may_grow(self, now: float) -> bool:
        """Whether `grow` could make room. *loop*"""
        ...

    def grow(self) -> None:
        """Take more of the capacity into use."""
        ...

    def grown(self, now: float, failed: bool) -> None:
        """`grow` has returned. *loop*"""
        ...

    def erase(self, record: Record) -> None:
        """Queue the erasure of a value that was written. *loop*"""
        ...

    def free(self, record: Record) -> None:
        """Its room may be given out again. *loop*"""
        ...

    def flush(self) -> None:
        """Carry queued erasures out."""
        ...

    def write(self, record: Record, block: memoryview, parts: Sequence[memoryview]) -> None:
        """Store `record.num_bytes` bytes: the concatenation of `parts`, or what is in `block` if there are none.
        `block` is aligned, whole pages, and may be used as scratch."""
        ...

    def read(self, record: Record, block: memoryview) -> None:
        """Fill `block` from its start. DamagedError if the bytes are not right."""
        ...

    def update(self, record: Record) -> None:
        """Write `record.pin_until`, unless the record is dead."""
        ...
