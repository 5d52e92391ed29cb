"""The tiers `nixl-posix:///DIR`, `nixl-gds:`, `nixl-gds-mt:`, `nixl-obj:`: values moved by NIXL's storage plug-ins.

    DIR/pdxfer.format  version;  DIR/pdxfer.lock  flock of the one process;  DIR/KEY-GENERATION  header page, payload
    (nixl-obj: header page only, the payload is the object PREFIX + KEY-GENERATION);  *.tmp  being written

A put writes header and payload under the temporary name and renames. POSIX and OBJ are tested for real; GDS and GDS_MT
against a fake agent only: UNTESTED ON HARDWARE.
"""

import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import Clock
from pdxfer.store.disk_files import digest, stage, write_all
from pdxfer.store.disk_index import Record
from pdxfer.store.disk_local import LocalTier
from pdxfer.store.disk_medium import DamagedError
from pdxfer.store.disk_paged import FORMAT, PAGE_BYTES, PagedMedium, check_format, data_bytes
from pdxfer.store.remote.nixl_gpu import GpuStaging
from pdxfer.store.remote.nixl_header import HEADER_BYTES, name_of, pack_header, unpack_header
from pdxfer.store.remote.nixl_mover import InPlace, Mover, Plugin, Staging, StorageAgent
from pdxfer.store.remote.nixl_options import NixlOptions, read_nixl_options
from pdxfer.store.remote.nixl_payload import FilePayload, ObjectPayload, Payload

TEMPORARY = ".tmp"
_NAME = re.compile(r"[0-9a-f]{64}-[0-9a-f]{16}")
_VERSION = struct.Struct("<I")
_PIECE_BYTES = PAGE_BYTES - 2 * HEADER_BYTES
"""Of a value in a page, less its header and what the directory needs for it."""
_OVERHEAD_BYTES = 4 * 4096


class NixlStorageTier(LocalTier):
    """Implements base.Tier."""

    def __init__(
        self,
        config: TierConfig,
        clock: Clock,
        *,
        tenant_quota: Mapping[str, int] | None = None,
        pin_fraction: float = 0.5,
        new_agent: Callable[[Plugin], StorageAgent] | None = None,
        staging: Staging | None = None,
    ) -> None:
        """`new_agent` and `staging`: for tests."""
        options = read_nixl_options(config)
        if staging is None:
            staging = GpuStaging(options.device) if options.plugin.memory == "VRAM" else InPlace()
        mover = Mover(options.plugin, staging, new_agent=new_agent)
        super().__init__(
            options.kind,
            NixlMedium(options, mover),
            config,
            clock,
            capacity_bytes=options.capacity_bytes,
            buffer_bytes=options.buffer_bytes,
            tenant_quota=tenant_quota or {},
            pin_fraction=pin_fraction,
        )


