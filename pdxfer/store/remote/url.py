"""A remote tier's URL and options as typed values: hosts, user, password, path, settings.

Called by the tiers' constructors. Settings come from the URL's query and from `options` of the tier (which win); an
unknown one is a ConfigError that names the nearest known. Nothing here prints a password.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from urllib.parse import parse_qsl, unquote, urlsplit

from pdxfer.config.store import TierConfig
from pdxfer.core.errors import ConfigError

_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::(?P<port>\d{1,5}))?")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """One server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteUrl:
    """What a tier's configuration says, split up."""

    scheme: str
    addresses: tuple[Address, ...]
    user: str = ""
    password: str = field(default="", repr=False)
    path: str = ""
    """Without the leading slash."""
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)
    shown: str = ""
    """The URL without its password, for messages."""

    def text(self, name: str, default: str = "") -> str:
        """A setting as it is."""
        return self.settings.get(name, default)

    def number(self, name: str, default: float, least: float = 0.0) -> float:
        """A setting as a number >= `least`."""
        text = self.settings.get(name)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = least - 1
        if not value >= least:
            raise ConfigError(f"store.tiers: {self.shown}: {name} is {text!r}; it must be a number >= {least:g}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """A setting as yes or no."""
        text = self.settings.get(name, "true" if default else "false").lower()
        if text not in _TRUE + _FALSE:
            raise ConfigError(f"store.tiers: {self.shown}: {name} is {text!r}; use true or false")
        return text in _TRUE


def parse_url(config: TierConfig, known: Iterable[str], default_port: int = 0) -> RemoteUrl:
    """Split `config.url` and merge its options. `known` names the settings there are."""
    shown = without_password(config.url)
    try:
        parts = urlsplit(config.url)
    except ValueError as error:
        raise ConfigError(f"store.tiers: url {shown!r} cannot be read: {error}") from error
    login, _, hosts = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    settings = dict(parse_qsl(parts.query, keep_blank_values=True)) | dict(config.options)
    names = sorted(known)
    for name in settings:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(names)
            raise ConfigError(f"store.tiers: {shown}: unknown setting {name!r}; {hint}")
    return RemoteUrl(
        scheme=parts.scheme.lower(),
        addresses=tuple(_address(text, default_port, shown) for text in hosts.split(",") if text),
        user=unquote(user),
        password=unquote(password),
        path=unquote(parts.path.lstrip("/")),
        settings=settings,
        shown=shown,
    )


def without_password(url: str) -> str:
    """The URL as it may appear in a log: password and query left out."""
    return re.sub(r"(://[^/@:]*):.*@", r"\1:***@", url.split("?")[0])


def _address(text: str, default_port: int, shown: str) -> Address:
    match = _HOST.fullmatch(text)
    port = int(match["port"] or default_port) if match else 0
    if match is None or port > 65535:
        raise ConfigError(f"store.tiers: url {shown!r}: {text!r} is not HOST or HOST:PORT")
    return Address(host=match["host"].strip("[]"), port=port)
