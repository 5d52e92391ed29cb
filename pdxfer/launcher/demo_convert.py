"""GGUF file → a checkpoint directory that vLLM serves: bfloat16 safetensors, tokenizer, chat template.

Run by demo_model as a process of its own (`python -m pdxfer.launcher.demo_convert GGUF OUT`), so that torch and its
memory are gone afterwards. The only file of the launcher that imports transformers.
"""

import sys
from pathlib import Path

RECIPE = 1
"""Goes up whenever the same GGUF file gives another checkpoint; older ones are then made again."""


def convert(gguf: Path, out: Path) -> None:
    """Write the checkpoint into the directory `out`. Needs about 1 GB of memory and half a minute of one core."""
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype="bfloat16"
    )
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if not tokenizer.chat_template:
        raise ValueError(f"{gguf} has no chat template")
    # The GGUF says `pre: smollm`: each digit by itself, then GPT-2's rule. transformers applies only the second.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for file in out.iterdir():
        file.chmod(0o644)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
