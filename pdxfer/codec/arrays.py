"""Values that a codec works on: a numpy array in host memory, or a tensor on the device that its kernels run on.

Codecs touch values through these few functions only, so that one codec serves both. Payloads are always host arrays.
Flat uint8 unless said otherwise. torch is imported when a tensor comes.
"""

from typing import Any

import numpy as np

from pdxfer.codec.base import Bytes


def on_host(values: Any) -> bool:
    """Whether these are a numpy array."""
    return isinstance(values, np.ndarray)


def host(values: Any) -> Any:
    """As a numpy array: itself, or a copy of the tensor."""
    return values if on_host(values) else values.cpu().numpy()


def upload(data: Any, device: Any) -> Any:
    """A tensor on `device` with the bytes of a host array, through pinned memory where that is a GPU: two copies."""
    import torch

    staged = torch.empty(data.nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    staged.numpy()[:] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return staged.to(device, non_blocking=True)


def put(to: Any, data: Bytes) -> None:
    """Copy host bytes into values or a view of them, of any shape with as many bytes."""
    if on_host(to):
        to[...] = data.reshape(to.shape)
    else:
        to.copy_(upload(data, to.device).view(to.dtype).view(to.shape))


def contiguous(values: Any) -> Any:
    """A flat array of a view; a copy where it has gaps."""
    return np.ascontiguousarray(values).reshape(-1) if on_host(values) else values.contiguous().view(-1)


def empty_beside(values: Any, num_bytes: int) -> Any:
    """New bytes where `values` are."""
    return np.empty(num_bytes, dtype=np.uint8) if on_host(values) else values.new_empty(num_bytes)


def words16(values: Any) -> Any:
    """View in 16-bit words."""
    if on_host(values):
        return values.view(np.uint16)
    import torch

    return values.view(torch.int16)


def float32_of(tensor: Any, dtype: str) -> Any:
    """Values of a tensor of bytes, wider where they are not float32."""
    import torch

    return tensor.view(getattr(torch, dtype)).float()
