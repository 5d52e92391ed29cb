"""System calls of the local tiers, in one place so that tests can make them fail.

`OsFiles` is what runs; tests pass a layer that injects ENOSPC, EIO, short transfers and power cuts. Blocking: called in
a tier's worker threads only. Reads and writes free the GIL.
"""

import errno
import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import xxhash

ALIGNMENT = 4096
"""Of offsets, lengths and addresses under O_DIRECT: the largest logical block size of disks in use."""
_STAGE_BYTES = 1 << 20
NOTHING = memoryview(b"")

_REASONS = {
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EROFS: "read_only",
    errno.ENOENT: "vanished",
    errno.ESTALE: "vanished",
    errno.ENODEV: "vanished",
    errno.ENXIO: "vanished",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
}


def reason_of(error: OSError) -> str:
    """The closed set of reasons a failed system call is counted under."""
    return _REASONS.get(error.errno or 0, "io_error")


class FileLayer(Protocol):
    """The calls a local tier makes; each may raise OSError."""

    def open(self, path: str, flags: int) -> int:
        """os.open with mode 0600."""
        ...

    def close(self, fd: int) -> None:
        """os.close."""
        ...

    def size(self, fd: int) -> int:
        """Length of the file."""
        ...

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        """One preadv."""
        ...

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """One pwritev."""
        ...

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Really reserve these bytes (posix_fallocate)."""
        ...

    def truncate(self, fd: int, length: int) -> None:
        """os.ftruncate."""
        ...

    def sync(self, fd: int) -> None:
        """os.fdatasync."""
        ...

    def same(self, fd: int, path: str) -> bool:
        """Whether `path` still names the open file; False also when it is gone."""
        ...


class OsFiles:
    """The machine's own calls."""

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        return os.preadv(fd, [view], offset)

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, views, offset)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        os.posix_fallocate(fd, offset, length)

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def same(self, fd: int, path: str) -> bool:
        try:
            return os.path.samestat(os.stat(path), os.fstat(fd))
        except FileNotFoundError:
            return False


def read_all(files: FileLayer, fd: int, view: memoryview, offset: int) -> None:
    """Fill `view`. OSError EIO if the file ends before."""
    done = 0
    while done < len(view):
        count = files.read(fd, view[done:], offset + done)
        if count == 0:
            raise OSError(errno.EIO, f"file ends at {offset + done}, {len(view) - done} bytes short")
        done += count


def write_all(files: FileLayer, fd: int, view: memoryview, offset: int, tail: memoryview = NOTHING) -> None:
    """Write all of `view`, and `tail` behind it."""
    done, size = 0, len(view) + len(tail)
    while done < size:
        left = (view[done:], tail) if done < len(view) else (tail[done - len(view) :],)
        count = files.write(fd, [part for part in left if part], offset + done)
        if count == 0:
            raise OSError(errno.ENOSPC, f"nothing more could be written at {offset + done}")
        done += count


def open_slab(files: FileLayer, path: str, direct: bool, scratch: memoryview) -> tuple[int, bool]:
    """The file opened for reading and writing, with O_DIRECT if wanted and the filesystem takes it: (fd, direct?).

    `scratch` is one aligned block: some filesystems accept the flag and refuse the first read.
    """
    flags = os.O_RDWR | os.O_CREAT
    if direct:
        try:
            fd = files.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            try:
                files.read(fd, scratch, 0)
                return fd, True
            except OSError as error:
                files.close(fd)
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
    return files.open(path, flags), False


def digest(view: memoryview) -> int:
    """xxh3-64 of a value; frees the GIL."""
    return xxhash.xxh3_64_intdigest(view)


def in_place(parts: Sequence[memoryview]) -> memoryview | None:
    """The value itself if it lies in memory as O_DIRECT wants it, as chunks of the dram tier do; None: to be staged."""
    if len(parts) != 1 or np.frombuffer(parts[0], dtype=np.uint8).ctypes.data % ALIGNMENT:
        return None
    return parts[0]


def stage(block: memoryview, parts: Sequence[memoryview], num_bytes: int) -> int:
    """Copy `parts` (none: they are there already) to the start of `block`, zero the rest of the last page, digest.

    In pieces that stay in the cache between copy and digest; frees the GIL in both.
    """
    target = np.frombuffer(block, dtype=np.uint8)
    state = xxhash.xxh3_64()
    at = 0
    for part in parts:
        source = np.frombuffer(part, dtype=np.uint8)
        for begin in range(0, len(source), _STAGE_BYTES):
            piece = source[begin : begin + _STAGE_BYTES]
            np.copyto(target[at : at + len(piece)], piece)
            state.update(block[at : at + len(piece)])
            at += len(piece)
    assert not parts or at == num_bytes, (at, num_bytes)
    target[num_bytes : -(-num_bytes // ALIGNMENT) * ALIGNMENT] = 0
    return state.intdigest() if parts else digest(block[:num_bytes])
