"""Block ids → runs: the (offset, length) byte ranges that hold a unit, in canonical order.

Canonical order is layer by layer, within a layer block by block in prompt order; digests and wire payloads follow it,
so two sides with different pools agree on the byte stream. Adjacent ranges are merged. Pure numpy; offsets are
relative to the region's base. No copies of KV bytes.
"""

import numpy as np
import numpy.typing as npt

from pdxfer.kv.layout import KvLayout

Runs = npt.NDArray[np.int64]
"""Shape [R, 2]: byte offset from the region's base, byte length."""


def block_runs(layout: KvLayout, block_ids: list[int], first_layer: int, num_layers: int) -> Runs:
    """Merged runs of `block_ids` in layers [first_layer, first_layer + num_layers).

    Raises ValueError for ids or layers outside the layout (ours or a peer's fault, never followed).
    """
    if not block_ids or num_layers <= 0:
        return np.empty((0, 2), dtype=np.int64)
    if min(block_ids) < 0 or max(block_ids) >= layout.num_blocks:
        raise ValueError(f"block ids {min(block_ids)}..{max(block_ids)} outside a pool of {layout.num_blocks} blocks")
    ids = np.array(block_ids, dtype=np.int64)
    if first_layer < 0 or first_layer + num_layers > layout.num_layers:
        raise ValueError(f"layers {first_layer}+{num_layers} outside {layout.num_layers} layers")
    layers = np.asarray(layout.layer_offsets[first_layer : first_layer + num_layers], dtype=np.int64)
    starts = (layers[:, None] + ids[None, :] * layout.block_stride).reshape(-1)
    return merge(starts, layout.block_bytes)


def merge(starts: npt.NDArray[np.int64], length: int) -> Runs:
    """Merge equal-length ranges that follow each other without a gap, keeping their order."""
    joined = starts[1:] - starts[:-1] == length
    if not joined.any():  # the usual case, and a sender's time counts
        runs = np.empty((starts.size, 2), dtype=np.int64)
        runs[:, 0], runs[:, 1] = starts, length
        return runs
    heads = np.flatnonzero(np.concatenate(([True], ~joined)))
    counts = np.diff(np.append(heads, starts.size))
    return np.stack((starts[heads], counts * length), axis=1)


def pair_runs(source: Runs, target: Runs) -> tuple[Runs, Runs]:
    """Cut two run lists over the same byte stream at each other's borders: equal lengths, pair by pair.

    Raises ValueError if the streams differ in length.
    """
    if np.array_equal(source[:, 1], target[:, 1]):
        return source, target
    ends_s, ends_t = np.cumsum(source[:, 1]), np.cumsum(target[:, 1])
    total = int(ends_s[-1]) if ends_s.size else 0
    if total != (int(ends_t[-1]) if ends_t.size else 0):
        raise ValueError("source and target runs differ in total length")
    cuts = np.union1d(ends_s, ends_t)
    begins = np.concatenate((np.zeros(1, dtype=np.int64), cuts[:-1])) if cuts.size else cuts
    lengths = cuts - begins

    def cut(runs: Runs, ends: npt.NDArray[np.int64]) -> Runs:
        index = np.searchsorted(ends, begins, side="right")
        return np.stack((runs[index, 0] + begins - (ends[index] - runs[index, 1]), lengths), axis=1)

    return cut(source, ends_s), cut(target, ends_t)


def total_bytes(runs: Runs) -> int:
    """Bytes the runs hold."""
    return int(runs[:, 1].sum())
