"""From the slots of a table to the values that are really there. Pure; called by disk_slab.py at open.

After a crash a table may name a value twice, or two values in the same blocks (a power cut loses writes in any order).
The newest generation is right, the others are dropped and their slots erased, so that they never come back.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pdxfer.store.disk_index import Record


@dataclass(slots=True, kw_only=True)
class Recovered:
    """What a table holds."""

    records: list[Record] = field(default_factory=list)
    """Oldest first; no two share a key or a block."""
    erase: list[int] = field(default_factory=list)
    """Slots to be zeroed."""
    damaged: int = 0
    """Slots that were neither empty nor an entry."""
    dropped: int = 0
    """Values that no longer belong here: capacity made smaller, directories changed, superseded."""
    last_generation: int = 0


def recover(
    slots: Iterable[tuple[int, Record | None]], num_slots: int, num_blocks: int, is_ours: Callable[[bytes], bool]
) -> Recovered:
    """Values within `num_slots` and `num_blocks` whose key `is_ours`."""
    result = Recovered()
    newest: dict[bytes, Record] = {}
    for slot, record in slots:
        if record is None:
            result.damaged += 1
            result.erase.append(slot)
            continue
        result.last_generation = max(result.last_generation, record.generation)
        inside = slot < num_slots and all(start + count <= num_blocks for start, count in record.extents)
        other = newest.get(record.key)
        if not inside or not is_ours(record.key) or (other is not None and other.generation > record.generation):
            _drop(result, record)
            continue
        if other is not None:
            _drop(result, other)
        newest[record.key] = record
    records = list(newest.values())
    while losers := _overlapping(records):
        for record in losers:
            _drop(result, record)
        records = [record for record in records if not record.dead]
    result.records = sorted(records, key=lambda record: record.generation)
    return result


def _drop(result: Recovered, record: Record) -> None:
    record.dead = True
    result.dropped += 1
    result.erase.append(record.slot)


def _overlapping(records: list[Record]) -> list[Record]:
    """The older of each pair whose blocks were found to overlap; empty when no two do."""
    losers: dict[int, Record] = {}
    end, last = 0, None
    extents = [(start, count, record) for record in records for start, count in record.extents]
    for start, count, record in sorted(extents, key=lambda extent: extent[0]):
        if last is not None and start < end:
            loser = min(last, record, key=lambda r: r.generation)
            losers[id(loser)] = loser
        if start + count > end:
            end, last = start + count, record
    return list(losers.values())
