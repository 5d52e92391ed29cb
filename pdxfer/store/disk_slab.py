"""One directory of the disk tier: a slab of blocks and its slot table. A Medium (disk_medium.py).

    DIR/slab   values, in extents of 4096-byte blocks; grows in steps up to the capacity
    DIR/table  which value is where (disk_table.py); written last, so what it names is complete
    DIR/lock   flock of the one process that uses the directory

A value is put in the order: queued erasures of table entries → payload → entry. Killed anywhere, the table names only
whole values. After a power cut writes may be missing in any order: the checks of entry and payload make misses of that.
"""

import errno
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from pdxfer.store.disk_files import NOTHING, FileLayer, digest, in_place, read_all, stage, write_all
from pdxfer.store.disk_index import Record
from pdxfer.store.disk_medium import DamagedError
from pdxfer.store.disk_place import SlabFiles, SlabPlan
from pdxfer.store.disk_recover import Recovered, recover
from pdxfer.store.disk_space import Space
from pdxfer.store.disk_sync import GroupSync
from pdxfer.store.disk_table import (
    BLOCK_BYTES,
    ENTRY_BYTES,
    HEADER_BYTES,
    MAX_EXTENTS,
    blocks_of,
    pack_entry,
    slot_offset,
    unpack_entries,
)

log = logging.getLogger(__name__)

_FREE_SLOT = bytes(ENTRY_BYTES)
_LOAD_SLOTS = 1 << 16
_LEAST_STEP_BLOCKS = 64
GROW_AGAIN_S = 1.0
"""After the disk was full the slab does not try to grow for this long; values then replace each other."""


