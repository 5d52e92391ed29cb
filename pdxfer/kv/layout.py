"""Where a rank's KV cache lies in memory, as plain numbers.

Built by the connector from the tensors vLLM registers; used by runs.py to turn block ids into byte ranges. One
contiguous region holds all layers; a block of a layer is `block_bytes` long at
``layer_offsets[layer] + block_id * block_stride`` from the region's start.

    LBHNC:  layer_offsets = l * B * block_bytes, block_stride = block_bytes        (blocks of a layer adjacent)
    BLHNC:  layer_offsets = l * block_bytes,     block_stride = L * block_bytes    (layers of a block adjacent)
"""

from typing import Annotated

import msgspec


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Geometry of one rank's KV region; travels in channel addresses so that a peer can compute remote addresses."""

    base: int
    """Address of the region's first byte in its process (or on its device)."""
    num_bytes: int
    """Length of the region."""
    num_blocks: int
    """Blocks of the pool; ids run from 0 (vLLM's null block) to num_blocks - 1."""
    block_bytes: int
    """Bytes of one block of one layer; equal on both sides of a transfer."""
    block_stride: int
    """Bytes from a block to the next id in the same layer."""
    layer_offsets: Annotated[tuple[int, ...], msgspec.Meta(max_length=4096)]
    """Start of each layer's block 0, from `base`."""
    block_size: int
    """Tokens a block."""
    memory: str = "DRAM"
    """DRAM or VRAM (NIXL's names)."""
    device: int = 0
    """Device index for VRAM."""

    @property
    def num_layers(self) -> int:
        return len(self.layer_offsets)

    def check(self) -> None:
        """Raise ValueError if a block could lie outside the region. Run on every layout a peer sends."""
        last = (self.num_blocks - 1) * self.block_stride + self.block_bytes
        if min(self.num_blocks, self.block_bytes, self.block_stride, self.num_layers, self.num_bytes) <= 0:
            raise ValueError(f"KV layout has a size that is not positive: {self}")
        if min(self.layer_offsets) < 0 or max(self.layer_offsets) + last > self.num_bytes:
            raise ValueError(f"KV layout leaves its region of {self.num_bytes} bytes: {self}")
