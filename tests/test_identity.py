"""Identity: a fine-tune differs, an equal prompt does not, whatever the process."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pdxfer.connector.identity import digest_adapter, digest_prompt, digest_weights


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


def adapter(directory: Path, **config: object) -> Path:
    """A LoRA adapter's directory."""
    checkpoint(directory)
    (directory / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16, **config}))
    return directory


def test_an_adapters_strength_changes_its_digest(tmp_path: Path) -> None:
    """Its weights are the same, its KV is not; where its base model was loaded from says nothing."""
    one = digest_adapter(adapter(tmp_path / "a", base_model_name_or_path="/here"))
    assert one == digest_adapter(adapter(tmp_path / "b", base_model_name_or_path="/there")) != ""
    others: list[dict[str, object]] = [{"lora_alpha": 32}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 4}}]
    digests = {digest_adapter(adapter(tmp_path / f"c{i}", **config)) for i, config in enumerate(others)}
    assert len({one, *digests}) == 4


@pytest.mark.slow
def test_an_adapter_that_cannot_be_read_ends_no_engine(tmp_path: Path) -> None:
    """A link that leads nowhere is passed over; damaged weights or config make an identity that nobody else has."""
    from pdxfer.connector.requests import adapter_digest

    whole = adapter(tmp_path / "whole")
    before = adapter_digest(str(whole))
    (whole / "README.md").symlink_to(tmp_path / "nowhere")
    assert adapter_digest(str(whole)) == before == digest_adapter(whole)
    for name in ("model.safetensors", "adapter_config.json"):
        damaged = adapter(tmp_path / f"damaged {name}")
        for content in (b"", b"[]", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 1 << 60)):
            (damaged / name).write_bytes(content)
            assert adapter_digest(str(damaged)) != adapter_digest(str(damaged))
    assert adapter_digest("user/adapter") == "user/adapter"


@pytest.mark.slow
def test_an_adapter_is_looked_at_where_vllm_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name stays while its weights move: below ~, and in Hugging Face's cache, where main is another commit now."""
    import huggingface_hub

    from pdxfer.connector.requests import adapter_digest

    one, two = adapter(tmp_path / "one"), adapter(tmp_path / "two", lora_alpha=32)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert adapter_digest("~nobody-here/one") == "~nobody-here/one"
    assert adapter_digest("~/one") == adapter_digest(str(one)) != adapter_digest(str(two))
    for commit in (one, two):
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, commit=commit, **__: str(commit))
        assert adapter_digest("user/adapter") == adapter_digest(str(commit))


def test_a_prompts_digest_depends_on_tokens_and_extras_only() -> None:
    base = digest_prompt([1, 2, 3], ["salt="])
    assert base == digest_prompt([1, 2, 3], ["salt="])
    others = [([1, 2], "salt="), ([1, 2, 4], "salt="), ([1, 2, 3], "salt=a")]
    assert len({base, *[digest_prompt(tokens, [extra]) for tokens, extra in others]}) == 4


def test_a_prompts_digest_is_the_same_in_another_process() -> None:
    code = "from pdxfer.connector.identity import digest_prompt; print(digest_prompt([7, 8], ['x']).hex())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == digest_prompt([7, 8], ["x"]).hex()
