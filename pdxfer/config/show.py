"""A configuration as rows of key, value and origin, for `pdxfer config show`. Secrets come out as ***."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from pdxfer.config.load import Loaded
from pdxfer.config.shape import descriptions, fields_of, is_secret, root

REDACTED = "***"
_SECRET_NAME = re.compile(r"token|key|secret|password|credential", re.IGNORECASE)
"""Of environment variables whose values are not shown."""
_URL_SECRET = re.compile(r"(://)[^/@\s]+(@)")
"""User and password inside a URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting."""

    key: str
    value: object
    """As in YAML."""
    origin: str
    """`default`, `file:line`, a variable or a flag."""
    meaning: str


def rows(loaded: Loaded) -> list[Row]:
    """All settings in the order of the schema."""
    return list(_rows(loaded))


def _rows(loaded: Loaded) -> Iterator[Row]:
    tree = msgspec.to_builtins(loaded.config)
    sections = fields_of(root())
    assert sections is not None
    for section, shape in sections.items():
        keys = fields_of(shape)
        assert keys is not None
        texts = descriptions()[type(getattr(loaded.config, section)).__name__]
        for key, key_shape in keys.items():
            value = tree[section][key]
            if is_secret(key_shape) and value:
                value = REDACTED
            elif isinstance(value, dict):
                value = {k: REDACTED if _SECRET_NAME.search(k) else v for k, v in value.items()}
            yield Row(
                key=f"{section}.{key}",
                value=_without_url_secrets(value),
                origin=_origin(loaded, section, key),
                meaning=texts[key],
            )


def _without_url_secrets(value: object) -> object:
    """The same value, with user and password in URLs replaced, also inside lists and mappings."""
    match value:
        case str():
            return _URL_SECRET.sub(rf"\1{REDACTED}\2", value)
        case list():
            return [_without_url_secrets(item) for item in value]
        case dict():
            return {k: _without_url_secrets(v) for k, v in value.items()}
    return value


def _origin(loaded: Loaded, section: str, key: str) -> str:
    """Where the key was set; of a mapping that several places filled, all of them."""
    if (section, key) in loaded.origins:
        return loaded.origin((section, key))
    below = [origin for path, origin in loaded.origins.items() if path[:2] == (section, key)]
    return ", ".join(dict.fromkeys(below)) or loaded.origin((section, key))
