"""What the plan says about one process. Data only: supervise.py carries it out, the CLI prints it."""

import shlex
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from pdxfer.config.redact import REDACTED, entry, redacted


@dataclass(frozen=True, slots=True, kw_only=True)
class PortUse:
    """A port the process will listen on."""

    host: str
    port: int
    key: str
    """Setting that chose it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process to start and keep."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    """Added to our own environment."""
    unset: tuple[str, ...] = ()
    """Taken out of our own environment; * matches any text."""
    ports: tuple[PortUse, ...] = ()
    ready_url: str
    """Answers 200 when the process is ready; `unix:PATH`: a socket that accepts then."""
    ready_timeout_s: float
    """Not ready after this in its first life: the launch ends. In a later one it is waited for."""
    depends_on: tuple[str, ...] = ()
    """Started when these are ready."""
    stop_order: int = 0
    """Smaller numbers are told to leave first."""
    stop_timeout_s: float = 10.0
    """Killed if it has not left by then."""
    drains: bool = False
    """Leaves with exit code 0 only if it has cut nothing off."""

    def environment(self, inherited: dict[str, str]) -> dict[str, str]:
        """The environment of the child, made from ours."""
        kept = {name: value for name, value in inherited.items() if not any(fnmatchcase(name, p) for p in self.unset)}
        return kept | self.env

    def shown(self) -> str:
        """As a shell command, secrets left out."""
        env = [f"{name}={_quoted(entry(name, value))}" for name, value in self.env.items()]
        argv = redacted(list(self.argv))
        assert isinstance(argv, list)
        return " ".join([*env, *map(_quoted, argv)])


def _quoted(value: object) -> str:
    return REDACTED if value == REDACTED else shlex.quote(str(value))
