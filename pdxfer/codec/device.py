"""Codecs for values that are in a GPU's memory: on that GPU where Triton kernels do the loops, else through the host.

int8, fp8, int4 and lossless are coded and decoded there, klt is transformed and quantised there and entropy coded on
the CPU. Payloads are the same bits either way and stay in host memory. Rates on a GPU are unmeasured.
"""

import importlib.util
from functools import cache
from typing import Any

from pdxfer.codec.arrays import host, put
from pdxfer.codec.base import ChunkSpec, Codec, Encoded
from pdxfer.codec.frame import FrameHeader
from pdxfer.codec.klt import KltCodec
from pdxfer.codec.lossless import LosslessCodec
from pdxfer.codec.scaled import ScaledCodec


def encode(codec: Codec, values: Any, spec: ChunkSpec) -> Encoded:
    """As codec.encode, of a flat uint8 tensor."""
    if values.is_cuda and has_triton():
        if isinstance(codec, KltCodec):
            return codec.encode(values, spec)
        if isinstance(codec, ScaledCodec | LosslessCodec):
            return _on_gpu(codec).encode(values, spec)
    return codec.encode(host(values), spec)


def decode(codec: Codec, payload: memoryview, header: FrameHeader, out: Any) -> None:
    """As codec.decode, into a flat uint8 tensor."""
    if out.is_cuda and has_triton() and isinstance(codec, ScaledCodec | LosslessCodec):
        return _on_gpu(codec).decode(payload, header, out)
    found = host(out.new_empty(out.shape, device="cpu"))
    codec.decode(payload, header, found)
    put(out, found)


@cache
def has_triton() -> bool:
    """Whether its kernels can be made; torch for CUDA brings it."""
    return importlib.util.find_spec("triton") is not None


def _on_gpu(codec: ScaledCodec | LosslessCodec) -> ScaledCodec | LosslessCodec:
    from pdxfer.codec.kernels.gpu.kernels import TritonKernels

    return type(codec)(kernels=TritonKernels())
