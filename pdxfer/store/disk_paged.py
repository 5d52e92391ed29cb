"""What the small media, LMDB and SQLite, have in common: a lock, a budget of pages, a queue of erasures. A Medium.

The library does the rest (crash safety, free pages), one call at a time; values still carry a digest. Subclasses store,
load and erase by key.
"""

import errno
import os
import threading
from collections.abc import Sequence

from pdxfer.core.errors import ConfigError
from pdxfer.store.disk_files import FileLayer, OsFiles, digest, stage
from pdxfer.store.disk_index import Record
from pdxfer.store.disk_lock import take_lock
from pdxfer.store.disk_medium import DamagedError

FORMAT = 1
"""Of what we keep in the library's file. 1: first (2026-11-29)."""
PAGE_BYTES = 1 << 16
"""Room of a value is given out in these."""
LEAST_BYTES = 4 << 20
_USER_ERRORS = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)


class PagedMedium:
    """Base of LmdbMedium and SqliteMedium. The file is allocated whole at open: a file that grows by delayed allocation
    shows more blocks than it has for a moment, and fails in the middle when the disk is full."""

    kind = ""
    threads = 1
    unit_bytes = PAGE_BYTES

    def __init__(
        self,
        data_path: str,
        lock_path: str,
        *,
        capacity_bytes: int,
        file_bytes: int,
        num_pages: int,
        piece_bytes: int,
    ) -> None:
        if capacity_bytes < LEAST_BYTES:
            raise ConfigError(
                f"{self.kind} tier: {data_path} gets {capacity_bytes} B; give store.tiers[].capacity_gib at least"
                f" {LEAST_BYTES / (1 << 30):.4f}"
            )
        self.room_bytes = num_pages * piece_bytes
        self._file_bytes = file_bytes
        self._data_path = data_path
        self._lock_path = lock_path
        self._num_pages = self._free_pages = num_pages
        self._piece_bytes = piece_bytes
        self._files: FileLayer = OsFiles()
        self._lock = self._data = -1
        self._generation = 0
        self._erasures: list[Record] = []
        self._erasures_lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._data_path} free={self._free_pages}/{self._num_pages} pages>"

    # -- Medium -----------------------------------------------------------------------------------------------------

    def open(self) -> list[Record]:
        """Lock, open, tell what is there and fits."""
        try:
            os.makedirs(os.path.dirname(self._lock_path), mode=0o700, exist_ok=True)
            self._lock = take_lock(self._files, self._lock_path, self._data_path, self.kind)
            records = sorted(self._open(), key=lambda record: record.generation)
            self._data = self._files.open(self._data_path, os.O_RDWR)
            self._files.allocate(self._data, 0, self._file_bytes)
        except OSError as error:
            self.close()
            if error.errno in _USER_ERRORS:
                raise ConfigError(
                    f"{self.kind} tier: {self._data_path} cannot be used: {error}; give store.tiers[].url a place that"
                    " this user may write"
                ) from error
            raise
        except ConfigError:
            self.close()
            raise
        return self._admit(records)

    def take_damage(self) -> dict[str, int]:
        return {}

    def check(self) -> None:
        if not self._files.same(self._data, self._data_path):
            raise OSError(errno.ENOENT, f"{self._data_path} is not the file any more that was opened")

    def close(self) -> None:
        self._close()
        for fd in (self._data, self._lock):
            if fd >= 0:
                self._files.close(fd)
        self._data = self._lock = -1

    def place(self, record: Record) -> bool:
        pages = self._pages(record)
        if pages > self._free_pages:
            return False
        self._free_pages -= pages
        self._generation += 1
        record.generation = self._generation
        return True

    def may_grow(self, now: float) -> bool:
        return False

    def grow(self) -> None:
        raise NotImplementedError

    def grown(self, now: float, failed: bool) -> None:
        raise NotImplementedError

    def erase(self, record: Record) -> None:
        with self._erasures_lock:
            self._erasures.append(record)

    def free(self, record: Record) -> None:
        self._free_pages += self._pages(record)

    def flush(self) -> None:
        with self._erasures_lock:
            erasures, self._erasures = self._erasures, []
        try:
            if erasures:
                self._erase(erasures)
        except OSError:
            with self._erasures_lock:
                self._erasures = erasures + self._erasures
            raise

    def write(self, record: Record, block: memoryview, parts: Sequence[memoryview]) -> None:
        self.flush()
        record.digest = stage(block, parts, record.num_bytes)
        self._put(record, block[: record.num_bytes])

    def read(self, record: Record, block: memoryview) -> None:
        view = block[: record.num_bytes]
        self._get(record, view)
        if digest(view) != record.digest:
            raise DamagedError("corrupt")

    def update(self, record: Record) -> None:
        if not record.dead:
            self._set_pin(record)

    # -- for subclasses ---------------------------------------------------------------------------------------------

    def _open(self) -> list[Record]:
        """Open the library's file (empty: begin it) and list what is in it."""
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError

    def _put(self, record: Record, view: memoryview) -> None:
        """Store value and facts in one transaction."""
        raise NotImplementedError

    def _get(self, record: Record, view: memoryview) -> None:
        """Fill `view`. DamagedError("short") if the length is another."""
        raise NotImplementedError

    def _erase(self, records: Sequence[Record]) -> None:
        raise NotImplementedError

    def _set_pin(self, record: Record) -> None:
        raise NotImplementedError

    # -- steps ------------------------------------------------------------------------------------------------------

    def _pages(self, record: Record) -> int:
        return -(-record.num_bytes // self._piece_bytes)

    def _admit(self, records: list[Record]) -> list[Record]:
        """The newest that fit the capacity (it may have been made smaller); the others are erased with the next put."""
        self._free_pages, self._erasures = self._num_pages, []
        self._generation = records[-1].generation if records else 0
        kept: list[Record] = []
        for record in reversed(records):
            if self._pages(record) <= self._free_pages:
                self._free_pages -= self._pages(record)
                kept.append(record)
            else:
                self._erasures.append(record)
        return kept[::-1]


def check_format(found: int, path: str, kind: str) -> None:
    """ConfigError for another version."""
    if found != FORMAT:
        raise ConfigError(
            f"{kind} tier: {path} has format version {found}; this pdxfer reads version {FORMAT}: use the pdxfer that"
            " wrote it, or another place in store.tiers[].url"
        )


def data_bytes(capacity_bytes: int, overhead_bytes: int) -> int:
    """What the library's file may grow to: the capacity less lock files, directory and the filesystem's own blocks."""
    return (capacity_bytes - overhead_bytes - (64 << 10) - capacity_bytes // 512) // PAGE_BYTES * PAGE_BYTES