class Slab:
    """Implements Medium. Table writes are under one lock, which the loop never takes (a disk that hangs would hold it);
    payload goes to disjoint blocks without any."""

    def __init__(
        self,
        path: str,
        plan: SlabPlan,
        files: FileLayer,
        *,
        threads: int,
        direct: bool,
        durable: bool,
        is_ours: Callable[[bytes], bool],
    ) -> None:
        self.threads = threads
        self.unit_bytes = BLOCK_BYTES
        self.room_bytes = plan.max_blocks * BLOCK_BYTES
        self._plan = plan
        self._files = files
        self._at = SlabFiles(path, files, direct=direct)
        self._durable = durable
        self._is_ours = is_ours
        self._damage: dict[str, int] = {}
        self._table_lock = threading.Lock()
        self._erasures: deque[int] = deque()
        """Slots. The loop appends, who has the table's lock takes away what is written."""
        self._space = Space(0)
        self._allocated_blocks = 0
        self._free_slots: list[int] = []
        self._fresh_slot = 0
        self._generation = 0
        self._grow_after = 0.0
        self._sync_slab = GroupSync(lambda: files.sync(self._at.slab))
        self._sync_table = GroupSync(lambda: files.sync(self._at.table))

    def __repr__(self) -> str:
        return f"<Slab {self._at.path} {'direct' if self._at.direct else 'buffered'} {self._space}>"

    # -- life -------------------------------------------------------------------------------------------------------

    def open(self) -> list[Record]:
        """Lock, read the table, forget what is damaged, cut the slab to the capacity."""
        self._at.open(self._plan)
        try:
            num_blocks = min(self._files.size(self._at.slab) // BLOCK_BYTES, self._plan.max_blocks)
            found = recover(self._read_table(), self._plan.num_slots, num_blocks, self._is_ours)
            for slot in found.erase:
                write_all(self._files, self._at.table, memoryview(_FREE_SLOT), slot_offset(slot))
            self._files.truncate(self._at.table, self._plan.table_bytes)
            self._files.truncate(self._at.slab, num_blocks * BLOCK_BYTES)
        except OSError:
            self._at.close()
            raise
        self._begin(found, num_blocks)
        log.info(
            "disk tier: %s opened with %d values, slab of %d of %d blocks, %s; %d slots damaged, %d values dropped",
            self._at.path,
            len(found.records),
            num_blocks,
            self._plan.max_blocks,
            "O_DIRECT" if self._at.direct else "buffered (options.direct is off, or the filesystem takes none)",
            found.damaged,
            found.dropped,
        )
        return found.records

    def take_damage(self) -> dict[str, int]:
        damage, self._damage = self._damage, {}
        return damage

    def check(self) -> None:
        self._at.check()

    def close(self) -> None:
        self._at.close()

    # -- room, on the loop ------------------------------------------------------------------------------------------

    def place(self, record: Record) -> bool:
        """Blocks, a slot and the next generation."""
        if not self._free_slots and self._fresh_slot == self._plan.num_slots:
            return False
        extents = self._space.take(blocks_of(record.num_bytes), MAX_EXTENTS)
        if extents is None:
            return False
        if self._free_slots:
            record.slot = self._free_slots.pop()
        else:
            record.slot, self._fresh_slot = self._fresh_slot, self._fresh_slot + 1
        self._generation += 1
        record.extents, record.generation = extents, self._generation
        return True

    def may_grow(self, now: float) -> bool:
        slot_left = bool(self._free_slots) or self._fresh_slot < self._plan.num_slots
        return slot_left and self._space.num_blocks < self._plan.max_blocks and now >= self._grow_after

    def grown(self, now: float, failed: bool) -> None:
        self._space.grow(self._allocated_blocks)
        if failed:
            self._grow_after = now + GROW_AGAIN_S

    def erase(self, record: Record) -> None:
        self._erasures.append(record.slot)

    def free(self, record: Record) -> None:
        self._space.give(record.extents)
        self._free_slots.append(record.slot)

    # -- I/O, in worker threads -------------------------------------------------------------------------------------

    def grow(self) -> None:
        """Reserve the next step of the slab, a smaller one where the disk is nearly full."""
        step = min(self._plan.step_blocks, self._plan.max_blocks - self._allocated_blocks)
        while True:
            try:
                at = self._allocated_blocks * BLOCK_BYTES
                self._files.allocate(self._at.slab, at, step * BLOCK_BYTES)
                self._allocated_blocks += step
                return
            except OSError as error:
                if error.errno != errno.ENOSPC or step <= _LEAST_STEP_BLOCKS:
                    raise
                step //= 2

    def flush(self) -> None:
        with self._table_lock:
            self._erase_queued()

    def write(self, record: Record, block: memoryview, parts: Sequence[memoryview]) -> None:
        """Erasures, payload, entry. No copy of a single part that lies on whole pages (but of the rest of its last
        one); else one if there are parts. With `durable` synced before the entry, and after."""
        self.flush()
        value = in_place(parts)
        if value is None:
            record.digest = stage(block, parts, record.num_bytes)
            self._write_payload(record, block[: blocks_of(record.num_bytes) * BLOCK_BYTES], NOTHING)
        else:
            whole = len(value) // BLOCK_BYTES * BLOCK_BYTES
            rest = block[: blocks_of(len(value)) * BLOCK_BYTES - whole]
            stage(rest, [value[whole:]], len(value) - whole)
            record.digest = digest(value)
            self._write_payload(record, value[:whole], rest)
        if self._durable:
            self._sync_slab.sync()
        self._write_entry(record)
        if self._durable:
            self._sync_table.sync()

    def read(self, record: Record, block: memoryview) -> None:
        for offset, piece in _pieces(record, block):
            read_all(self._files, self._at.slab, piece, offset)
        if digest(block[: record.num_bytes]) != record.digest:
            raise DamagedError("corrupt")

    def update(self, record: Record) -> None:
        self._write_entry(record)

    # -- steps ------------------------------------------------------------------------------------------------------

    def _begin(self, found: Recovered, num_blocks: int) -> None:
        self._damage = {"entry": found.damaged, "dropped": found.dropped}
        self._erasures.clear()
        self._allocated_blocks = num_blocks
        self._space = Space(num_blocks, (extent for record in found.records for extent in record.extents))
        used = {record.slot for record in found.records}
        self._fresh_slot = max(used, default=-1) + 1
        self._free_slots = [slot for slot in range(self._fresh_slot) if slot not in used]
        self._generation = found.last_generation

    def _read_table(self) -> Iterator[tuple[int, Record | None]]:
        num_slots = (self._files.size(self._at.table) - HEADER_BYTES) // ENTRY_BYTES
        for first in range(0, num_slots, _LOAD_SLOTS):
            raw = memoryview(bytearray(min(_LOAD_SLOTS, num_slots - first) * ENTRY_BYTES))
            read_all(self._files, self._at.table, raw, slot_offset(first))
            yield from unpack_entries(raw, first)

    def _write_payload(self, record: Record, body: memoryview, rest: memoryview) -> None:
        """Whole blocks: those of `body`, then that of `rest`, which is none or one."""
        at = 0
        for start, count in record.extents:
            piece = body[at : at + count * BLOCK_BYTES]
            at += count * BLOCK_BYTES
            write_all(self._files, self._at.slab, piece, start * BLOCK_BYTES, rest if at > len(body) else NOTHING)

    def _write_entry(self, record: Record) -> None:
        with self._table_lock:
            if not record.dead:
                write_all(self._files, self._at.table, memoryview(pack_entry(record)), slot_offset(record.slot))

    def _erase_queued(self) -> None:
        while self._erasures:
            write_all(self._files, self._at.table, memoryview(_FREE_SLOT), slot_offset(self._erasures[0]))
            self._erasures.popleft()


def _pieces(record: Record, block: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Where each extent is in the slab, and its part of the buffer."""
    at = 0
    for start, count in record.extents:
        size = count * BLOCK_BYTES
        yield start * BLOCK_BYTES, block[at : at + size]
        at += size
