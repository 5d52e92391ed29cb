"""Where the bytes of a NIXL tier's value lie: in its file after the header page, or in an object of their own.

Used by nixl_storage.py in its worker thread. `name` is the value's, unique for all time; `path` the file that has its
header.
"""

import errno
import os
from typing import Protocol

from pdxfer.store.disk_files import ALIGNMENT, FileLayer
from pdxfer.store.disk_medium import DamagedError
from pdxfer.store.remote.nixl_header import HEADER_BYTES
from pdxfer.store.remote.nixl_mover import Mover, Operation

_EMPTIED = b"\0"
"""Of an object that was erased: NIXL cannot delete."""


class Payload(Protocol):
    """One kind of place. OSError for whatever the medium refuses."""

    def file_bytes(self, num_bytes: int) -> int:
        """Of the value's file, header included."""
        ...

    def write(self, path: str, name: str, block: memoryview, num_bytes: int) -> None:
        """From the start of `block`, whose last page is padded."""
        ...

    def read(self, path: str, name: str, block: memoryview, num_bytes: int) -> None:
        """To the start of `block`. DamagedError if it is not all there."""
        ...

    def erase(self, name: str) -> None:
        """What is not in the value's file."""
        ...


class FilePayload:
    """Whole pages after the header page, moved by file descriptor."""

    def __init__(self, mover: Mover, files: FileLayer, *, direct: bool) -> None:
        self._mover = mover
        self._files = files
        self.direct = direct
        """Off as soon as the filesystem has refused it."""

    def file_bytes(self, num_bytes: int) -> int:
        return HEADER_BYTES + _whole(num_bytes)

    def write(self, path: str, name: str, block: memoryview, num_bytes: int) -> None:
        fd = self._open(path, os.O_RDWR)
        try:
            self._move("WRITE", fd, block, num_bytes)
        finally:
            self._files.close(fd)

    def read(self, path: str, name: str, block: memoryview, num_bytes: int) -> None:
        try:
            fd = self._open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise DamagedError("vanished") from error
        try:
            if self._files.size(fd) != self.file_bytes(num_bytes):
                raise DamagedError("short")
            self._move("READ", fd, block, num_bytes)
        finally:
            self._files.close(fd)

    def erase(self, name: str) -> None:
        pass

    def _move(self, operation: Operation, fd: int, block: memoryview, num_bytes: int) -> None:
        length = _whole(num_bytes)
        if length:
            self._mover.move(operation, block[:length], (HEADER_BYTES, length, fd, ""))

    def _open(self, path: str, flags: int) -> int:
        if self.direct:
            try:
                return self._files.open(path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
        return self._files.open(path, flags)


class ObjectPayload:
    """An object named PREFIX + name. An erased one stays as a single byte."""

    def __init__(self, mover: Mover, prefix: str) -> None:
        self._mover = mover
        self._prefix = prefix

    def file_bytes(self, num_bytes: int) -> int:
        return HEADER_BYTES

    def write(self, path: str, name: str, block: memoryview, num_bytes: int) -> None:
        self._move("WRITE", name, block[:num_bytes])

    def read(self, path: str, name: str, block: memoryview, num_bytes: int) -> None:
        self._move("READ", name, block[:num_bytes])

    def erase(self, name: str) -> None:
        self._move("WRITE", name, memoryview(bytearray(_EMPTIED)))

    def _move(self, operation: Operation, name: str, view: memoryview) -> None:
        if len(view):
            self._mover.move(operation, view, (0, len(view), 1, self._prefix + name))


def _whole(num_bytes: int) -> int:
    """In whole pages."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
