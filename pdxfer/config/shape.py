"""What the schema says about a key: its fields, items, whether it takes text, whether it is secret, its description.

The one place that knows msgspec's inspection; load.py and show.py ask here. Pure.
"""

import ast
import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

import msgspec
from msgspec.inspect import DictType, ListType, LiteralType, Metadata, StrType, StructType, Type, UnionType, type_info

from pdxfer.config import schema, store


@cache
def root() -> Type:
    """Shape of the whole configuration."""
    return type_info(schema.Config)


def fields_of(shape: Type | None) -> Mapping[str, Type] | None:
    """Key → shape of a section; None where keys are free, or there are none."""
    for part in _parts(shape):
        if isinstance(part, StructType):
            return {field.encode_name: field.type for field in part.fields}
    return None


def value_of(shape: Type | None) -> Type | None:
    """Shape of the values of a free mapping; None if it is none."""
    return next((part.value_type for part in _parts(shape) if isinstance(part, DictType)), None)


def item_of(shape: Type | None) -> Type | None:
    """Shape of a list's items; None if it takes no list."""
    return next((part.item_type for part in _parts(shape) if isinstance(part, ListType)), None)


def takes_text(shape: Type | None) -> bool:
    """Whether any text is a value of this key."""
    return any(isinstance(part, StrType) for part in _parts(shape))


def choices_of(shape: Type | None) -> list[str]:
    """The values a key is limited to, if it is."""
    return [str(value) for part in _parts(shape) if isinstance(part, LiteralType) for value in part.values]


def shape_at(path: Iterable[str | int]) -> Type | None:
    """Shape of the key at a path from the root; None if there is no such key."""
    shape: Type | None = root()
    for part in path:
        fields = fields_of(shape)
        shape = item_of(shape) if isinstance(part, int) else fields.get(part) if fields else value_of(shape)
    return shape


def is_secret(shape: Type | None) -> bool:
    """Whether values, and names below it, must not be shown."""
    return isinstance(shape, Metadata) and bool((shape.extra or {}).get("secret"))


@cache
def descriptions() -> Mapping[str, Mapping[str, str]]:
    """Section class → key → the text under it in schema.py and its parts."""
    found: dict[str, dict[str, str]] = {}
    for node in (*ast.parse(inspect.getsource(schema)).body, *ast.parse(inspect.getsource(store)).body):
        if not isinstance(node, ast.ClassDef):
            continue
        texts = found.setdefault(node.name, {})
        for declared, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(declared, ast.AnnAssign) and isinstance(text, ast.Expr):
                assert isinstance(declared.target, ast.Name) and isinstance(text.value, ast.Constant)
                texts[declared.target.id] = " ".join(str(text.value.value).split())
    return found


def json_schema() -> dict[str, object]:
    """JSON Schema of a configuration file, with the descriptions."""
    schema_root = msgspec.json.schema(schema.Config)
    for name, section in schema_root["$defs"].items():
        for key, text in descriptions().get(name, {}).items():
            section["properties"][key]["description"] = text
    return dict(schema_root)


def _parts(shape: Type | None) -> Iterator[Type]:
    """A shape without its metadata; of a union, its members."""
    while isinstance(shape, Metadata):
        shape = shape.type
    if isinstance(shape, UnionType):
        for member in shape.types:
            yield from _parts(member)
    elif shape is not None:
        yield shape
