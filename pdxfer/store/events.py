"""Which chunks are near: a numbered stream of what came into and left each tier, and the index a listener builds of it.

`EventLog` belongs to the store (its loop); `Mirror` to a listener (the scheduler half, the router), any process. Both
pure. Batches are numbered without gaps: a listener that misses one, or is new, takes a snapshot and goes on from there.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import msgspec

MAX_BATCH = 1024
"""Keys in one batch; more go into the next."""
MAX_HELD = 1 << 19
"""Keys remembered of one tier (4 TiB of 8 MiB chunks, about 70 MiB); beyond, the oldest are forgotten."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What changed in one tier since the batch before."""

    seq: int
    """Counts up by one a batch, over all tiers."""
    tier: str
    added: list[bytes] = []
    evicted: list[bytes] = []
    restart: bool = False
    """Forget what was said of this tier: `added` is all there is (or the first part of it)."""


Listener = Callable[[Batch], None]


class EventLog:
    """Keys each local tier holds, as far as the store knows, and the listeners that are told."""

    def __init__(self) -> None:
        self._held: dict[str, dict[bytes, None]] = {}
        self._added: dict[str, dict[bytes, None]] = {}
        self._evicted: dict[str, dict[bytes, None]] = {}
        self._listeners: list[Listener] = []
        self.seq = 0
        """Number of the last batch."""

    def holds(self, tier: str, key: bytes) -> bool:
        """Whether the tier has it, as far as we know."""
        return key in self._held.get(tier, ())

    def num_held(self, tier: str) -> int:
        """Keys known to be there."""
        return len(self._held.get(tier, ()))

    def keys(self, tier: str) -> list[bytes]:
        """All of them."""
        return list(self._held.get(tier, ()))

    def add(self, tier: str, keys: Iterable[bytes]) -> None:
        """They are there now."""
        held = self._held.setdefault(tier, {})
        for key in keys:
            if key not in held:
                held[key] = None
                if self._evicted.get(tier, {}).pop(key, key) is key:
                    self._added.setdefault(tier, {})[key] = None
        if len(held) > MAX_HELD:
            self.evict(tier, list(islice(held, len(held) - MAX_HELD)))

    def evict(self, tier: str, keys: Iterable[bytes]) -> None:
        """They are there no more."""
        held = self._held.setdefault(tier, {})
        for key in keys:
            if key in held:
                del held[key]
                if self._added.get(tier, {}).pop(key, key) is key:
                    self._evicted.setdefault(tier, {})[key] = None

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Send a snapshot, then every batch. Returns what ends it."""
        self.flush()
        for batch in self.snapshot():
            listener(batch)
        self._listeners.append(listener)

        def end() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return end

    def flush(self) -> None:
        """Tell the listeners what happened since the last flush."""
        for tier in sorted({*self._added, *self._evicted}):
            added, evicted = list(self._added.pop(tier, ())), list(self._evicted.pop(tier, ()))
            while added or evicted:
                self.seq += 1
                batch = Batch(seq=self.seq, tier=tier, added=added[:MAX_BATCH], evicted=evicted[:MAX_BATCH])
                added, evicted = added[MAX_BATCH:], evicted[MAX_BATCH:]
                for listener in list(self._listeners):
                    listener(batch)

    def snapshot(self) -> list[Batch]:
        """All that was told so far, as batches that carry the number of the last one. Call after `flush`."""
        batches = []
        for tier in self._held:
            keys = self.keys(tier)
            for begin in range(0, max(1, len(keys)), MAX_BATCH):
                part = keys[begin : begin + MAX_BATCH]
                batches.append(Batch(seq=self.seq, tier=tier, added=part, restart=begin == 0))
        return batches


class Mirror:
    """A listener's copy. `apply` every batch in order; when it says False, ask for a snapshot."""

    def __init__(self) -> None:
        self._tiers: dict[str, set[bytes]] = {}
        self._seq = 0
        self.num_applied = 0
        """Batches taken in: who asks the store meanwhile sees whether there was news since."""

    def apply(self, batch: Batch) -> bool:
        """False: a batch is missing (this one was ignored); a snapshot is needed."""
        self.num_applied += 1
        if batch.restart:
            self._tiers[batch.tier] = set(batch.added)
            self._seq = batch.seq
            return True
        if batch.seq > self._seq + 1:
            return False
        keys = self._tiers.setdefault(batch.tier, set())
        keys.difference_update(batch.evicted)
        keys.update(batch.added)
        self._seq = max(self._seq, batch.seq)
        return True

    def __repr__(self) -> str:
        return f"<Mirror {' '.join(f'{tier}={len(keys)}' for tier, keys in self._tiers.items())} seq={self._seq}>"

    def __len__(self) -> int:
        """Keys, over all tiers."""
        return sum(map(len, self._tiers.values()))

    @property
    def tiers(self) -> list[str]:
        """Tiers that were spoken of."""
        return list(self._tiers)

    def among(self, keys: set[bytes]) -> set[bytes]:
        """Those that some tier holds."""
        found: set[bytes] = set()
        for held in self._tiers.values():
            found |= keys & held
        return found

    def forget(self, keys: Iterable[bytes]) -> None:
        """They turned out not to be there."""
        for held in self._tiers.values():
            held.difference_update(keys)

    def __contains__(self, key: bytes) -> bool:
        return any(key in keys for keys in self._tiers.values())

    def prefix(self, keys: Sequence[bytes]) -> int:
        """How many from the first on some tier holds."""
        for count, key in enumerate(keys):
            if key not in self:
                return count
        return len(keys)
