"""A configuration as rows of key, value and origin, for `pdxfer config show`. Secrets come out as ***."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from pdxfer.config.load import Loaded
from pdxfer.config.redact import REDACTED, redacted
from pdxfer.config.shape import descriptions, fields_of, is_secret, root


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
            yield Row(
                key=f"{section}.{key}",
                value=redacted(value),
                origin=_origin(loaded, section, key),
                meaning=texts[key],
            )


def _origin(loaded: Loaded, section: str, key: str) -> str:
    """Where the key was set; of a mapping that several places filled, all of them."""
    if (section, key) in loaded.origins:
        return loaded.origin((section, key))
    below = [origin for path, origin in loaded.origins.items() if path[:2] == (section, key)]
    return ", ".join(dict.fromkeys(below)) or loaded.origin((section, key))
