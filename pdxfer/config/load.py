"""Files, environment and flags → one checked Config; keeps where each value came from.

    defaults < YAML files in order < PDXFER_SECTION__KEY < --set section.key=value < flags

Mappings are merged key by key, lists are replaced. Called by the CLI and by the connector; the only reader of settings
in the environment. Every mistake is a ConfigError that names key, file and line.
"""

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import yaml
from msgspec.inspect import Type

from pdxfer.config.redact import REDACTED, redacted
from pdxfer.config.schema import Config
from pdxfer.config.shape import choices_of, fields_of, is_secret, item_of, root, shape_at, takes_text, value_of
from pdxfer.config.sources import KeyPath, Source, Tree, display, read_env, read_file, read_flags, read_sets
from pdxfer.core.errors import ConfigError

DEFAULT = "default"
_PACKAGE = Path(__file__).resolve().parent.parent
_CONFIG_DIRS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")
"""Of the installed wheel, and of a clone."""
_WHERE = re.compile(r"^(?P<what>.*?) - at `(?:key in )?\$(?P<path>[^`]*)`$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checked configuration and the origin of what was set."""

    config: Config
    origins: Mapping[KeyPath, str]

    def origin(self, path: KeyPath) -> str:
        """Where a value, or the nearest mapping around it, was set; `default` if nowhere."""
        for length in range(len(path), 1, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return DEFAULT


def load_config(files: Iterable[str | Path] = (), sets: Iterable[str] = ()) -> Config:
    """The configuration that these files, the environment and these sets make."""
    return load(files, sets, os.environ).config


def load(
    files: Iterable[str | Path],
    sets: Iterable[str],
    environ: Mapping[str, str],
    flags: Mapping[str, tuple[str, str]] | None = None,
) -> Loaded:
    """As load_config, with a given environment and with origins. `flags`: command-line flag → key and text."""
    sources = [read_file(find_config(file)) for file in files]
    sources += [read_env(environ), read_sets(sets), read_flags(flags or {})]
    tree: Tree = {}
    origins: dict[KeyPath, str] = {}
    for source in sources:
        _check_keys(source, source.tree, root(), ())
        _merge(tree, source.tree)
        origins.update(source.origins)
    return Loaded(config=_convert(tree, origins), origins=origins)


def find_config(name: str | Path) -> Path:
    """The file of a packaged config (`cpu-1p1d`) or of a path."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    is_bare = isinstance(name, str) and path.name == name
    if is_bare:
        for folder in _CONFIG_DIRS:
            found = folder / (name if path.suffix == ".yaml" else f"{name}.yaml")
            if found.is_file():
                return found
    near = difflib.get_close_matches(str(name), packaged_configs(), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    known = ", ".join(packaged_configs())
    raise ConfigError(f"no config {str(name)!r}: {hint or 'it is no file either; '}packaged are {known}")


def packaged_configs() -> list[str]:
    """Names of the configs that came with pdxfer."""
    return sorted({file.stem for folder in _CONFIG_DIRS for file in folder.glob("*.yaml")})


def dump(config: Config) -> str:
    """YAML that loads to an equal configuration; holds secrets."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False)


def _check_keys(source: Source, value: object, shape: Type | None, path: KeyPath) -> None:
    """Refuse keys the schema does not know; read raw text by the type of its key (in place)."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            _check_keys(source, item, item_of(shape), (*path, index))
    if not isinstance(value, dict):
        return
    known = fields_of(shape)
    for key, below in list(value.items()):
        at = (*path, key)
        if known is not None and key not in known:
            raise ConfigError(_unknown(source, at, known))
        expected = known[key] if known is not None else value_of(shape)
        if below is None:
            del value[key]
        elif source.is_text and isinstance(below, str):
            value[key] = _read_text(below, expected, source.origins[at])
            _check_keys(replace(source, is_text=False), value[key], expected, at)
        else:
            _check_keys(source, below, expected, at)


def _unknown(source: Source, path: KeyPath, known: Mapping[str, Type]) -> str:
    key = str(path[-1])
    what = "section" if len(path) == 1 else "key"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    where = _place(source.origins, path)
    if near:
        return f"{where}: unknown {what} {display(path)}; did you mean {display((*path[:-1], near[0]))}?"
    return f"{where}: unknown {what} {display(path)}; known are {', '.join(known)}"


def _place(origins: Mapping[KeyPath, str], path: KeyPath) -> str:
    """Where this path was written: itself, else the nearest around it, else something below it."""
    around = (origins[path[:length]] for length in range(len(path), 0, -1) if path[:length] in origins)
    below = (origin for at, origin in origins.items() if at[: len(path)] == path)
    return next(around, None) or next(below, "configuration")


def _read_text(text: str, shape: Type | None, origin: str) -> object:
    """The value of a variable or flag: text where the key takes text, `a,b` where it takes a list, else YAML."""
    if takes_text(shape):
        return text
    try:
        value: object = yaml.safe_load(text)
    except yaml.YAMLError as error:
        shown = REDACTED if is_secret(shape) else repr(redacted(text))
        raise ConfigError(f"{origin}: {shown} is not a value: {getattr(error, 'problem', error)}") from error
    if isinstance(value, str) and takes_text(item_of(shape)):
        return [part.strip() for part in text.split(",") if part.strip()]
    return value


def _merge(tree: Tree, over: Tree) -> None:
    for key, value in over.items():
        below = tree.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            _merge(below, value)
        else:
            tree[key] = value


def _convert(tree: Tree, origins: Mapping[KeyPath, str]) -> Config:
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        match = _WHERE.match(str(error))
        what, steps = (match["what"], match["path"]) if match else (str(error), "")
        path = _resolve(steps, tree)
        where = _place(origins, path)
        raise ConfigError(f"{where}: {display(path)}: {_expected(what, path, _value(tree, path))}") from error


def _expected(what: str, path: KeyPath, value: object) -> str:
    """msgspec's complaint in our words, with the value that was found."""
    choices = choices_of(shape_at(path))
    if choices and what.startswith("Invalid enum value"):
        return f"expected one of {', '.join(choices)}, got {redacted(value)!r}"
    text = what.replace("`", "").replace("object", "a mapping").replace("array", "a list")
    text = text[0].lower() + text[1:]
    shown = repr(redacted(value))
    is_hidden = any(is_secret(shape_at(path[: length + 1])) for length in range(len(path)))
    if is_hidden or value is None or isinstance(value, dict) or shown in text or len(shown) > 60:
        return text
    return f"{text} {shown}" if ", got " in text else f"{text}, got {shown}"


def _resolve(steps: str, tree: Tree) -> KeyPath:
    """msgspec's `.engine.env[...]` → a path; `[...]` (some value of a mapping) stays at the mapping."""
    path: KeyPath = ()
    for key, index in _STEP.findall(steps):
        if key:
            path = (*path, key)
        elif index != "...":
            path = (*path, int(index))
    return path


def _value(tree: object, path: KeyPath) -> object:
    for part in path:
        if isinstance(tree, dict):
            tree = tree.get(part)
        elif isinstance(tree, list) and isinstance(part, int):
            tree = tree[part]
    return tree
