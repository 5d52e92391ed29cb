"""Is the model there and whole: its config, and the header of every weights file."""

import json
from pathlib import Path

from pdxfer.cli.checks.finding import Finding, blocks, ok
from pdxfer.config.schema import Config
from pdxfer.core.errors import ConfigError
from pdxfer.launcher.prepare import DEMO, resolve_model

_MAX_HEADER = 100 << 20
"""safetensors' own bound."""


def check_model(config: Config, demo: Path) -> tuple[list[Finding], int]:
    """Findings, and the bytes of all weights (0 where unknown). `demo`: where the demo model would be."""
    path = config.model.path
    if config.engine.kind == "fake":
        return [ok("model", "engines are fake: none is needed")], 0
    if path == DEMO and not (demo / "config.json").is_file():
        return [ok("model", f"demo is not prepared yet ({demo}); `pdxfer launch` or `pdxfer model demo` does it")], 0
    try:
        folder = Path(resolve_model(config, lambda: demo))
    except ConfigError as error:
        return [blocks("model", str(error), "set model.path, or give --model")], 0
    if not folder.is_dir():
        return [ok("model", f"{folder} is a Hugging Face name: vLLM loads it from its cache or the network")], 0
    try:
        return _read(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [blocks("model", f"{folder} cannot be read: {error}", "copy or prepare the model again")], 0


def _read(folder: Path) -> tuple[list[Finding], int]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = ", ".join(config.get("architectures", [])) or config["model_type"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = sorted(file.name for file in folder.glob("*.safetensors"))
    if not names:
        return [ok("model", f"{folder}: {kind}; no safetensors here, vLLM finds out")], 0
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        text = f"{folder}: {', '.join(missing[:3])} of its index is missing"
        return [blocks("model", text, "copy or prepare the model again")], 0
    size = sum(_check_weights(folder / name) for name in names)
    return [ok("model", f"{folder}: {kind}, {len(names)} weights files, {size / (1 << 30):.2f} GiB")], size


def _check_weights(file: Path) -> int:
    """Size of a safetensors file whose header says exactly that size. Raises ValueError if it is cut short."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(size, _MAX_HEADER):
            raise ValueError(f"{file.name} has no safetensors header")
        tensors = json.loads(stream.read(length))
    end = max((entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"), default=0)
    if 8 + length + end != size:
        raise ValueError(f"{file.name} is {size} bytes, its header says {8 + length + end}")
    return size
