"""Codecs of values in a GPU's memory: Triton kernels give the CPU's bits and compile; without a GPU the host codes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_codec_native import header

from pdxfer.codec import device
from pdxfer.codec.base import ChunkSpec
from pdxfer.codec.registry import codec
from pdxfer.testing.codec_suite import kv_like

HERE = Path(__file__).parent


def run(*args: str, **env: str) -> str:
    """Output of python in a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *args], env={**inherited, **env}, cwd=HERE, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_kernels_give_the_bits_of_the_cpu_in_tritons_interpreter() -> None:
    """int8, fp8, int4, lossless both ways, klt's transform and quantisation."""
    assert " passed" in run("-m", "pytest", "-m", "", "triton_interpreter.py", TRITON_INTERPRET="1")


@pytest.mark.slow
def test_kernels_compile_for_gpus_without_one(tmp_path: Path) -> None:
    """To machine code of sm_90, no product fused with a sum: what the interpreter takes, the compiler may not."""
    assert run("triton_compiles.py", TRITON_CACHE_DIR=str(tmp_path)).count("\n") == 24


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_kernels_give_the_bits_of_the_cpu_on_a_gpu() -> None:
    """The interpreter's cases, compiled."""
    assert " passed" in run("-m", "pytest", "-m", "", "triton_interpreter.py")


@pytest.mark.parametrize("name", ["int8", "fp8", "int4", "lossless", "klt", "cachegen", "raw"])
def test_tensors_that_no_kernel_takes_go_through_the_host(name: str) -> None:
    """A tensor of the CPU is coded as the array is, by every codec."""
    spec = ChunkSpec(dtype="bfloat16", shape=(2, 2, 2, 40, 32), first_token=0)
    values, coder = kv_like(spec), codec(name)
    encoded = device.encode(coder, torch.from_numpy(values), spec)
    assert bytes(encoded.payload) == bytes(coder.encode(values, spec).payload)
    out, expected = torch.empty(values.nbytes, dtype=torch.uint8), np.empty_like(values)
    device.decode(coder, memoryview(encoded.payload), header(encoded, spec, coder.opaque), out)
    coder.decode(memoryview(encoded.payload), header(encoded, spec, coder.opaque), expected)
    assert np.array_equal(out.numpy(), expected)
