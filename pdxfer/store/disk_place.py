"""The files of one directory of the disk tier: made, locked, checked, sized. Used by disk_slab.py.

Never writes into a filesystem that was not the one first opened: when a mount is gone the directory below it is left
alone, and the tier waits for the mount.
"""

import errno
import logging
import mmap
import os
from dataclasses import dataclass

import numpy as np

from pdxfer.core.errors import ConfigError
from pdxfer.store.disk_files import FileLayer, open_slab, read_all, write_all
from pdxfer.store.disk_lock import take_lock
from pdxfer.store.disk_table import (
    BLOCK_BYTES,
    ENTRY_BYTES,
    HEADER_BYTES,
    MAX_BLOCKS,
    check_header,
    has_entry,
    has_magic,
    pack_header,
    slot_offset,
)

log = logging.getLogger(__name__)

_MIN_SLOTS = 64
_LEAST_BYTES = 1 << 20
_SCAN_SLOTS = 1 << 14
_DIRECTORY_AND_LOCK_BYTES = 2 * 4096
_USER_ERRORS = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabPlan:
    """How a capacity is divided. Everything that `du` counts is inside."""

    num_slots: int
    max_blocks: int
    step_blocks: int
    """The slab grows by this."""

    @property
    def table_bytes(self) -> int:
        """Length of the table file: whole blocks."""
        return -(-(HEADER_BYTES + self.num_slots * ENTRY_BYTES) // BLOCK_BYTES) * BLOCK_BYTES


def plan_slab(path: str, capacity_bytes: int, value_bytes: int) -> SlabPlan:
    """Divide: a slot for each `value_bytes`; 1/512 and 16 KiB for the filesystem's own blocks; the rest is slab."""
    if capacity_bytes < _LEAST_BYTES:
        raise ConfigError(
            f"disk tier: {path} gets {capacity_bytes} B, of which nothing is left for values; give store.tiers[]."
            f"capacity_gib at least {_LEAST_BYTES / (1 << 30):.4f} for each directory"
        )
    num_slots = max(_MIN_SLOTS, capacity_bytes // value_bytes)
    plan = SlabPlan(num_slots=num_slots, max_blocks=0, step_blocks=0)
    left = capacity_bytes - plan.table_bytes - _DIRECTORY_AND_LOCK_BYTES - 4 * 4096 - capacity_bytes // 512
    max_blocks = left // BLOCK_BYTES
    if max_blocks >= MAX_BLOCKS:
        raise ConfigError(
            f"disk tier: {path} gets {capacity_bytes / (1 << 40):.1f} TiB; the limit of one directory is 16 TiB: name"
            " several, separated by commas, in store.tiers[].url"
        )
    step = max(256, min(max_blocks // 16, (256 << 20) // BLOCK_BYTES))
    return SlabPlan(num_slots=num_slots, max_blocks=max_blocks, step_blocks=step)


class SlabFiles:
    """Descriptors of one directory, open between `open` and `close`."""

    def __init__(self, path: str, files: FileLayer, *, direct: bool) -> None:
        self.path = path
        self.direct = False
        self.table = self.slab = -1
        self._files = files
        self._want_direct = direct
        self._lock = -1
        self._device: int | None = None

    def open(self, plan: SlabPlan) -> None:
        """Make what is missing, take the lock, give the table its length. ConfigError, or OSError to try again."""
        try:
            self._make_directory()
            self._refuse_foreign_slab()
            self._lock = take_lock(self._files, self._name("lock"), self.path, "disk")
            self.table = self._files.open(self._name("table"), os.O_RDWR | os.O_CREAT)
            self._begin_table(plan)
            scratch = mmap.mmap(-1, BLOCK_BYTES)
            self.slab, self.direct = open_slab(self._files, self._name("slab"), self._want_direct, memoryview(scratch))
            self._device = os.stat(self.path).st_dev
        except OSError as error:
            self.close()
            if error.errno in _USER_ERRORS and self._device is None:
                raise ConfigError(
                    f"disk tier: {self.path} cannot be used: {error}; give store.tiers[].url a directory that this"
                    " user may write"
                ) from error
            raise
        except ConfigError:
            self.close()
            raise

    def check(self) -> None:
        """OSError ENOENT unless the names still lead to the files that are open."""
        for fd, name in ((self.table, "table"), (self.slab, "slab"), (self._lock, "lock")):
            if not self._files.same(fd, self._name(name)):
                raise OSError(errno.ENOENT, f"{self._name(name)} is not the file any more that was opened")

    def close(self) -> None:
        """Also gives up the lock. Idempotent."""
        for fd in (self.slab, self.table, self._lock):
            if fd >= 0:
                self._files.close(fd)
        self.slab = self.table = self._lock = -1

    def _name(self, name: str) -> str:
        return os.path.join(self.path, name)

    def _make_directory(self) -> None:
        if self._device is not None and not os.path.exists(self._name("table")):
            nearest = self.path if os.path.isdir(self.path) else os.path.dirname(self.path)
            if os.stat(nearest).st_dev != self._device:
                raise OSError(errno.ENODEV, f"{self.path} is not on the filesystem any more where it was opened")
        os.makedirs(self.path, mode=0o700, exist_ok=True)

    def _refuse_foreign_slab(self) -> None:
        """A slab has no mark of its own; ours is never without the lock, which is made first."""
        if os.path.exists(self._name("table")) or os.path.exists(self._name("lock")):
            return
        if os.path.exists(self._name("slab")) and os.path.getsize(self._name("slab")):
            raise ConfigError(
                f"disk tier: {self._name('slab')} is not the slab of a disk tier (there is no table beside it); give"
                " store.tiers[].url a directory of its own"
            )

    def _begin_table(self, plan: SlabPlan) -> None:
        """A damaged header of ours is written again: entries have checks of their own, so whole ones still count."""
        size = self._files.size(self.table)
        head = bytearray(min(size, HEADER_BYTES))
        read_all(self._files, self.table, memoryview(head), 0)
        is_whole = check_header(bytes(head), self._name("table"))
        if not is_whole and not self._is_our_table(bytes(head), size):
            raise ConfigError(
                f"disk tier: {self._name('table')} is not the table of a disk tier; give store.tiers[].url a directory"
                " of its own"
            )
        if size < plan.table_bytes:
            self._files.allocate(self.table, size, plan.table_bytes - size)
        if not is_whole:
            if any(head):
                log.warning(
                    "disk tier: the header of %s is damaged (starts with %r) and is written again; values whose"
                    " entries are damaged too are misses",
                    self._name("table"),
                    bytes(head[:8]),
                )
            write_all(self._files, self.table, memoryview(pack_header()), 0)

    def _is_our_table(self, head: bytes, size: int) -> bool:
        """Of a file without a whole header: begun and empty, or damaged. Only zeros, our magic or a whole entry."""
        if has_magic(head):
            return True
        has_zeros_only = not any(head)
        for first in range(0, (size - HEADER_BYTES) // ENTRY_BYTES, _SCAN_SLOTS):
            num_slots = min(_SCAN_SLOTS, (size - HEADER_BYTES) // ENTRY_BYTES - first)
            raw = memoryview(bytearray(num_slots * ENTRY_BYTES))
            read_all(self._files, self.table, raw, slot_offset(first))
            if has_entry(raw, first):
                return True
            has_zeros_only = has_zeros_only and not np.frombuffer(raw, dtype=np.uint64).any()
        return has_zeros_only
