"""Segments, the allocator and the arena: bytes always add up, sharing works by fd, limits are found."""

import ctypes
import mmap
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdxfer.core.errors import ConfigError
from pdxfer.memory.arena import Arena
from pdxfer.memory.freelist import GRANULE, FreeList, piece_bytes
from pdxfer.memory.limits import cgroup_limits, default_capacity_bytes
from pdxfer.memory.populate import Populating, bind_to_node
from pdxfer.memory.segment import HUGE_PAGE, Segment, private_map

MIB = 1 << 20


@settings(deadline=None)
@given(st.integers(32 << 10, 1 << 36))
def test_a_piece_wastes_less_than_13_percent(num_bytes: int) -> None:
    size = piece_bytes(num_bytes)
    assert num_bytes <= size < 1.13 * num_bytes
    assert size % GRANULE == 0 and piece_bytes(size) == size


@settings(deadline=None)
@given(st.integers(0, 32 << 10))
def test_a_small_piece_wastes_less_than_a_page(num_bytes: int) -> None:
    assert num_bytes <= piece_bytes(num_bytes) < max(1, num_bytes) + GRANULE


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 40 * GRANULE), st.integers(-20, -1)), max_size=120))
def test_the_allocator_never_overlaps_and_joins_what_is_free(steps: list[int]) -> None:
    """Positive: reserve so many bytes. Negative: release one of those held. The model is an array of granules."""
    total = 200
    free = FreeList(total * GRANULE + 17)
    owner = [0] * total
    held: list[tuple[int, int]] = []
    for number, step in enumerate(steps, start=1):
        if step > 0:
            size = piece_bytes(step)
            offset = free.reserve(size)
            if offset is None:
                continue
            where = slice(offset // GRANULE, (offset + size) // GRANULE)
            assert owner[where] == [0] * (size // GRANULE)
            owner[where] = [number] * (size // GRANULE)
            held.append((offset, size))
        elif held:
            offset, size = held.pop(step % len(held))
            owner[offset // GRANULE : (offset + size) // GRANULE] = [0] * (size // GRANULE)
            free.release(offset, size)
        assert free.free_bytes == owner.count(0) * GRANULE
        runs = [run for run in "".join("f" if o == 0 else "u" for o in owner).split("u") if run]
        assert [size // GRANULE for _, size in free.pieces()] == [len(run) for run in runs]


def test_a_free_run_of_the_right_class_is_always_found() -> None:
    free = FreeList(16 * MIB)
    offsets = [free.reserve(MIB) for _ in range(16)]
    assert sorted(offsets) == [n * MIB for n in range(16)]
    assert free.reserve(GRANULE) is None
    free.release(5 * MIB, MIB)
    assert free.reserve(MIB) == 5 * MIB


def test_a_piece_lives_until_its_last_reference_goes() -> None:
    freed: list[int] = []
    arena = Arena(Segment.private(MIB), on_free=lambda: freed.append(arena.used_bytes))
    piece = arena.reserve(100_000, owner="a")
    assert piece is not None and arena.used_by("a") == piece.size == arena.used_bytes
    piece.hold()
    piece.drop()
    assert not freed
    piece.drop()
    assert freed == [0] and arena.used_by("a") == 0
    with pytest.raises(AssertionError, match="gone"):
        piece.drop()
    arena.check()
    arena.segment.close()


def test_pieces_may_be_dropped_on_any_thread() -> None:
    arena = Arena(Segment.private(4 * MIB))

    def churn() -> None:
        for n in range(300):
            piece = arena.reserve(1000 * (n % 17))
            if piece is not None:
                piece.hold()
                piece.drop()
                piece.drop()

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert arena.used_bytes == 0
    arena.check()
    arena.segment.close()


def test_an_address_and_a_length_name_the_bytes() -> None:
    """What NIXL, CMA and cudaHostRegister are given."""
    segment = Segment.private(MIB)
    segment.view[5:10] = b"hello"
    assert ctypes.string_at(segment.address + 5, 5) == b"hello"
    assert segment.address % mmap.PAGESIZE == 0 and segment.num_bytes == MIB
    segment.close()
    segment.close()


def test_a_view_keeps_a_closed_segment_mapped() -> None:
    segment = Segment.private(MIB)
    view = segment.view[:5]
    view[:] = b"alive"
    segment.close()
    assert bytes(view) == b"alive"


def test_another_process_sees_the_same_bytes_by_fd() -> None:
    """And cannot cut the segment under us."""
    segment = Segment.shared(2 * MIB, "pdxfer-test")
    assert segment.fd is not None
    segment.view[:4] = b"ping"
    code = (
        "import sys\n"
        "from pdxfer.memory.segment import Segment\n"
        "s = Segment.attach(int(sys.argv[1]), int(sys.argv[2]))\n"
        "assert bytes(s.view[:4]) == b'ping'\n"
        "s.view[:4] = b'pong'\n"
    )
    fd, size = segment.fd, segment.num_bytes
    subprocess.run([sys.executable, "-c", code, str(fd), str(size)], pass_fds=[fd], check=True, timeout=60)
    assert bytes(segment.view[:4]) == b"pong"
    with pytest.raises(OSError):
        os.ftruncate(fd, MIB)
    taken = os.dup(fd)
    with pytest.raises(ConfigError, match="not the same segment"):
        Segment.attach(taken, MIB)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(taken)
    segment.close()


def test_populating_keeps_what_was_written_and_stops_when_told() -> None:
    segment = Segment.private(130 * MIB)
    segment.view[-1] = 7
    populating = Populating(segment)
    populating.stop()
    populating.stop()
    assert segment.view[-1] == 7
    assert segment.populate(0, 2 * MIB) in (True, False)
    segment.close()


def test_node_zero_can_be_bound_where_numa_is_known() -> None:
    segment = Segment.private(MIB)
    if Path("/sys/devices/system/node/node0").exists():
        assert bind_to_node(segment, 0) in (True, False)
    segment.view[0] = 1
    segment.close()


def test_a_segment_that_cannot_be_mapped_says_what_to_change() -> None:
    with pytest.raises(ConfigError, match="lower capacity_gib"):
        Segment.private(1 << 50)


def test_the_default_is_a_quarter_of_what_the_container_has(tmp_path: Path) -> None:
    """cgroup v2 with a nested group: the tightest limit above us counts; v1: its one file; none: the machine."""
    machine = default_capacity_bytes(tmp_path)
    assert machine > 0 and cgroup_limits(tmp_path) == []
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/slice/pod\n")
    group = tmp_path / "sys/fs/cgroup/slice/pod"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text(f"{100 * MIB}\n")
    assert cgroup_limits(tmp_path) == [100 * MIB]
    assert default_capacity_bytes(tmp_path) == 25 * MIB
    (tmp_path / "sys/fs/cgroup/memory").mkdir()
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text(f"{40 * MIB}\n")
    assert default_capacity_bytes(tmp_path) == 10 * MIB


def test_memory_for_io_is_private_on_whole_pages_and_not_forked() -> None:
    """A fork during a direct read would else leave what is read to the child ("dc" in smaps: not copied by fork)."""
    block = private_map(3 * HUGE_PAGE)
    address = int(np.frombuffer(block, dtype=np.uint8).ctypes.data)
    assert address % 4096 == 0 and not any(block[:4096])
    regions = Path("/proc/self/smaps").read_text().split("VmFlags:")
    for region, flags in zip(regions, regions[1:], strict=False):
        spans = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) (\S+)", region, re.MULTILINE)
        begin, end, rights = spans[-1]
        if int(begin, 16) <= address < int(end, 16):
            assert rights == "rw-p" and "dc" in flags.splitlines()[0].split()
            return
    raise AssertionError("the mapping is not in smaps")
