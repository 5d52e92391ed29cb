"""One mapping of host memory for values of KV: private, or shared with other processes by file descriptor.

An arena (arena.py) cuts it into pieces; NIXL registers it whole by `address` and `num_bytes`; another process attaches
it by `fd`. Huge pages are asked for and what was got is reported in `pages`; a segment stays mapped for life.
"""

import ctypes
import fcntl
import logging
import mmap
import os
from collections.abc import Callable
from typing import Literal, Self

import numpy as np

from pdxfer.core.errors import ConfigError

log = logging.getLogger(__name__)

Pages = Literal["small", "transparent", "hugetlb"]

MADV_POPULATE_WRITE = 23
"""Linux 5.14; measured: populating 512 MiB of huge pages takes 70 ms, touching it page by page 468 ms."""
HUGE_PAGE = 2 << 20
POPULATE_STEP = 64 << 20
_libc = ctypes.CDLL(None, use_errno=True)


class Segment:
    """Bytes `view`, at `address` in this process. Whoever made it closes it, after everything that looks into it."""

    def __init__(self, mapping: mmap.mmap, fd: int | None, pages: Pages) -> None:
        self._map = mapping
        self.fd = fd
        """Of the shared memory; None: private."""
        self.pages = pages
        """What the kernel promised; `transparent` is a request it may decline."""
        self.num_bytes = len(mapping)
        self.address = int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)
        self.view = memoryview(mapping)
        self.before_close: Callable[[], None] = _nothing
        """Called once, while the memory is still mapped (pinning.py)."""

    def __repr__(self) -> str:
        shared = "private" if self.fd is None else f"fd={self.fd}"
        return f"<Segment {self.num_bytes / (1 << 20):.0f} MiB {shared} pages={self.pages} at {self.address:#x}>"

    @classmethod
    def private(cls, num_bytes: int) -> Self:
        """Anonymous memory of this process, in transparent huge pages where the kernel has them."""
        size = _whole(num_bytes, mmap.PAGESIZE)
        mapping = _mapped(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return cls(mapping, None, _advise_huge(mapping))

    @classmethod
    def shared(cls, num_bytes: int, name: str) -> Self:
        """Memory that others attach by fd: reserved huge pages if there are enough, else plain shared memory."""
        size = _whole(num_bytes, HUGE_PAGE)
        try:
            return cls._memfd(size, name, os.MFD_HUGETLB, "hugetlb")
        except OSError as error:
            log.debug("no %d MiB of reserved huge pages (%s): plain shared memory", size >> 20, error)
        try:
            return cls._memfd(size, name, 0, "small")
        except OSError as error:
            raise ConfigError(
                f"cannot map {size >> 20} MiB of shared memory: {error}; lower capacity_gib of the dram tier"
            ) from error

    @classmethod
    def attach(cls, fd: int, num_bytes: int) -> Self:
        """Map what another process shares. Takes the fd over."""
        try:
            size = os.fstat(fd).st_size
            if size != num_bytes:
                raise ConfigError(f"shared segment has {size} bytes, its owner said {num_bytes}: not the same segment")
            mapping = _mapped(fd, num_bytes, mmap.MAP_SHARED)
        except BaseException:
            os.close(fd)
            raise
        return cls(mapping, fd, "small")

    @classmethod
    def _memfd(cls, size: int, name: str, flags: int, pages: Pages) -> Self:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        try:
            os.ftruncate(fd, size)
            mapping = mmap.mmap(fd, size, mmap.MAP_SHARED)
            # Nobody who gets the fd may cut it under us: that would be SIGBUS in every process.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError:
            os.close(fd)
            raise
        if pages == "small":
            pages = _advise_huge(mapping)
        return cls(mapping, fd, pages)

    def populate(self, first: int, num_bytes: int) -> bool:
        """Have the kernel back this range with zeroed pages now; bytes already written stay. Any thread, without the
        GIL. False: the kernel cannot (older than 5.14), pages come at first touch."""
        return self._madvise(MADV_POPULATE_WRITE, first, num_bytes)

    def lock(self) -> bool:
        """Never swap (mlock). False, with a warning, where RLIMIT_MEMLOCK forbids."""
        if _libc.mlock(ctypes.c_void_p(self.address), ctypes.c_size_t(self.num_bytes)) == 0:
            return True
        log.warning(
            "cannot lock %d MiB of memory: %s; raise `ulimit -l` to keep KV from being swapped",
            self.num_bytes >> 20,
            os.strerror(ctypes.get_errno()),
        )
        return False

    def close(self) -> None:
        """Unmap and close the fd; idempotent. Views that are still held keep the mapping until they go."""
        before, self.before_close = self.before_close, _nothing
        before()
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)
        self.view.release()
        try:
            self._map.close()
        except BufferError:
            log.debug("%r is still looked into: unmapped with the last view", self)

    def _madvise(self, advice: int, first: int, num_bytes: int) -> bool:
        at = ctypes.c_void_p(self.address + first)
        return bool(_libc.madvise(at, ctypes.c_size_t(num_bytes), ctypes.c_int(advice)) == 0)


def _nothing() -> None:
    return


def private_map(num_bytes: int) -> mmap.mmap:
    """Memory for I/O: of this process alone, on whole pages, huge ones where the kernel has them (a direct read or
    write is then few pieces). A fork does not see it: one during a direct read would leave the bytes to the child."""
    mapping = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_DONTFORK)
    if num_bytes >= HUGE_PAGE:
        _advise_huge(mapping)
    return mapping


def _whole(num_bytes: int, unit: int) -> int:
    return max(unit, -(-num_bytes // unit) * unit)


def _mapped(fd: int, size: int, flags: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, size, flags)
    except OSError as error:
        raise ConfigError(f"cannot map {size >> 20} MiB of memory: {error}; lower capacity_gib of the tier") from error


def _advise_huge(mapping: mmap.mmap) -> Pages:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return "small"
    return "transparent"
