"""A chunk's bytes in blocks that lie on a device: gathered into pinned host memory, scattered out of it.

Used by the store's worker threads where KV is in VRAM (node/store_blocks.Blocks). Copies run on a stream of their own,
so the engine's does not wait; who calls has made sure that the blocks are final (a save) or nobody else's (a load).
Tested with tensors on the CPU only: no GPU was at hand.

L layers, n blocks of the chunk, S bytes of a block in one layer: the chunk is uint8 [L, n, S].
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from pdxfer.kv.layout import KvLayout


class DeviceBlocks:
    """Blocks of one rank's KV on its device."""

    def __init__(self, storage: torch.Tensor, layout: KvLayout) -> None:
        """`storage`: the region as int8 or uint8 [num_bytes], a view of vLLM's own memory."""
        self._layout, self._device = layout, storage.device
        size = (layout.num_blocks, layout.block_bytes)
        flat = storage.view(torch.uint8)
        self._layers = [flat.as_strided(size, (layout.block_stride, 1), start) for start in layout.layer_offsets]
        self._cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if self._cuda else None

    @property
    def bytes_per_block(self) -> int:
        """Over all layers."""
        return self._layout.block_bytes * self._layout.num_layers

    def parts(self, block_ids: Sequence[int]) -> Sequence[memoryview]:
        """The chunk's raw bytes in host memory of their own. Two copies: on the device, and off it."""
        with self._on_stream():
            index = torch.tensor(list(block_ids), device=self._device)
            chunk_LnS = torch.stack([layer.index_select(0, index) for layer in self._layers])
            host_LnS = torch.empty(chunk_LnS.shape, dtype=torch.uint8, pin_memory=self._cuda)
            host_LnS.copy_(chunk_LnS, non_blocking=True)
        self._wait()
        return [memoryview(host_LnS.numpy()).cast("B")]

    def fill(self, block_ids: Sequence[int], skip_blocks: int, raw: memoryview) -> None:
        """Write a chunk's raw bytes, but for its first `skip_blocks` blocks, into these blocks. Returns when they are
        there."""
        layout, count = self._layout, len(block_ids) + skip_blocks
        source_LnS = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(layout.num_layers, count, -1)
        wanted_LnS = source_LnS[:, skip_blocks:].contiguous()
        with self._on_stream():
            index = torch.tensor(list(block_ids), device=self._device)
            chunk_LnS = (wanted_LnS.pin_memory() if self._cuda else wanted_LnS).to(self._device, non_blocking=True)
            for layer, blocks_nS in zip(self._layers, chunk_LnS, strict=True):
                layer.index_copy_(0, index, blocks_nS)
        self._wait()

    def _on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
