"""What the scheduler half knows of the tiers: keys that each rank's nearby tiers hold, as the ranks report them.

It may be a little behind: a key that is gone makes a load come up short, one that is new is computed once more.
"""

from pdxfer.connector.chunks import RankChunk
from pdxfer.wire.store_facts import Held


class Mirror:
    """Keys by rank and tier."""

    def __init__(self, world_size: int) -> None:
        self._ranks: list[dict[str, set[bytes]]] = [{} for _ in range(world_size)]

    def __repr__(self) -> str:
        return f"<Mirror {[{tier: len(keys) for tier, keys in tiers.items()} for tiers in self._ranks]}>"

    def apply(self, held: Held) -> None:
        """A rank's report; reports of a rank come in order."""
        keys = self._ranks[held.rank].setdefault(held.tier, set())
        if held.restart:
            keys.clear()
        keys.difference_update(held.removed)
        keys.update(held.added)

    def has(self, chunk: RankChunk) -> bool:
        """Whether every rank holds its part in some tier."""
        return all(
            any(key.key in keys for keys in tiers.values()) for key, tiers in zip(chunk, self._ranks, strict=True)
        )
