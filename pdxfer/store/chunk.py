"""What goes into and comes out of the tiered store: plain values, and `Chunk`, a verified value held for reading.

Used by the node's saver and loader and by the management verbs; tiered.py makes them.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Self

from pdxfer.codec.frame import FrameHeader
from pdxfer.store.base import Buffer, Entry, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class NewChunk:
    """One chunk to be saved. The store does not keep `parts` beyond the save that takes them."""

    key: bytes
    """32 bytes (kv/chunks.py)."""
    num_tokens: int
    parts: Sequence[Buffer]
    """The chunk's raw bytes are their concatenation: layer by layer, within a layer block by block."""
    first_token: int = 0
    """Position of its first token in the prompt; lossy codecs keep a context's first tokens exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One chunk to be loaded, and what it must be: a value that says otherwise is a miss."""

    key: bytes
    num_tokens: int
    raw_bytes: int


class Saved(StrEnum):
    """What became of a save."""

    HELD = "held"
    """A tier has it."""
    ALREADY = "already"
    """It was there."""
    QUEUED = "queued"
    """Copied; slower tiers take it in the background."""
    SKIPPED = "skipped"
    """The policy does not want it (yet)."""
    DROPPED = "dropped"
    """Too much is waiting to be saved; counted."""
    FAILED = "failed"
    """No tier took it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """The verified end of a save."""

    outcome: Saved
    tiers: dict[str, Outcome] = field(default_factory=dict)
    """What each tier said that was waited for."""

    @property
    def held(self) -> bool:
        """Whether the bytes can be read back now."""
        return self.outcome in (Saved.HELD, Saved.ALREADY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where one chunk is: the fastest tier that has it."""

    tier: str
    entry: Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The longest run of chunks, from the first on, that some tier has each."""

    found: tuple[Found, ...]
    complete: bool
    """False: a tier did not answer in time, there may be more."""

    @property
    def num_chunks(self) -> int:
        """How many."""
        return len(self.found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a load delivered. No sink call runs or comes any more when it is returned."""

    delivered: frozenset[int]
    """Indexes of chunks whose sink call has ended well."""
    tiers: dict[int, str]
    """Index → tier it came from."""
    num_bytes: int
    """Raw bytes delivered."""
    late: bool
    """The deadline ended it."""

    def prefix(self, start_chunk: int = 0) -> int:
        """First index from `start_chunk` on that was not delivered."""
        end = start_chunk
        while end in self.delivered:
            end += 1
        return end


Sink = Callable[[int, FrameHeader, memoryview], None]
"""(index, header, raw bytes): scatters one chunk. Called on the store's threads, several at once for different indexes;
the bytes are gone when it returns. Raising means: not delivered."""


class Chunk:
    """A verified, decoded chunk. `async with`, or release() exactly once for itself and each hold(); any thread."""

    def __init__(self, header: FrameHeader, raw: memoryview, tier: str, release: Callable[[], None]) -> None:
        self.header = header
        self.raw = raw
        """Read-only; valid until release."""
        self.tier = tier
        self._release = release
        self._holds = 1
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Chunk {self.header.key.hex()[:12]} from {self.tier} {len(self.raw)} B holds={self._holds}>"

    def hold(self) -> Self:
        """One release more is needed before the bytes go."""
        with self._lock:
            assert self._holds > 0, "hold of a released chunk"
            self._holds += 1
        return self

    def release(self) -> None:
        """Let go; the bytes must not be used any more."""
        with self._lock:
            assert self._holds > 0, "release of a released chunk"
            self._holds -= 1
            last = self._holds == 0
        if last:
            self._release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
