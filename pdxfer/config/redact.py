"""What may be shown of a setting's value: secrets come out as ***. For show.py and for error messages."""

import re

REDACTED = "***"
_SECRET_NAME = re.compile(r"token|key|secret|password|credential", re.IGNORECASE)
"""Of variables and of a tier's options whose values are not shown."""
_LOGIN = re.compile(r"(://)[^/@\s]+(@)")
"""User and password inside a URL."""
_QUERY = re.compile(r"([?&][^=&\s]*(?:token|key|secret|password|credential)[^=&\s]*=)[^&\s]+", re.IGNORECASE)
"""A setting in a URL's query."""


def redacted(value: object) -> object:
    """The same value without secrets, also inside lists and mappings."""
    match value:
        case str():
            return _QUERY.sub(rf"\1{REDACTED}", _LOGIN.sub(rf"\1{REDACTED}\2", value))
        case list():
            return [redacted(item) for item in value]
        case dict():
            return {key: _entry(key, item) for key, item in value.items()}
    return value


def _entry(name: object, value: object) -> object:
    if isinstance(value, str) and value and _SECRET_NAME.search(str(name)):
        return REDACTED
    return redacted(value)
