"""One thing doctor has to say."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "blocks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`blocks` keeps this configuration from running here; `warning` may surprise; `ok` is good to know."""

    name: str
    status: Status
    text: str
    """What was found."""
    fix: str = ""
    """What to do about it; empty for ok."""


def ok(name: str, text: str) -> Finding:
    """Good to know."""
    return Finding(name=name, status="ok", text=text)


def warning(name: str, text: str, fix: str) -> Finding:
    """May surprise."""
    return Finding(name=name, status="warning", text=text, fix=fix)


def blocks(name: str, text: str, fix: str) -> Finding:
    """Keeps this configuration from running."""
    return Finding(name=name, status="blocks", text=text, fix=fix)