class NixlMedium(PagedMedium):
    """One directory, a file a value; used by one thread at a time."""

    def __init__(self, options: NixlOptions, mover: Mover) -> None:
        self.kind = options.kind
        super().__init__(
            os.path.join(options.directory, "pdxfer.format"),
            os.path.join(options.directory, "pdxfer.lock"),
            capacity_bytes=options.capacity_bytes,
            file_bytes=4096,
            num_pages=data_bytes(options.capacity_bytes, _OVERHEAD_BYTES) // PAGE_BYTES,
            piece_bytes=_PIECE_BYTES,
        )
        self._directory = options.directory
        self._durable = options.durable
        self._mover = mover
        self._payload: Payload = (
            ObjectPayload(mover, options.prefix)
            if options.plugin.storage == "OBJ"
            else FilePayload(mover, self._files, direct=options.direct)
        )
        self._damage: dict[str, int] = {}

    def take_damage(self) -> dict[str, int]:
        damage, self._damage = self._damage, {}
        return damage

    def write(self, record: Record, block: memoryview, parts: Sequence[memoryview]) -> None:
        self.flush()
        record.digest = stage(block, parts, record.num_bytes)
        name = name_of(record)
        path = self._path(name)
        fd = self._files.open(path + TEMPORARY, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            self._files.allocate(fd, 0, self._payload.file_bytes(record.num_bytes))
            write_all(self._files, fd, memoryview(pack_header(record)), 0)
            self._payload.write(path + TEMPORARY, name, block, record.num_bytes)
            if self._durable:
                self._files.sync(fd)
        finally:
            self._files.close(fd)
        os.rename(path + TEMPORARY, path)
        if self._durable:
            self._sync_directory()

    def read(self, record: Record, block: memoryview) -> None:
        name = name_of(record)
        self._payload.read(self._path(name), name, block, record.num_bytes)
        if digest(block[: record.num_bytes]) != record.digest:
            raise DamagedError("corrupt")

    # -- for PagedMedium ----------------------------------------------------------------------------------------------

    def _open(self) -> list[Record]:
        """Headers of all files; unfinished and damaged ones go. The newest of a key counts."""
        self._check_format()
        self._mover.open()
        newest: dict[bytes, Record] = {}
        names = set(os.listdir(self._directory))
        for name in sorted(names, key=lambda name: name.rpartition("-")[2]):
            if not _NAME.fullmatch(name):
                self._remove_unfinished(name, names)
            elif (record := self._found(name)) is None:
                self._discard(name)
            else:
                if record.key in newest:
                    self._discard(name_of(newest[record.key]))
                newest[record.key] = record
        return list(newest.values())

    def _close(self) -> None:
        self._mover.close()

    def _erase(self, records: Sequence[Record]) -> None:
        for record in records:
            self._discard(name_of(record))
        if self._durable:
            self._sync_directory()

    def _set_pin(self, record: Record) -> None:
        """In place: a power cut in the middle loses the value."""
        try:
            fd = self._files.open(self._path(name_of(record)), os.O_WRONLY)
        except FileNotFoundError:
            return  # erased meanwhile
        try:
            write_all(self._files, fd, memoryview(pack_header(record)), 0)
            if self._durable:
                self._files.sync(fd)
        finally:
            self._files.close(fd)

    def _pages(self, record: Record) -> int:
        """A value of no bytes has a header, too."""
        return max(1, super()._pages(record))

    # -- steps ------------------------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def _check_format(self) -> None:
        fd = self._files.open(self._data_path, os.O_RDWR | os.O_CREAT)
        try:
            begun = os.pread(fd, _VERSION.size, 0)
            if any(begun):
                check_format(_VERSION.unpack(begun)[0], self._data_path, self.kind)
            write_all(self._files, fd, memoryview(_VERSION.pack(FORMAT)), 0)
        finally:
            self._files.close(fd)

    def _remove_unfinished(self, name: str, names: set[str]) -> None:
        """What a kill left of a put. Files that are not ours stay."""
        final = name.removesuffix(TEMPORARY)
        if final != name and _NAME.fullmatch(final):
            if final in names:
                os.unlink(self._path(name))
            else:
                self._discard(final)

    def _found(self, name: str) -> Record | None:
        """The value of this file, if its header and length are right; else counted."""
        fd = self._files.open(self._path(name), os.O_RDONLY)
        try:
            record = unpack_header(os.pread(fd, HEADER_BYTES, 0))
            if record is None or name_of(record) != name:
                reason = "corrupt"
            elif self._files.size(fd) != self._payload.file_bytes(record.num_bytes):
                reason = "short"
            else:
                return record
        finally:
            self._files.close(fd)
        self._damage[reason] = self._damage.get(reason, 0) + 1
        return None

    def _discard(self, name: str) -> None:
        """The payload first: what a crash leaves of it is found again by the file."""
        self._payload.erase(name)
        for path in (self._path(name), self._path(name + TEMPORARY)):
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass  # it was never finished, or somebody else removed it

    def _sync_directory(self) -> None:
        fd = self._files.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            self._files.close(fd)
