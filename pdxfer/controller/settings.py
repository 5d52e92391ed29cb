"""Everything the controller can be told, as one frozen value; made by the launcher from the configuration."""

from dataclasses import dataclass, field

from pdxfer.config.network import is_loopback
from pdxfer.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """Settings of the management API."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs a token."""
    port: int = 5580
    """0 lets the OS choose."""
    token: str = field(default="", repr=False)
    """Bearer token asked for on every path but /health and /ready; empty: none is needed."""
    allow_insecure: bool = False
    """Listen beyond loopback without a token."""
    drain_timeout_s: float = 30.0
    """After SIGTERM running transfers may finish for this long."""
    client_stall_s: float = 60.0
    """A client that has not sent its whole request for this long is cut off."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"controller.port is {self.port}: use 1..65535, or 0 for any free port")
        if self.drain_timeout_s < 0:
            raise ConfigError(f"controller.drain_timeout_s is {self.drain_timeout_s}: use 0 or more")
        if self.client_stall_s <= 0:
            raise ConfigError(f"controller.client_stall_s is {self.client_stall_s}: it must be larger than 0")
        if not is_loopback(self.host) and not self.token and not self.allow_insecure:
            raise ConfigError(
                f"the controller would listen on {self.host}, reachable from other machines, but no token is set: "
                "set security.token_file, or listen on 127.0.0.1"
            )
