"""The offline engine: the second call reuses what the first one computed, and so does the next process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdxfer.launcher.demo_model import demo_model_dir

pytestmark = [pytest.mark.vllm, pytest.mark.full]

SCRIPT = """
import json, sys, time
import pdxfer
from vllm import SamplingParams

def main():
    model, directory, codec = sys.argv[1:]
    cache = {"local_cpu": 0.2, "local_disk": directory, "max_local_disk_size": 1, "compression": codec}
    llm = pdxfer.LLM(model=model, cache=cache, dtype="float32", max_model_len=2048, enforce_eager=True)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    base = [100 + (i * 7919) % 20000 for i in range(700)]
    answers = []
    for ids in (base, base, base + [5, 6, 7]):
        (out,) = llm.generate({"prompt_token_ids": ids}, greedy, use_tqdm=False)
        answers.append((out.num_cached_tokens, list(out.outputs[0].token_ids)))
        deadline = time.monotonic() + 20
        while not llm.reset_prefix_cache() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)  # what was saved is told to the scheduler each 0.1 s
    assert llm.lookup(base) == 3 and llm.lookup(base, cache_salt="x") == llm.lookup([9] * 300) == 0
    ((second, tail),) = llm.get(base, start_chunk=1)
    assert len(second) == 2 * len(tail) == 2 * 30 * 128 * 2 * 3 * 64 * 4
    print("ANSWERS" + json.dumps(answers))

if __name__ == "__main__":
    main()
"""


def run(script: Path, directory: Path, codec: str) -> list[tuple[int, list[int]]]:
    env = dict(os.environ, VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="0", HF_HUB_OFFLINE="1")
    command = [sys.executable, str(script), str(demo_model_dir(os.environ)), str(directory), codec]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return [(cached, tokens) for cached, tokens in json.loads(lines[0].removeprefix("ANSWERS"))]


@pytest.mark.parametrize("codec", ["raw", "klt"])
def test_the_second_call_and_the_next_process_reuse(tmp_path: Path, codec: str) -> None:
    """The next process has only what is on disk; where that is exact, so are its answers."""
    script = tmp_path / "offline.py"
    script.write_text(SCRIPT)
    first, again = (run(script, tmp_path / "kv", codec) for _ in range(2))
    assert [cached for cached, _ in first] == [0, 640, 640]
    assert [cached for cached, _ in again] == [640, 640, 640]
    exact = (*first[:2], *again[:2]) if codec == "raw" else first[:2]
    assert {tuple(tokens) for _, tokens in exact} == {tuple(first[0][1])}
