"""Getting a segment ready for use: on the right NUMA node, never swapped, its pages there before they are needed,
pinned where a GPU is used.

Populating runs in a thread without the GIL, from low addresses up, as the arena hands them out.
"""

import ctypes
import logging
import os
import platform
import threading

from pdxfer.core.cpus import unpin_current_thread
from pdxfer.memory.pinning import pin
from pdxfer.memory.segment import POPULATE_STEP, Segment

log = logging.getLogger(__name__)

_MBIND = {"x86_64": 237, "aarch64": 235}
"""Syscall number by machine; no NUMA library is needed for one call."""
_MPOL_BIND = 2
_libc = ctypes.CDLL(None, use_errno=True)


def prepare(segment: Segment, *, numa_node: int | None = None, lock: bool = False) -> None:
    """Bind, then lock. What the kernel refuses is a warning: the memory works without."""
    if numa_node is not None:
        bind_to_node(segment, numa_node)
    if lock:
        segment.lock()


def bind_to_node(segment: Segment, node: int) -> bool:
    """Let all pages come from one NUMA node (mbind). Before they are touched."""
    number = _MBIND.get(platform.machine())
    if number is None:
        log.warning("NUMA binding is not known on %s: memory stays where the kernel puts it", platform.machine())
        return False
    mask = (ctypes.c_ulong * 16)()
    mask[node // 64] = 1 << node % 64
    args = (ctypes.c_void_p(segment.address), ctypes.c_ulong(segment.num_bytes), ctypes.c_int(_MPOL_BIND), mask)
    if _libc.syscall(ctypes.c_long(number), *args, ctypes.c_ulong(16 * 64), ctypes.c_uint(0)) == 0:
        return True
    log.warning("cannot bind memory to NUMA node %d: %s", node, os.strerror(ctypes.get_errno()))
    return False


class Populating:
    """The thread that has the kernel back a segment with pages, then pins them. `stop` before the segment is closed."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pdxfer-populate", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End after the step that runs (milliseconds; pinning, seconds); idempotent."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        unpin_current_thread()
        for first in range(0, self._segment.num_bytes, POPULATE_STEP):
            length = min(POPULATE_STEP, self._segment.num_bytes - first)
            if self._stopped.is_set() or not self._segment.populate(first, length):
                break
        if not self._stopped.is_set():
            pin(self._segment)
