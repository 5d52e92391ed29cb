"""The tier `sqlite:///FILE`: values as blobs of one SQLite file, for small stores without any extra library.

Rollback journal, not WAL: blobs go to fresh or free pages, which the journal does not copy, so it stays small and the
capacity is kept at all times (a WAL would hold every value twice). How to compare with `file://`: docs/disk.md.
"""

import errno
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import Clock
from pdxfer.core.errors import ConfigError
from pdxfer.store.disk_index import Record
from pdxfer.store.disk_local import LocalTier
from pdxfer.store.disk_medium import DamagedError
from pdxfer.store.disk_options import read_file_options
from pdxfer.store.disk_paged import FORMAT, PAGE_BYTES, PagedMedium, check_format, data_bytes

_PIECE_BYTES = PAGE_BYTES - 1024
"""Of a value in a page, less what the chain and the row need."""
_JOURNAL_PAGES = 24
"""Kept free for the rollback journal: the pages of tree and free list that one transaction changes."""
_ERASE_AT_ONCE = 8
"""Values a transaction: bounds the journal."""
_TREE_PAGES = 8
_MAX_BLOB_BYTES = 900_000_000

_SCHEMA = """CREATE TABLE IF NOT EXISTS kv (
    key BLOB PRIMARY KEY, generation INTEGER, num_bytes INTEGER, created_wall REAL, pin_until REAL, digest BLOB,
    tenant TEXT, value BLOB)"""


class SqliteTier(LocalTier):
    """Implements base.Tier."""

    def __init__(
        self,
        config: TierConfig,
        clock: Clock,
        *,
        tenant_quota: Mapping[str, int] | None = None,
        pin_fraction: float = 0.5,
    ) -> None:
        options = read_file_options(config)
        super().__init__(
            "sqlite",
            SqliteMedium(options.path, options.capacity_bytes, durable=options.durable),
            config,
            clock,
            capacity_bytes=options.capacity_bytes,
            buffer_bytes=options.buffer_bytes,
            tenant_quota=tenant_quota or {},
            pin_fraction=pin_fraction,
        )


class SqliteMedium(PagedMedium):
    """One file; used by one thread at a time."""

    kind = "sqlite"

    def __init__(self, path: str, capacity_bytes: int, *, durable: bool) -> None:
        self._file_pages = data_bytes(capacity_bytes, 4 * 4096) // PAGE_BYTES - _JOURNAL_PAGES
        super().__init__(
            path,
            path + ".lock",
            capacity_bytes=capacity_bytes,
            file_bytes=self._file_pages * PAGE_BYTES,
            num_pages=self._file_pages - _TREE_PAGES,
            piece_bytes=_PIECE_BYTES,
        )
        self.room_bytes = min(self.room_bytes, _MAX_BLOB_BYTES)
        self._durable = durable
        self._db: sqlite3.Connection | None = None

    def _open(self) -> list[Record]:
        with _translated(self._data_path):
            self._db = db = sqlite3.connect(self._data_path, isolation_level=None, check_same_thread=False)
            begun = db.execute("PRAGMA user_version").fetchone()[0]
            if begun:
                check_format(begun, self._data_path, self.kind)
            db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            db.execute("PRAGMA journal_mode = TRUNCATE")
            db.execute(f"PRAGMA synchronous = {'FULL' if self._durable else 'NORMAL'}")
            db.execute(f"PRAGMA max_page_count = {self._file_pages}")
            db.execute("PRAGMA secure_delete = OFF")  # or every freed page goes through the journal
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute(_SCHEMA)
            db.execute(f"PRAGMA user_version = {FORMAT}")
            rows = db.execute("SELECT key, generation, num_bytes, created_wall, pin_until, digest, tenant FROM kv")
            return [_record(*row) for row in rows]

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _put(self, record: Record, view: memoryview) -> None:
        self._run(
            "INSERT INTO kv VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                record.key,
                record.generation,
                record.num_bytes,
                record.created_wall,
                record.pin_until,
                record.digest.to_bytes(8, "little"),
                record.tenant,
                view,
            ),
        )

    def _get(self, record: Record, view: memoryview) -> None:
        assert self._db is not None
        with _translated(self._data_path):
            row = self._db.execute("SELECT value FROM kv WHERE key = ?", (record.key,)).fetchone()
        if row is None or len(row[0]) != len(view):
            raise DamagedError("short")
        view[:] = row[0]

    def _erase(self, records: Sequence[Record]) -> None:
        assert self._db is not None
        with _translated(self._data_path):
            for start in range(0, len(records), _ERASE_AT_ONCE):
                keys = [record.key for record in records[start : start + _ERASE_AT_ONCE]]
                self._db.execute(f"DELETE FROM kv WHERE key IN ({', '.join('?' * len(keys))})", keys)

    def _set_pin(self, record: Record) -> None:
        self._run("UPDATE kv SET pin_until = ? WHERE key = ?", (record.pin_until, record.key))

    def _run(self, statement: str, values: Sequence[object]) -> None:
        assert self._db is not None
        with _translated(self._data_path):
            self._db.execute(statement, tuple(values))


def _record(
    key: bytes, generation: int, num_bytes: int, created: float, pin: float, digest: bytes, tenant: str
) -> Record:
    return Record(
        key=key,
        num_bytes=num_bytes,
        tenant=tenant,
        created_wall=created,
        pin_until=pin,
        digest=int.from_bytes(digest, "little"),
        generation=generation,
    )


@contextmanager
def _translated(path: str) -> Iterator[None]:
    """SQLite's errors as OSError, or ConfigError where the file is not SQLite's."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_NOTADB:
            raise ConfigError(
                f"sqlite tier: {path} is not an SQLite file; name another in store.tiers[].url"
            ) from error
        raise OSError(errno.ENOSPC if code == sqlite3.SQLITE_FULL else errno.EIO, f"{path}: {error}") from error
