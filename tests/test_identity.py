"""Identity: a fine-tune differs, an equal prompt does not, whatever the process."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pdxfer.connector.identity import digest_prompt, digest_weights


def checkpoint(directory: Path, change_tensor: int | None = None, change_at: int = 0) -> Path:
    """A safetensors file of four tensors, one of them different if asked."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = [np.random.default_rng(i).standard_normal(4096).astype(np.float32) for i in range(4)]
    if change_tensor is not None:
        tensors[change_tensor][change_at] += 1
    header, offset = {}, 0
    for i, t in enumerate(tensors):
        header[f"w{i}"] = {"dtype": "F32", "shape": [4096], "data_offsets": [offset, offset + t.nbytes]}
        offset += t.nbytes
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(t.tobytes() for t in tensors)
    )
    return directory


def test_the_same_weights_have_the_same_digest_wherever_they_lie(tmp_path: Path) -> None:
    assert digest_weights(checkpoint(tmp_path / "a")) == digest_weights(checkpoint(tmp_path / "b")) != ""


@pytest.mark.parametrize("tensor", range(4))
@pytest.mark.parametrize("at", [0, 2048, 4095])
def test_a_change_in_any_tensor_changes_the_digest(tmp_path: Path, tensor: int, at: int) -> None:
    changed = checkpoint(tmp_path / "b", change_tensor=tensor, change_at=at)
    assert digest_weights(checkpoint(tmp_path / "a")) != digest_weights(changed)


def test_a_directory_without_weights_has_none(tmp_path: Path) -> None:
    assert digest_weights(tmp_path) == ""


def test_a_header_that_lies_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(ValueError, match="not a safetensors file"):
        digest_weights(tmp_path)


def test_a_prompts_digest_depends_on_tokens_and_extras_only() -> None:
    base = digest_prompt([1, 2, 3], ["salt="])
    assert base == digest_prompt([1, 2, 3], ["salt="])
    others = [([1, 2], "salt="), ([1, 2, 4], "salt="), ([1, 2, 3], "salt=a")]
    assert len({base, *[digest_prompt(tokens, [extra]) for tokens, extra in others]}) == 4


def test_a_prompts_digest_is_the_same_in_another_process() -> None:
    code = "from pdxfer.connector.identity import digest_prompt; print(digest_prompt([7, 8], ['x']).hex())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == digest_prompt([7, 8], ["x"]).hex()
