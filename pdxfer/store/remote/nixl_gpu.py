"""GPU memory for GDS: a value is copied between host and device by torch, between device and file by cuFile.

Used by nixl_mover.py for `nixl-gds` and `nixl-gds-mt`. UNTESTED ON HARDWARE: no machine with GDS was at hand.
"""

from typing import Any

from pdxfer.core.errors import ConfigError


class GpuStaging:
    """Implements nixl_mover.Staging with one buffer at a time on one GPU."""

    def __init__(self, device: int) -> None:
        import torch  # heavy, and for this tier only

        if not torch.cuda.is_available():
            raise ConfigError(
                f"store.tiers: GDS moves values through GPU {device}, but torch finds no CUDA; use nixl-posix: or file:"
            )
        self._torch = torch
        self._device = device
        self._buffer: Any = None

    def lend(self, view: memoryview) -> tuple[int, int]:
        self._buffer = self._torch.empty(len(view), dtype=self._torch.uint8, device=f"cuda:{self._device}")
        return int(self._buffer.data_ptr()), self._device

    def load(self, view: memoryview) -> None:
        self._buffer.copy_(self._torch.frombuffer(view, dtype=self._torch.uint8))
        self._torch.cuda.synchronize(self._device)

    def store(self, view: memoryview) -> None:
        self._torch.frombuffer(view, dtype=self._torch.uint8).copy_(self._buffer)

    def end(self) -> None:
        self._buffer = None
