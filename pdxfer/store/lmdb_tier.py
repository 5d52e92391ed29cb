"""The tier `lmdb:///DIR`: values in one LMDB environment, for who has LMDB tooling; the default is `file://`.

A value is kept in pieces of 16 pages each, all of one size, so that freed pieces fit again (LMDB needs contiguous
pages). Map size = capacity. LMDB reads through a memory map: a disk that fails under it ends the process (SIGBUS).
"""

import errno
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import lmdb
import numpy as np

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import Clock
from pdxfer.core.errors import ConfigError
from pdxfer.store.disk_index import TENANT_BYTES, Record
from pdxfer.store.disk_local import LocalTier
from pdxfer.store.disk_medium import DamagedError
from pdxfer.store.disk_options import read_file_options
from pdxfer.store.disk_paged import FORMAT, PAGE_BYTES, PagedMedium, check_format, data_bytes

_PIECE_BYTES = PAGE_BYTES - 16
"""LMDB's page header is in the first of a run of pages."""
_FACTS = struct.Struct(f"<QQddQ{TENANT_BYTES}s")
_FORMAT_KEY = b"format"
_OVERHEAD_BYTES = 4 * 4096
_SPARE_PAGES = 16
"""For the tree, and for pages freed by the last transactions, which LMDB does not reuse yet."""


class LmdbTier(LocalTier):
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
            "lmdb",
            LmdbMedium(options.path, options.capacity_bytes, durable=options.durable),
            config,
            clock,
            capacity_bytes=options.capacity_bytes,
            buffer_bytes=options.buffer_bytes,
            tenant_quota=tenant_quota or {},
            pin_fraction=pin_fraction,
        )


class LmdbMedium(PagedMedium):
    """One environment of two databases: facts by key, pieces by key and number."""

    kind = "lmdb"

    def __init__(self, path: str, capacity_bytes: int, *, durable: bool) -> None:
        self._map_bytes = data_bytes(capacity_bytes, _OVERHEAD_BYTES)
        pages = self._map_bytes // PAGE_BYTES
        super().__init__(
            os.path.join(path, "data.mdb"),
            os.path.join(path, "pdxfer.lock"),
            capacity_bytes=capacity_bytes,
            file_bytes=self._map_bytes,
            num_pages=pages - pages // 32 - _SPARE_PAGES,
            piece_bytes=_PIECE_BYTES,
        )
        self._path = path
        self._durable = durable
        self._env: lmdb.Environment | None = None

    def _open(self) -> list[Record]:
        with _translated(self._path):
            self._env = lmdb.open(
                self._path,
                map_size=self._map_bytes,
                max_dbs=2,
                metasync=self._durable,
                readahead=False,
                meminit=False,
                mode=0o600,
            )
            self._facts, self._pieces = self._env.open_db(b"facts"), self._env.open_db(b"pieces")
            with self._env.begin(write=True, db=self._facts) as txn:
                found = txn.get(_FORMAT_KEY)
                if found is None:
                    txn.put(_FORMAT_KEY, struct.pack("<I", FORMAT))
                else:
                    check_format(struct.unpack("<I", found)[0], self._data_path, self.kind)
                return [_unpack(key, value) for key, value in txn.cursor() if key != _FORMAT_KEY]

    def _close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _put(self, record: Record, view: memoryview) -> None:
        with _translated(self._path):
            try:
                self._put_once(record, view)
            except lmdb.MapFullError:
                self._age()
                self._put_once(record, view)

    def _put_once(self, record: Record, view: memoryview) -> None:
        assert self._env is not None
        with self._env.begin(write=True, db=self._pieces) as txn:
            for key, start in _pieces(record):
                piece = view[start : start + _PIECE_BYTES]
                txn.put(key, piece if len(piece) == _PIECE_BYTES else bytes(piece).ljust(_PIECE_BYTES, b"\0"))
            txn.put(record.key, _pack(record), db=self._facts)

    def _age(self) -> None:
        """LMDB reuses pages two transactions after the one that freed them."""
        assert self._env is not None
        for _ in range(2):
            with _translated(self._path), self._env.begin(write=True, db=self._facts) as txn:
                txn.put(_FORMAT_KEY, struct.pack("<I", FORMAT))

    def _get(self, record: Record, view: memoryview) -> None:
        assert self._env is not None
        target = np.frombuffer(view, dtype=np.uint8)
        with _translated(self._path), self._env.begin(db=self._pieces, buffers=True) as txn:
            for key, start in _pieces(record):
                piece = txn.get(key)
                if piece is None or len(piece) != _PIECE_BYTES:
                    raise DamagedError("short")
                part = target[start : start + _PIECE_BYTES]
                np.copyto(part, np.frombuffer(piece, dtype=np.uint8)[: len(part)])

    def _erase(self, records: Sequence[Record]) -> None:
        assert self._env is not None
        with _translated(self._path), self._env.begin(write=True, db=self._pieces) as txn:
            for record in records:
                txn.delete(record.key, db=self._facts)
                for key, _start in _pieces(record):
                    txn.delete(key)

    def _set_pin(self, record: Record) -> None:
        assert self._env is not None
        with _translated(self._path), self._env.begin(write=True, db=self._facts) as txn:
            txn.put(record.key, _pack(record))


def _pieces(record: Record) -> Iterator[tuple[bytes, int]]:
    """Key of each piece, and where it begins in the value."""
    for number, start in enumerate(range(0, record.num_bytes, _PIECE_BYTES)):
        yield record.key + struct.pack(">I", number), start


def _pack(record: Record) -> bytes:
    return _FACTS.pack(
        record.generation,
        record.num_bytes,
        record.created_wall,
        record.pin_until,
        record.digest,
        record.tenant.encode(),
    )


def _unpack(key: bytes, facts: bytes) -> Record:
    generation, num_bytes, created, pin, digest, tenant = _FACTS.unpack(facts)
    return Record(
        key=key,
        num_bytes=num_bytes,
        created_wall=created,
        pin_until=pin,
        digest=digest,
        generation=generation,
        tenant=tenant.rstrip(b"\0").decode(),
    )


@contextmanager
def _translated(path: str) -> Iterator[None]:
    """LMDB's errors as OSError, or ConfigError where the file is not LMDB's."""
    try:
        yield
    except (lmdb.InvalidError, lmdb.VersionMismatchError) as error:
        raise ConfigError(f"lmdb tier: {path} is not an LMDB environment this library reads: {error}") from error
    except lmdb.MapFullError as error:
        raise OSError(errno.ENOSPC, str(error)) from error
    except lmdb.Error as error:
        raise OSError(errno.EIO, str(error)) from error
