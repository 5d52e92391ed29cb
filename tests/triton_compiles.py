"""Every Triton kernel compiles to machine code of NVIDIA GPUs; the compiler needs no GPU. Run by test_codec_triton.py
in a process of its own, without TRITON_INTERPRET; prints one line a kernel."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pdxfer.codec.kernels.gpu import int4, klt, lossless, rows
from pdxfer.codec.kernels.gpu.values import EXACT

ROWS = {"rows": "i32", "dim": "i32"}
TILES = {"heads": "i32", "tokens": "i32", "dim": "i32"}
GROUPS = {"groups": "i32", "stride": "i32"}
PLANES = {
    "heads": "i32",
    "dim": "i32",
    "tokens": "i32",
    "skip": "i32",
    "stride": "i32",
    "rotary": "i32",
    "each": "fp32",
}
SUMS = {"tokens": "i32", "channels": "i32", "width": "i32"}
POINTERS = {
    "params": "*i16", "codes": "*u8", "bad": "*u8", "base": "*u8", "planes": "*i64", "extra": "*i64", "rest": "*u8",
    "counts": "*i32", "starts": "*i64", "escapes": "*u8", "mean": "*fp32", "deviation": "*fp32", "inverse": "*fp32",
    "sym": "*u8", "escaped": "*u8", "in_scale": "*fp32", "turned": "*u8", "angles": "*fp32", "whole": "*i16",
    "forward": "*i16", "sums": "*i32", "out_scale": "*fp32", "kept": "*i64", "shifts": "*i16",
}  # fmt: skip
WORDS = ("*i16", "*i16", "*i32")
"""Of src, dst and values, by dtype."""


def compiled(loop: Any, numbers: dict[str, str], constants: dict[str, int], words: str = "*i16") -> None:
    """As TritonKernels launches it, for Hopper."""
    values = dict.fromkeys(("src", "dst", "values"), words)
    known = {**POINTERS, **values, **numbers, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(loop, {name: known[name] for name in loop.arg_names}, constants)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=EXACT)
    assert kernel.asm["cubin"]
    assert "fma" not in kernel.asm["ptx"], f"{loop.__name__}: a product and a sum are fused"
    print(loop.__name__, constants)


for dtype, words in enumerate(WORDS):
    for loop in (rows.int8_encode, rows.int8_decode):
        compiled(loop, ROWS, {"DTYPE": dtype, "ROWS": 32, "DIM": 128}, words)
for loop in (rows.fp8_encode, rows.fp8_decode):
    compiled(loop, ROWS, {"DTYPE": 0, "ROWS": 32, "DIM": 128})
compiled(int4.params_of, TILES, {"DTYPE": 0, "DIM": 128})
for loop in (int4.codes_of, int4.int4_decode):
    compiled(loop, TILES, {"DTYPE": 0, "BLOCK": 1024})
for half in (0, 1):
    for loop in (lossless.split, lossless.escape, lossless.join):
        compiled(loop, GROUPS, {"HALF": half, "GROUPS": 32})
compiled(lossless.count, GROUPS, {"GROUPS": 32})
compiled(klt.stats, PLANES, {"DTYPE": 0, "BLOCK": 64})
for loop in (klt.quantise, klt.prepare):
    compiled(loop, PLANES, {"DTYPE": 0, "TOKENS": 8, "CHANNELS": 256})
compiled(klt.products, SUMS, {"TOKENS": 32, "COLUMNS": 64})
compiled(klt.shifts_of, SUMS, {"COLUMNS": 64})
compiled(klt.symbols_of, SUMS, {"TOKENS": 8, "COLUMNS": 256})
