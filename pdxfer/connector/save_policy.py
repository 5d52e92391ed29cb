"""Which chunks are worth saving: all computed, those seen before, or those the engine is about to forget.

Asked by saves.py for chunks that the tiers lack. `OnEviction` remembers what it was offered until the engine's pool is
about to hand out one of its blocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from pdxfer.connector.chunks import RankChunk
from pdxfer.connector.references import References
from pdxfer.store.policy import SecondSight

Offer = tuple[RankChunk, tuple[int, ...], str]
"""A chunk, the blocks that hold it, its tenant."""


class SavePolicy(Protocol):
    """Decides over offers."""

    def wants(self, offer: Offer) -> bool:
        """Save it now?"""
        ...

    def due(self) -> Iterable[Offer]:
        """Offers of earlier steps that have to be saved now."""
        ...


class Computed:
    """Everything."""

    def wants(self, offer: Offer) -> bool:
        return True

    def due(self) -> Iterable[Offer]:
        return ()


class OnSecondSight:
    """What is offered a second time."""

    def __init__(self) -> None:
        self._sight = SecondSight()

    def wants(self, offer: Offer) -> bool:
        return self._sight.admits(offer[0][0].key)

    def due(self) -> Iterable[Offer]:
        return ()


class Nothing:
    """Loads only."""

    def wants(self, offer: Offer) -> bool:
        return False

    def due(self) -> Iterable[Offer]:
        return ()


@dataclass(frozen=True, slots=True)
class _Kept:
    offer: Offer
    hashes: tuple[object, ...]
    """Of its blocks when it was complete: a block with another one holds something else."""


class OnEviction:
    """What the engine's prefix cache is about to forget. Needs prefix caching: without it nothing is kept at all."""

    def __init__(self, references: References, num_ahead: int) -> None:
        self._references, self._num_ahead = references, num_ahead
        self._kept: dict[bytes, _Kept] = {}
        self._by_block: dict[int, bytes] = {}

    def wants(self, offer: Offer) -> bool:
        """Not yet; remembered."""
        chunk, block_ids, _ = offer
        key = chunk[0].key
        for block_id in block_ids:
            before = self._by_block.get(block_id, key)
            if before != key:
                self._kept.pop(before, None)
            self._by_block[block_id] = key
        self._kept[key] = _Kept(offer, self._hashes(block_ids))
        return False

    def due(self) -> Iterable[Offer]:
        """Chunks with a block among those that one more step may take."""
        keys = (self._by_block.pop(block.block_id, None) for block in self._references.next_out(self._num_ahead))
        for key in dict.fromkeys(key for key in keys if key is not None):
            kept = self._kept.pop(key, None)
            if kept is not None and self._hashes(kept.offer[1]) == kept.hashes and None not in kept.hashes:
                yield kept.offer

    def _hashes(self, block_ids: Iterable[int]) -> tuple[object, ...]:
        return tuple(self._references.block(block_id).block_hash for block_id in block_ids)


def policy(name: str, references: References, num_ahead: int) -> SavePolicy:
    """The policy of `store.save`. `num_ahead`: blocks a step may take."""
    match name:
        case "second_sight":
            return OnSecondSight()
        case "on_gpu_eviction":
            return OnEviction(references, num_ahead)
        case "none":
            return Nothing()
        case _:
            return Computed()
