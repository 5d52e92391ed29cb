"""Figures of the tiered store, as plain values: for metrics, `pdxfer status` and the management API."""

from dataclasses import dataclass

from pdxfer.store.base import TierStats
from pdxfer.store.slot import TierSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStats:
    """One tier in its place."""

    name: str
    tier: TierStats
    counts: dict[str, int]
    """hits, misses, stored, already, full, too_large, failed, late, corrupt, raised, skipped, dropped, lost, promoted,
    written_back, unreadable; since open."""
    reads: str
    writes: str
    """State of the breakers: closed, open, probing."""
    times_opened: int
    pending: int
    """Copies that wait to be written here."""
    strays: int
    """Calls given up on that have not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """The whole store now."""

    tiers: list[SlotStats]
    pending_saves: int
    staged_bytes: int
    dirty_chunks: int
    loads: int
    counts: dict[str, int]
    """lookups, loads, chunks_found, chunks_loaded, chunks_missed, saves_OUTCOME ...; since open."""


def slot_stats(slot: TierSlot, pending: int) -> SlotStats:
    """Figures of one slot now."""
    return SlotStats(
        name=slot.name,
        tier=slot.tier.stats(),
        counts=dict(slot.counts),
        reads=slot.reads.state.value,
        writes=slot.writes.state.value,
        times_opened=slot.reads.times_opened + slot.writes.times_opened,
        pending=pending,
        strays=slot.strays,
    )
