"""Everything the router can be told, as one frozen value; made by the launcher from the config section `router`."""

from dataclasses import dataclass
from pathlib import Path

from pdxfer.core.errors import ConfigError

LIVE = (
    "min_remote_tokens", "max_queue", "max_wait_s", "no_engine_wait_s", "max_bypasses", "lease_s", "missed_heartbeats",
    "forget_s",
)  # fmt: skip
"""Settings that may change while the router runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Settings of one router."""

    bind: str = "tcp://127.0.0.1:5570"
    """ZMQ address to listen on; port 0 lets the OS choose. Beyond loopback it needs `keys_dir`."""
    keys_dir: Path | None = None
    """Directory with server.key and the members' public keys; None: no encryption, no authentication."""
    allow_insecure: bool = False
    """Listen beyond loopback without keys."""
    heartbeat_s: float = 0.5
    """Interval at which members report."""
    missed_heartbeats: int = 3
    """An engine that missed this many is suspect: no new pairings, its transfers go on without it."""
    settle_s: float = 0.0
    """After the start, members are told of their peers only this long later: a restarted router must not name the
    first to come back no peers, for they would cut each other off. The launcher sets two heartbeats."""
    forget_s: float = 60.0
    """A silent engine is forgotten after this long."""
    min_remote_tokens: int = 256
    """Shorter prompts go to a decode engine alone."""
    max_queue: int = 1024
    """Requests that may wait for capacity; more are answered Busy."""
    max_wait_s: float = 120.0
    """Longest wait for capacity, whatever deadline the proxy gave."""
    no_engine_wait_s: float = 2.0
    """Longest wait when no decode engine could take the request (start, restart of the router)."""
    max_bypasses: int = 64
    """Requests that may overtake the oldest waiting one; then a decode engine is kept free for it."""
    lease_s: float = 120.0
    """Life of a pairing; renewed when its prefill starts and with each grant."""
    otlp_endpoint: str = ""
    """OpenTelemetry collector that our spans go to; empty: none are made."""
    message_rate: float = 20_000.0
    """Messages per second and connection, and burst; each 4 KiB of a message count as one more. What is beyond is
    dropped and counted."""

    def __post_init__(self) -> None:
        for name in (
            "heartbeat_s", "forget_s", "max_queue", "max_wait_s", "no_engine_wait_s",
            "max_bypasses", "lease_s", "message_rate",
        ):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ConfigError(f"router.{name} is {getattr(self, name)}: it must be larger than 0")
        if self.missed_heartbeats < 2:
            raise ConfigError(
                f"router.missed_heartbeats is {self.missed_heartbeats}: use 2 or more; with 1 every engine is suspect "
                "between one heartbeat and the next"
            )
        if self.min_remote_tokens < 0:
            raise ConfigError(f"router.min_remote_tokens is {self.min_remote_tokens}: use 0 or more")

    @property
    def attention_s(self) -> float:
        """Longest time between two ticks of a router that is not held up; what goes beyond is nobody's silence."""
        return self.heartbeat_s / 2

    @property
    def tick_s(self) -> float:
        """Interval of ticks."""
        return min(0.1, self.heartbeat_s / 4)

    @property
    def suspect_s(self) -> float:
        """Silence after which an engine is suspect."""
        return self.heartbeat_s * self.missed_heartbeats
