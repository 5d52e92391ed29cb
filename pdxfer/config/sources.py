"""One place settings come from (a YAML file, the environment, --set) as a plain tree with the origin of every value.

Knows YAML and the spelling of variables, not the schema's meaning; config/load.py checks and merges. Never logs values.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from pdxfer.config.redact import REDACTED
from pdxfer.config.shape import is_secret, shape_at
from pdxfer.core.errors import ConfigError

ENV_PREFIX = "PDXFER_"
_MAX_DEPTH = 8
KeyPath = tuple[str | int, ...]
"""("topology", "prefill", 0, "port")."""
Tree = dict[str, object]


@dataclass(slots=True)
class Source:
    """One tree and where each of its values was written."""

    name: str
    tree: Tree = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    """Path of a value or mapping → `file:line`, `PDXFER_A__B` or `--set a.b`."""
    is_text: bool = False
    """Values are raw text, to be read by the type of their key."""

    def put(self, path: KeyPath, value: object, origin: str) -> None:
        """Set one value, making the mappings above it. Raises ConfigError if one of them is a value already."""
        at: Tree = self.tree
        for key in path[:-1]:
            below = at.setdefault(str(key), {})
            if not isinstance(below, dict):
                above = ".".join(_shown(path[:-1], path[:-1]))
                raise ConfigError(f"{origin}: {above} is already set to one value by the {self.name}")
            at = below
        at[str(path[-1])] = value
        self.origins[path] = origin


def display(path: KeyPath) -> str:
    """`topology.prefill[0].port`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read_file(path: Path) -> Source:
    """Parse one YAML file. Raises ConfigError with file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path} is not UTF-8 text: {error}") from error
    source = Source(str(path))
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            return source
        tree = _Reader(str(path), source.origins).read(root, ())
    except RecursionError as error:
        raise ConfigError(f"config file {path} is nested deeper than any setting") from error
    except yaml.YAMLError as error:
        raise ConfigError(_yaml_problem(path, error)) from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}:1: expected sections (model:, engine:, ...), got {type(tree).__name__}")
    source.tree = tree
    return source


def read_env(environ: Mapping[str, str]) -> Source:
    """Settings of PDXFER_SECTION__KEY variables; other variables of ours have no double underscore."""
    source = Source("environment", is_text=True)
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and "__" in name:
            section, *rest = name.removeprefix(ENV_PREFIX).split("__")
            if not rest or not all((section, *rest)):
                raise ConfigError(f"{name}: write a setting's variable as {ENV_PREFIX}SECTION__KEY")
            path = (section.lower(), rest[0].lower(), *rest[1:])
            source.put(path, environ[name], ENV_PREFIX + "__".join(_shown((section, *rest), path)))
    return source


def read_sets(sets: Iterable[str]) -> Source:
    """Settings of `--set section.key=value` flags."""
    source = Source("--set", is_text=True)
    for text in sets:
        key, equals, value = text.partition("=")
        path = tuple(key.strip().split("."))
        if not equals or len(path) < 2 or not all(path):
            raise ConfigError(f"--set {text!r}: write --set section.key=value, as in --set router.port=5571")
        source.put(path, value, f"--set {'.'.join(_shown(path, path))}")
    return source


def read_flags(flags: Mapping[str, tuple[str, str]]) -> Source:
    """Settings of flags of their own, as `--model`: flag → (section.key, text)."""
    source = Source("flags", is_text=True)
    for flag, (key, text) in flags.items():
        source.put(tuple(key.split(".")), text, flag)
    return source


def _shown(parts: KeyPath, path: KeyPath) -> list[str]:
    """A path as it was written, without the names below a secret key, which are secrets."""
    for length in range(1, len(path)):
        if is_secret(shape_at(path[:length])):
            return [*map(str, parts[:length]), REDACTED]
    return list(map(str, parts))


class _Reader:
    """YAML nodes → plain values; notes where each was written and refuses repeated keys."""

    def __init__(self, file: str, origins: dict[KeyPath, str]) -> None:
        self._file, self._origins = file, origins
        self._scalars = yaml.SafeLoader("")

    def read(self, node: yaml.Node, path: KeyPath) -> object:
        line = node.start_mark.line + 1
        if len(path) > _MAX_DEPTH:
            raise ConfigError(f"{self._file}:{line}: {display(path[:3])}... is nested deeper than any setting")
        self._origins[path] = f"{self._file}:{line}"
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        try:
            value = self._scalars.construct_object(node)
            if isinstance(value, str):
                value.encode()
        except ValueError as error:  # a date or number that is none, half a character
            shown = "" if is_secret(shape_at(path)) else f" {ascii(str(node.value)[:40])}"
            raise ConfigError(f"{self._file}:{line}: {display(path)}:{shown} cannot be read: {error}") from error
        if isinstance(value, str) and "\0" in value:
            raise ConfigError(f"{self._file}:{line}: {display(path)} holds a zero byte, which no setting can")
        return value

    def _read_mapping(self, node: yaml.MappingNode, path: KeyPath) -> Tree:
        tree: Tree = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in tree:
                where = f"a key of {display(path)}" if is_secret(shape_at(path)) else display((*path, key))
                raise ConfigError(f"{self._file}:{line}: {where} is set twice in this file; keep one of the two")
            tree[key] = self.read(value_node, (*path, key))
            self._origins[(*path, key)] = f"{self._file}:{line}"
        return tree


def _yaml_problem(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    line = f":{mark.line + 1}" if mark is not None else ""
    return f"{path}{line}: not valid YAML: {getattr(error, 'problem', None) or error}"
