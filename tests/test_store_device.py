"""DeviceBlocks moves the same bytes as HostBlocks, whatever the order of layers and blocks (on CPU tensors)."""

import numpy as np
import pytest

from pdxfer.kv.layout import KvLayout
from pdxfer.memory.region import Region
from pdxfer.node.store_blocks import HostBlocks

pytestmark = pytest.mark.slow

LAYERS, BLOCKS, BYTES = 3, 10, 64


@pytest.mark.parametrize("blocks_first", [False, True])
def test_device_and_host_move_the_same_bytes(blocks_first: bool) -> None:
    """LBHNC and BLHNC; a chunk of four blocks, then all but its first one into other blocks."""
    torch = pytest.importorskip("torch")
    from pdxfer.memory.device import DeviceBlocks

    memory = np.random.default_rng(1).integers(0, 255, LAYERS * BLOCKS * BYTES, dtype=np.uint8)
    layout = KvLayout(
        base=memory.ctypes.data,
        num_bytes=memory.nbytes,
        num_blocks=BLOCKS,
        block_bytes=BYTES,
        block_stride=LAYERS * BYTES if blocks_first else BYTES,
        layer_offsets=tuple(layer * BYTES * (1 if blocks_first else BLOCKS) for layer in range(LAYERS)),
        block_size=16,
    )
    host, device = HostBlocks(Region(layout)), DeviceBlocks(torch.from_numpy(memory), layout)
    assert device.bytes_per_block == host.bytes_per_block == LAYERS * BYTES
    chunk = b"".join(device.parts([7, 2, 3, 9]))
    assert chunk == b"".join(bytes(part) for part in host.parts([7, 2, 3, 9]))
    before = memory.copy()
    device.fill([1, 4, 5], 1, memoryview(chunk))
    by_device = memory.copy()
    memory[:] = before
    host.fill([1, 4, 5], 1, memoryview(chunk))
    assert (memory == by_device).all() and b"".join(host.parts([1, 4, 5])) == b"".join(host.parts([2, 3, 9]))
