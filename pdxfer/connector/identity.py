"""Who may exchange KV with whom: the engine's fingerprint and each prompt's digest.

Two engines pair only if every fingerprint field is equal; a Grant is served only if both sides see the same prompt.
The weights digest samples every tensor (start, middle, end) of every safetensors file, so that a fine-tune under the
same path or name differs, at the cost of a few milliseconds a file.
"""

import json
import logging
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

log = logging.getLogger(__name__)

SAMPLE_BYTES = 4096
MAX_HEADER_BYTES = 100 << 20
"""safetensors' own bound on its header."""
PLACE_ONLY = {"base_model_name_or_path", "revision"}
"""Keys of an adapter's configuration that say where its base model came from: the fingerprint has what that is."""


def digest_weights(directory: Path) -> str:
    """Digest over the sampled tensors of all weight files in a checkpoint directory; empty if there are none."""
    hasher = blake3()
    files = sorted(directory.glob("*.safetensors"))
    for path in files:
        _digest_safetensors(hasher, path)
    if not files:
        files = sorted(p for pattern in ("*.bin", "*.gguf", "*.pt") for p in directory.glob(pattern))
        for path in files:
            _sample(hasher, path, [(0, path.stat().st_size)])
    return hasher.hexdigest(length=16) if files else ""


def digest_adapter(directory: Path) -> str:
    """As digest_weights, of a LoRA adapter: how strongly its weights count (lora_alpha and so on) is in its config."""
    weights = digest_weights(directory)
    config = directory / "adapter_config.json"
    if not weights or not config.is_file():
        return weights
    fields = {k: v for k, v in json.loads(config.read_bytes()).items() if k not in PLACE_ONLY}
    return blake3(weights.encode() + json.dumps(fields, sort_keys=True).encode()).hexdigest(length=16)


def _digest_safetensors(hasher: Any, path: Path) -> None:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{path} is not a safetensors file: its header claims {length} bytes")
        header = file.read(length)
    hasher.update(header)
    tensors = {k: v for k, v in json.loads(header).items() if k != "__metadata__"}
    base = 8 + length
    _sample(hasher, path, [(base + t["data_offsets"][0], base + t["data_offsets"][1]) for t in tensors.values()])


def _sample(hasher: Any, path: Path, ranges: Iterable[tuple[int, int]]) -> None:
    with path.open("rb") as file:
        for start, end in ranges:
            for offset in sorted({start, max(start, (start + end) // 2), max(start, end - SAMPLE_BYTES)}):
                file.seek(offset)
                hasher.update(file.read(min(SAMPLE_BYTES, end - offset)))


def snapshot(model: str, revision: str = "None") -> Path:
    """Where the weights of a Hugging Face name lie in its cache: a branch like main moves, and its name stays."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=None if revision == "None" else revision, local_files_only=True))
    except (ImportError, ValueError, OSError):
        return Path(model)


def digest_prompt(token_ids: list[int], extra: Iterable[str]) -> bytes:
    """blake3 (16 bytes) over a prompt's token ids and everything else its KV depends on (LoRA, salt, images)."""
    hasher = blake3(np.asarray(token_ids, dtype=np.int64).tobytes())
    for text in extra:
        hasher.update(b"\0" + text.encode())
    return hasher.digest(length=16)
