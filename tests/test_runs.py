"""Block runs: the merged, paired ranges equal a naive walk over blocks and bytes, for any layout and order."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdxfer.kv.layout import KvLayout
from pdxfer.kv.runs import Runs, block_runs, merge, pair_runs, total_bytes

BLOCKS, LAYERS, BYTES = 12, 4, 3


def layout(layers_adjacent: bool) -> KvLayout:
    step = BYTES if layers_adjacent else BLOCKS * BYTES
    return KvLayout(
        base=4096,
        num_bytes=BLOCKS * LAYERS * BYTES,
        num_blocks=BLOCKS,
        block_bytes=BYTES,
        block_stride=LAYERS * BYTES if layers_adjacent else BYTES,
        layer_offsets=tuple(layer * step for layer in range(LAYERS)),
        block_size=16,
    )


def walk(runs: Runs) -> list[int]:
    """Every byte offset that the runs name, in order."""
    return [offset + i for offset, length in runs.tolist() for i in range(length)]


def naive(shape: KvLayout, blocks: list[int], first: int, count: int) -> list[int]:
    """Layer by layer, block by block, byte by byte."""
    return [
        shape.layer_offsets[layer] + block * shape.block_stride + i
        for layer in range(first, first + count)
        for block in blocks
        for i in range(shape.block_bytes)
    ]


blocks = st.lists(st.integers(0, BLOCKS - 1), max_size=10, unique=True)
lengths = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@settings(deadline=None)
@given(st.booleans(), blocks, st.integers(0, LAYERS - 1), st.integers(0, LAYERS))
def test_block_runs_name_the_bytes_of_a_naive_walk_in_its_order(
    adjacent: bool, ids: list[int], first: int, n: int
) -> None:
    n = min(n, LAYERS - first)
    runs = block_runs(layout(adjacent), ids, first, n)
    assert walk(runs) == naive(layout(adjacent), ids, first, n)
    assert total_bytes(runs) == len(ids) * n * BYTES
    ends = runs[:, 0] + runs[:, 1]
    assert not (ends[:-1] == runs[1:, 0]).any(), "adjacent ranges are merged"


@settings(deadline=None)
@given(lengths, lengths, st.randoms(use_true_random=False))
def test_paired_runs_move_the_same_bytes_as_a_byte_by_byte_copy(a: list[int], b: list[int], random: object) -> None:
    b = b[: len(b) - 1] + [max(1, sum(a) - sum(b[:-1]))] if sum(b[:-1]) < sum(a) else [sum(a)]
    rng = np.random.default_rng(random.randrange(1 << 32))  # type: ignore[attr-defined]

    def scattered(parts: list[int]) -> Runs:
        starts = rng.permutation(len(parts)) * 200
        return np.stack((starts, np.asarray(parts)), axis=1).astype(np.int64)

    source, target = scattered(a), scattered(b)
    cut_source, cut_target = pair_runs(source, target)
    assert (cut_source[:, 1] == cut_target[:, 1]).all() and (cut_source[:, 1] > 0).all()
    assert walk(cut_source) == walk(source) and walk(cut_target) == walk(target)


def test_streams_of_unequal_length_do_not_pair() -> None:
    one, two = np.array([[0, 4]]), np.array([[0, 5]])
    with pytest.raises(ValueError, match="differ in total length"):
        pair_runs(one, two)


@pytest.mark.parametrize(("ids", "first", "count"), [([12], 0, 1), ([-1], 0, 1), ([0], 3, 2), ([0], -1, 1)])
def test_what_lies_outside_the_layout_is_refused(ids: list[int], first: int, count: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        block_runs(layout(False), ids, first, count)


def test_neighbours_in_the_pool_become_one_run() -> None:
    """Blocks 3, 4, 5 of one layer: one run; all layers of one block, where layers are adjacent: one run."""
    assert block_runs(layout(False), [3, 4, 5], 1, 1).tolist() == [[(BLOCKS + 3) * BYTES, 3 * BYTES]]
    assert block_runs(layout(True), [2], 0, LAYERS).tolist() == [[2 * LAYERS * BYTES, LAYERS * BYTES]]
    assert merge(np.array([0, 3, 9]), 3).tolist() == [[0, 6], [9, 3]]


def test_a_layout_that_leaves_its_region_is_refused() -> None:
    good = layout(False)
    good.check()
    for change in ({"num_bytes": 10}, {"block_stride": 100}, {"layer_offsets": (-1,)}, {"num_blocks": 0}):
        with pytest.raises(ValueError, match="KV layout"):
            msgspec.structs.replace(good, **change).check()
