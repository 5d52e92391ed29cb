"""What may be shown of a setting's value: secrets come out as ***. For show.py and for error messages."""

import re

REDACTED = "***"
_SECRET_NAME = re.compile(r"token|key|secret|password|credential", re.IGNORECASE)
"""Of variables and of a tier's options whose values are not shown."""
_LOGIN = re.compile(r"(://)[^/\s]+(@)")
"""User and password inside a URL, also one whose password holds an @."""
_QUERY = re.compile(r"([?&][^=&\s]*(?:token|key|secret|password|credential)[^=&\s]*=)[^&\s]+", re.IGNORECASE)
"""A setting in a URL's query."""
_FLAG = re.compile(r"--?(?:[\w-]*[-_])?(?:token|key|secret|password|credential)(?P<value>=.*)?", re.IGNORECASE)
"""A command-line flag whose value is not shown: --api-key, --hf-token=..."""


def redacted(value: object) -> object:
    """The same value without secrets, also inside lists and mappings."""
    match value:
        case str():
            return _QUERY.sub(rf"\1{REDACTED}", _LOGIN.sub(rf"\1{REDACTED}\2", value))
        case list():
            return [_item(item, before) for before, item in zip([None, *value], value, strict=False)]
        case dict():
            return {key: entry(key, item) for key, item in value.items()}
    return value


def _item(item: object, before: object) -> object:
    """An item of a list, which may be flags and their values."""
    flag = _FLAG.fullmatch(item) if isinstance(item, str) else None
    if flag and flag["value"]:
        return f"{str(item).partition('=')[0]}={REDACTED}"
    is_value = isinstance(before, str) and (found := _FLAG.fullmatch(before)) and not found["value"]
    return REDACTED if is_value and isinstance(item, str) else redacted(item)


def entry(name: object, value: object) -> object:
    """The value of a variable or option of this name, without secrets."""
    if isinstance(value, str) and value and _SECRET_NAME.search(str(name)):
        return REDACTED
    return redacted(value)
