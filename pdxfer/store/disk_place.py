"""The files of one directory of the disk tier: made, locked, checked, sized. Used by disk_slab.py.

Never writes into a filesystem that was not the one first opened: when a mount is gone the directory below it is left
alone, and the tier waits for the mount.
"""

import errno
import mmap
import os
from dataclasses import dataclass

from pdxfer.core.errors import ConfigError
from pdxfer.store.disk_files import FileLayer, open_slab, read_all, write_all
from pdxfer.store.disk_lock import take_lock
from pdxfer.store.disk_table import (
    BLOCK_BYTES,
    ENTRY_BYTES,
    HEADER_BYTES,
    MAX_BLOCKS,
    NotATableError,
    check_header,
    pack_header,
)

_MIN_SLOTS = 64
_LEAST_BYTES = 1 << 20
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

    def _begin_table(self, plan: SlabPlan) -> None:
        size = self._files.size(self.table)
        head = bytearray(min(size, HEADER_BYTES))
        read_all(self._files, self.table, memoryview(head), 0)
        try:
            begun = check_header(bytes(head), self._name("table"))
        except NotATableError as error:
            raise ConfigError(
                f"disk tier: {self._name('table')} is not the table of a disk tier (starts with {bytes(head[:8])!r});"
                " give store.tiers[].url a directory of its own"
            ) from error
        if size < plan.table_bytes:
            self._files.allocate(self.table, size, plan.table_bytes - size)
        if not begun:
            write_all(self._files, self.table, memoryview(pack_header()), 0)
