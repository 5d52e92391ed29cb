"""A LoRA adapter for the demo model."""

import json
import os
from pathlib import Path

import numpy as np

from pdxfer.launcher.demo_model import demo_model_dir


def make_adapter(directory: Path) -> Path:
    """A LoRA adapter of rank 4 on every layer's query and value projection; random, large enough to matter."""
    from safetensors.numpy import save_file

    model = json.loads((demo_model_dir(os.environ) / "config.json").read_text())
    hidden, heads, kv_heads = model["hidden_size"], model["num_attention_heads"], model["num_key_value_heads"]
    rng, weights = np.random.default_rng(4), {}
    for layer in range(model["num_hidden_layers"]):
        for part, out in (("q_proj", hidden), ("v_proj", hidden * kv_heads // heads)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            weights[f"{name}.lora_A.weight"] = rng.normal(0, 0.05, (4, hidden)).astype(np.float32)
            weights[f"{name}.lora_B.weight"] = rng.normal(0, 0.05, (out, 4)).astype(np.float32)
    directory.mkdir()
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
