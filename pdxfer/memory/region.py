"""One rank's KV region as bytes: views for sockets, addresses for NIXL and CMA, digests for integrity.

The memory belongs to vLLM and stays mapped for the life of the process; we never free it. Views alias it: whoever
holds a claim on the blocks (see node/receiver.py) may write, nobody else.
"""

import ctypes

import xxhash

from pdxfer.core.errors import ConfigError
from pdxfer.kv.layout import KvLayout
from pdxfer.kv.runs import Runs


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
