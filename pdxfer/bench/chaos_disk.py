"""The small file system of a chaos run's disk tier, which can be filled to the last byte. Needs root (tmpfs)."""

import asyncio
import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdxfer.bench.chaos_faults import Fault
from pdxfer.bench.ttft_errors import BenchError
from pdxfer.bench.ttft_link import run_command

_EVERY_S = 0.05
"""Room that somebody else frees while the disk is to be full is taken again so often."""


class SmallDisk:
    """A mounted file system of a few MiB."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    async def inject(self, fault: Fault) -> None:
        """No byte is free for `fault.pause_s`."""
        loop = asyncio.get_running_loop()
        end = loop.time() + fault.pause_s
        try:
            while loop.time() < end:
                self._fill()
                await asyncio.sleep(_EVERY_S)
        finally:
            self._ballast.unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """Room for others."""
        return shutil.disk_usage(self.path).free

    def _fill(self) -> None:
        with self._ballast.open("ab") as file:
            while free := self.free_bytes():
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), free)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    return  # somebody was faster: it is full too


@contextmanager
def small_disk(size_bytes: int) -> Iterator[SmallDisk]:
    """Mount it, and remove it at the end, also after a failure. Raises BenchError without the right to mount."""
    if os.geteuid() != 0:
        raise BenchError("--store mounts a small file system, which needs root: run it with sudo, or leave --store out")
    with tempfile.TemporaryDirectory(prefix="pdxfer-chaos-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "disk"
        path.mkdir()
        run_command(["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "pdxfer-chaos", str(path)])
        try:
            yield SmallDisk(path)
        finally:
            subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False)
