"""File layers that fail on purpose: errors, hangs, death at a chosen system call, a power cut.

Used by the tests of the disk tier instead of OsFiles (pdxfer/store/disk_files.py).
"""

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from pdxfer.store.disk_files import OsFiles

SECTOR = 512


class FaultyFiles(OsFiles):
    """Raises `errors[call]` (an errno) for every call of that name, as long as it is set; `calls` counts them."""

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.only: Callable[[str], bool] = lambda path: True
        """Which paths the errors hit."""
        self.calls: dict[str, int] = {}
        self.hang = threading.Event()
        """While `hanging`, calls that are `hung` wait for this."""
        self.hanging = False
        self.hung: Callable[[str, str], bool] = lambda call, path: call in ("read", "write") and path.endswith("slab")
        """Which calls of which paths."""
        self.waiting = 0
        """Threads that hang now."""
        self._paths: dict[int, str] = {}

    def open(self, path: str, flags: int) -> int:
        self._maybe("open", path)
        fd = super().open(path, flags)
        self._paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        super().close(fd)
        del self._paths[fd]

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        self._maybe("read", self._paths[fd])
        return super().read(fd, view, offset)

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self._maybe("write", self._paths[fd])
        return super().write(fd, views, offset)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self._maybe("allocate", self._paths[fd])
        super().allocate(fd, offset, length)

    def sync(self, fd: int) -> None:
        self._maybe("sync", self._paths[fd])
        super().sync(fd)

    def _maybe(self, call: str, path: str) -> None:
        assert threading.current_thread() is not threading.main_thread(), f"{call} on the event loop's thread"
        self.calls[call] = self.calls.get(call, 0) + 1
        if self.hanging and self.hung(call, path):
            self.waiting += 1
            assert self.hang.wait(30.0), "a hang in a test was not ended"
            self.waiting -= 1
        number = self.errors.get(call)
        if number is not None and self.only(path):
            raise OSError(number, os.strerror(number), path)


class DyingFiles(OsFiles):
    """As if the process were killed in its `last`-th change of a file: half of it is done, and nothing after it."""

    def __init__(self, last: int) -> None:
        self.changes = 0
        self._last = last
        self._lock = threading.Lock()

    @property
    def dead(self) -> bool:
        """Whether it has happened."""
        return self.changes >= self._last

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            self.changes += 1
            if self.changes == self._last and (size := len(views[0])) > 4096:
                super().write(fd, [views[0][: size // 8192 * 4096 or 4096]], offset)
            self._gone()
            return super().write(fd, views, offset)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        with self._lock:
            self.changes += 1
            self._gone()
            super().allocate(fd, offset, length)

    def _gone(self) -> None:
        if self.dead:
            raise OSError(errno.EIO, "killed")


class PowerFiles(OsFiles):
    """Remembers what would still be in volatile caches, so that `cut` can lose any part of it, sector by sector."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paths: dict[int, str] = {}
        self._safe: dict[str, bytes] = {}
        self._volatile: dict[str, list[tuple[int, bytes]]] = {}

    def open(self, path: str, flags: int) -> int:
        fd = super().open(path, flags & ~os.O_DIRECT)
        with self._lock:
            self._paths[fd] = path
            if path not in self._safe:
                self._safe[path], self._volatile[path] = Path(path).read_bytes(), []
        return fd

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            self._volatile[self._paths[fd]].append((offset, b"".join(views)))
            return super().write(fd, views, offset)

    def sync(self, fd: int) -> None:
        with self._lock:
            path = self._paths[fd]
            self._safe[path], self._volatile[path] = Path(path).read_bytes(), []

    def cut(self, target: Path, chance: random.Random) -> None:
        """Write into `target` what a power cut now may leave: each volatile sector is old or new by chance."""
        target.mkdir()
        with self._lock:
            for path, safe in self._safe.items():
                image = bytearray(safe.ljust(os.stat(path).st_size, b"\0"))
                for offset, data in self._volatile[path]:
                    keep = chance.choice((0.0, 0.5, 0.9, 1.0))
                    for at in range(0, len(data), SECTOR):
                        if chance.random() < keep:
                            image[offset + at : offset + at + len(data[at : at + SECTOR])] = data[at : at + SECTOR]
                (target / Path(path).name).write_bytes(image)
