"""The KV region: huge pages behind memory that is in use change no byte of it."""

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from pdxfer.kv.layout import KvLayout
from pdxfer.memory.region import HUGE_BYTES, Region


def region_in(memory: mmap.mmap) -> Region:
    """All of the mapping as one layer of 4 KiB blocks."""
    view = np.frombuffer(memory, np.uint8)
    return Region(
        KvLayout(
            base=view.ctypes.data,
            num_bytes=view.size,
            num_blocks=view.size // 4096,
            block_bytes=4096,
            block_stride=4096,
            layer_offsets=(0,),
            block_size=16,
        )
    )


def huge_kib(address: int) -> int:
    """Of the mapping that holds the address, from /proc/self/smaps."""
    for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())[1:]:
        first, last = (int(number, 16) for number in part.split(maxsplit=1)[0].split("-"))
        if first <= address < last:
            found = re.search(r"AnonHugePages:\s+(\d+)", part)
            return int(found[1]) if found else 0
    raise AssertionError(f"{address:#x} is not mapped")


def test_memory_in_use_gets_huge_pages_and_keeps_its_bytes() -> None:
    memory = mmap.mmap(-1, 4 * HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = np.frombuffer(memory, np.uint8)
    view[:] = np.random.default_rng(1).integers(0, 256, view.size, dtype=np.uint8)
    before, region = view.copy(), region_in(memory)
    took = region.use_huge_pages()
    assert np.array_equal(view, before)
    if not took:
        pytest.skip("this kernel gives no huge pages (older than 6.1, or transparent_hugepage is never)")
    middle = region.layout.base + 2 * HUGE_BYTES
    assert huge_kib(middle) >= 3 * HUGE_BYTES // 1024


def test_a_region_without_a_whole_huge_page_is_left_alone() -> None:
    memory = mmap.mmap(-1, HUGE_BYTES // 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert not region_in(memory).use_huge_pages()
