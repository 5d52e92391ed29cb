"""A chunk's bytes in the engine's blocks: read in place when saving, written in place when loading.

Raw order is kv/runs' canonical one: layer by layer, within a layer block by block. Host memory only; a device's blocks
are memory/device.DeviceBlocks. Saves hold the blocks by reference, loads by the request that waits for them.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pdxfer.kv.runs import block_runs
from pdxfer.memory.region import Region
from pdxfer.store.base import Buffer


class Blocks(Protocol):
    """Blocks of one rank's KV."""

    @property
    def bytes_per_block(self) -> int:
        """Over all layers."""
        ...

    def parts(self, block_ids: Sequence[int]) -> Sequence[Buffer]:
        """The chunk's raw bytes; their concatenation. May copy (off a device); any thread."""
        ...

    def fill(self, block_ids: Sequence[int], skip_blocks: int, raw: memoryview) -> None:
        """Write a chunk's raw bytes, but for its first `skip_blocks` blocks, into them. One copy; any thread."""
        ...


class HostBlocks:
    """Blocks the CPU reaches."""

    def __init__(self, region: Region) -> None:
        self._region, self._layout = region, region.layout
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(
            region.views(np.array([[0, region.layout.num_bytes]]))[0], np.uint8
        )

    @property
    def bytes_per_block(self) -> int:
        return self._layout.block_bytes * self._layout.num_layers

    def parts(self, block_ids: Sequence[int]) -> Sequence[Buffer]:
        """Views, no copy."""
        return self._region.views(block_runs(self._layout, list(block_ids), 0, self._layout.num_layers))

    def fill(self, block_ids: Sequence[int], skip_blocks: int, raw: memoryview) -> None:
        """numpy copies, which let other threads run."""
        layout, ids = self._layout, list(block_ids)
        chunk_blocks = len(ids) + skip_blocks
        source = np.frombuffer(raw, np.uint8).reshape(layout.num_layers, chunk_blocks * layout.block_bytes)
        for layer in range(layout.num_layers):
            at = skip_blocks * layout.block_bytes
            for offset, length in block_runs(layout, ids, layer, 1).tolist():
                np.copyto(self._bytes[offset : offset + length], source[layer, at : at + length])
                at += length
