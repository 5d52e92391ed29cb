"""What the plan says about one process. Data only: supervise.py carries it out, the CLI prints it."""

import re
import shlex
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL")


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

    def environment(self, inherited: dict[str, str]) -> dict[str, str]:
        """The environment of the child, made from ours."""
        kept = {name: value for name, value in inherited.items() if not any(fnmatchcase(name, p) for p in self.unset)}
        return kept | self.env

    def shown(self) -> str:
        """As a shell command, secrets left out."""
        env = [f"{k}={'***' if _SECRET.search(k) else shlex.quote(v)}" for k, v in self.env.items()]
        return " ".join([*env, shlex.join(self.argv)])
