"""KV of contexts as a vLLM engine has it: prefilled by `pdxfer.LLM` into its memory tier, read back, unpacked.

`kv_of` runs an engine in a process of its own (this module's main) and keeps what it found in a file, so that a second
run with the same contexts starts none. Used by the codec bench.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pdxfer.core.errors import ConfigError, PdxferError

Array = npt.NDArray[Any]

SAVE_S = 60.0
"""How long saving one context may take."""


class NoKvError(PdxferError):
    """The engine did not give the KV; its output says why."""


def kv_of(model: Path, contexts: Mapping[str, Sequence[int]], chunk: int, keep: Path) -> dict[str, Array]:
    """Name → bfloat16 bits [L, 2, H, T, D] of each context of token ids, whole chunks only. Minutes."""
    if any(len(ids) % chunk for ids in contexts.values()):
        raise ConfigError(f"vLLM's KV comes in whole chunks: give a --context that is a multiple of {chunk}")
    wanted = json.dumps([str(model), chunk, {name: list(ids) for name, ids in contexts.items()}])
    if keep.is_file():
        with np.load(keep) as found:
            if str(found["wanted"]) == wanted:
                return {name: found[f"kv-{name}"] for name in contexts}
    keep.parent.mkdir(parents=True, exist_ok=True)
    request = keep.with_suffix(".json")
    request.write_text(wanted, encoding="utf-8")
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pdxfer.bench.codec_kv", str(request), str(keep)],
        env=env,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise NoKvError(f"the engine ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    with np.load(keep) as found:
        return {name: found[f"kv-{name}"] for name in contexts}


def main(request: Path, keep: Path) -> None:
    """In the engine's process."""
    from vllm import SamplingParams

    import pdxfer
    from pdxfer.connector.packing import form_of_engine

    wanted = request.read_text(encoding="utf-8")
    model, chunk, contexts = json.loads(wanted)
    longest = max(len(ids) for ids in contexts.values())
    llm = pdxfer.LLM(
        model=model, cache={"chunk_size": chunk, "local_cpu": 2}, dtype="bfloat16", max_model_len=longest + chunk,
        enforce_eager=True,
    )  # fmt: skip
    form = form_of_engine(llm.llm_engine.vllm_config)
    found: dict[str, Any] = {}
    for name, ids in contexts.items():
        llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        deadline = time.monotonic() + SAVE_S
        while llm.lookup(ids) < len(ids) // chunk:
            if time.monotonic() > deadline:
                raise NoKvError(f"{name}: {llm.lookup(ids)} of {len(ids) // chunk} chunks were saved in {SAVE_S:g} s")
            time.sleep(0.05)
        (chunks,) = llm.get(ids)
        pieces = [form.unpack(np.frombuffer(raw, np.uint8), chunk).view(np.uint16) for raw in chunks]
        found[f"kv-{name}"] = np.concatenate([p.reshape(form.spec(chunk, 0).shape) for p in pieces], axis=3)
    np.savez(keep, wanted=np.array(wanted), **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
