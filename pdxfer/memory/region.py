"""One rank's KV region as bytes: views for sockets, addresses for NIXL and CMA, digests for integrity.

The memory belongs to vLLM and stays mapped for the life of the process; we never free it. Views alias it: whoever
holds a claim on the blocks (see node/receiver.py) may write, nobody else.
"""

import ctypes
import logging
import os

import xxhash

from pdxfer.core.errors import ConfigError
from pdxfer.kv.layout import KvLayout
from pdxfer.kv.runs import Runs

log = logging.getLogger(__name__)

MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
HUGE_BYTES = 2 << 20
_libc = ctypes.CDLL(None, use_errno=True)


class Region:
    """Host view of a KV layout. For VRAM only `layout` is usable; asking for bytes raises ConfigError."""

    def __init__(self, layout: KvLayout) -> None:
        layout.check()
        self.layout = layout
        self._bytes: memoryview | None = None
        if layout.memory == "DRAM":
            array = (ctypes.c_char * layout.num_bytes).from_address(layout.base)
            self._bytes = memoryview(array).cast("B")

    @property
    def host(self) -> bool:
        """Whether the CPU reaches the bytes."""
        return self._bytes is not None

    def use_huge_pages(self) -> bool:
        """Have the kernel put huge pages behind the region now; bytes stay. False: it will not, which only costs speed.

        Reading another process's memory goes page by page: with 2 MiB pages it is twice as fast. About a second a
        GiB, the first time; needs Linux 6.1, and pages that no device has pinned.
        """
        first = -(-self.layout.base // HUGE_BYTES) * HUGE_BYTES
        length = (self.layout.base + self.layout.num_bytes) // HUGE_BYTES * HUGE_BYTES - first
        if not self.host or length <= 0:
            return False
        for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):
            if _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), ctypes.c_int(advice)):
                log.debug("no huge pages for %d MiB of KV: %s", length >> 20, os.strerror(ctypes.get_errno()))
                return False
        return True

    def views(self, runs: Runs) -> list[memoryview]:
        """One writable view a run, no copy."""
        if self._bytes is None:
            raise ConfigError(
                "KV is in device memory: only the nixl channel can move it; set transport.channels: [nixl]"
            )
        data = self._bytes
        return [data[offset : offset + length] for offset, length in runs.tolist()]

    def digest(self, runs: Runs) -> int:
        """xxh3-64 over the bytes of the runs in order; never 0 (0 on the wire means not taken)."""
        state = xxhash.xxh3_64()
        for view in self.views(runs):
            state.update(view)
        return state.intdigest() or 1
