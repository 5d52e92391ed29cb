"""What must be settled before a plan is made: the model is there, paths are absolute, children log as text.

`model.path` becomes something vLLM can load: the prepared demo model, a directory, or a Hugging Face name.
"""

import re
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from pdxfer.config.schema import Config
from pdxfer.core.errors import ConfigError

DEMO = "demo"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def prepare(config: Config, prepare_demo: Callable[[], Path], *, has_engines: bool = True) -> Config:
    """The configuration that the children get. Raises ConfigError if there is no such model and engines need it."""
    security = replace(
        config.security,
        keys_dir=_absolute(config.security.keys_dir),
        token_file=_absolute(config.security.token_file),
    )
    store = replace(config.store, shared_memory=_absolute(config.store.shared_memory))
    model = replace(
        config.model,
        path=resolve_model(config, prepare_demo) if has_engines else config.model.path,
        served_name=config.model.served_name or Path(config.model.path).name,
    )
    log = replace(config.log, style="text") if config.log.style == "auto" else config.log
    return replace(config, model=model, store=store, security=security, log=log)


def resolve_model(config: Config, prepare_demo: Callable[[], Path]) -> str:
    """The path or name for vLLM. Raises ConfigError if it is neither."""
    path = config.model.path
    if config.engine.kind == "fake":
        return path
    if path == DEMO:
        return str(prepare_demo())
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"model.path {folder} is no model: it has no config.json; give the directory that has one"
            )
        return str(folder.resolve())
    if _HUB_NAME.fullmatch(path) and not folder.parent.is_dir():
        return path
    raise ConfigError(
        f"model.path {path} does not exist: give the directory of a model, a Hugging Face name like org/name, or "
        "`demo` for the small one that comes with pdxfer"
    )


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve()) if path else ""
