"""A segment as CUDA likes it: page-locked and known to the driver, so that a GPU's copies to and from it are direct.

Called in threads of whoever maps memory for values of KV (populate.py for the DRAM tier, store/shared_link.py). Does
something only where the engine has brought torch and uses a GPU: torch is never imported here. Tested on a fake that
checks calls and order: no GPU was at hand.
"""

import logging
import sys
from typing import Any

from pdxfer.memory.segment import Segment

log = logging.getLogger(__name__)

_PORTABLE = 1
"""cudaHostRegisterPortable: for all of the process's devices."""


class CudaHost:
    """What of CUDA's runtime is needed, on the device that this process uses (else a context on the first one would be
    made). Answers are CUDA's error codes, 0 for success."""

    def __init__(self, torch: Any, device: int) -> None:
        self._torch, self._device = torch, device

    @classmethod
    def of_this_process(cls) -> "CudaHost | None":
        """None: no torch is loaded, or it has no memory on any GPU."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
            return None
        used = (device for device in range(torch.cuda.device_count()) if torch.cuda.memory_allocated(device))
        device = next(used, None)
        return None if device is None else cls(torch, device)

    def register(self, address: int, num_bytes: int) -> int:
        """Lock these pages and make them known. Blocks: about a second for several GiB."""
        with self._torch.cuda.device(self._device):
            return int(self._torch.cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))

    def unregister(self, address: int) -> int:
        """The reverse."""
        with self._torch.cuda.device(self._device):
            return int(self._torch.cuda.cudart().cudaHostUnregister(address))


def pin(segment: Segment) -> bool:
    """Register the segment until it is closed, which unregisters it first. False: no GPU is used here, or (with a
    warning) CUDA refuses: it works all the same, through a buffer of the driver's. Not on a thread that computes: CUDA
    keeps its last error by thread."""
    cuda = CudaHost.of_this_process()
    if cuda is None:
        return False
    address, mib = segment.address, segment.num_bytes >> 20
    try:
        code = cuda.register(address, segment.num_bytes)
        refusal = f"CUDA error {code}" if code else ""
    except RuntimeError as error:
        refusal = str(error)
    if refusal:
        log.warning("cannot pin %d MiB for the GPU: %s; its copies are slower (see `ulimit -l`)", mib, refusal)
        return False

    def unpin() -> None:
        if code := cuda.unregister(address):
            log.warning("cannot unpin %d MiB: CUDA error %d", mib, code)

    segment.before_close = unpin
    log.info("pinned %d MiB for the GPU", mib)
    return True
