"""Everything the proxy can be told, as one frozen value; made by the launcher from the config section `proxy`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pdxfer.config.network import is_loopback
from pdxfer.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """Settings of one proxy process."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs `api_keys`."""
    port: int = 8000
    """0 lets the OS choose."""
    router: str = "tcp://127.0.0.1:5570"
    """ZMQ endpoint of the router."""
    keys_dir: Path | None = None
    """Directory with the router's public key and ours; None: no encryption."""
    allow_insecure: bool = False
    """Listen beyond loopback without api_keys."""
    proxy_id: str = "proxy"
    """Our identity at the router; unique among its proxies."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Model name that clients may use → name that the engines serve."""
    passthrough: tuple[str, ...] = ()
    """Further paths that go to a decode engine as they are, except that JSON loses kv_transfer_params and gets its
    tenant's cache_salt; a trailing * matches any rest."""
    api_keys: Mapping[str, str] = field(default_factory=dict)
    """Bearer token → tenant. Empty: no authentication, and the client's own Authorization reaches the engines."""
    engine_api_key: str = ""
    """Sent to the engines as their bearer token; needed when they run with --api-key and `api_keys` is set."""
    request_timeout_s: float = 600.0
    """From arrival to last byte."""
    pair_timeout_s: float = 150.0
    """Longest wait for the router's answer, its queue for free capacity included."""
    transfer_timeout_s: float = 120.0
    """Told to the engines: KV that has not arrived after this is recomputed by decode."""
    client_stall_s: float = 60.0
    """A client that takes no more of its answer, or has not sent its whole request, for this long is cut off."""
    connect_timeout_s: float = 5.0
    """To an engine."""
    max_body_bytes: int = 32 << 20
    """Larger requests are answered 413."""
    max_in_flight: int = 1024
    """Admitted requests; more are answered 429."""
    timeline_hold_s: float = 30.0
    """Response headers wait at most this long for the first body byte, so that they can carry the timeline."""
    otlp_endpoint: str = ""
    """http://HOST:PORT of an OpenTelemetry collector; empty: no traces."""
    trace_sample: float = 1.0
    """Part of the requests that are traced, unless the client's traceparent decides."""
    timeline_entries: int = 1000
    """Requests whose timeline can be asked for."""
    models_ttl_s: float = 5.0
    """How long a list of models is believed."""
    drain_timeout_s: float = 30.0
    """After SIGTERM, running requests may finish for this long."""

    def __post_init__(self) -> None:
        for name in (
            "request_timeout_s", "pair_timeout_s", "transfer_timeout_s", "client_stall_s", "connect_timeout_s",
            "max_body_bytes", "max_in_flight", "timeline_hold_s", "timeline_entries", "drain_timeout_s",
        ):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ConfigError(f"proxy.{name} is {getattr(self, name)}: it must be larger than 0")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"proxy.port is {self.port}: use 1..65535, or 0 for any free port")
        for path in self.passthrough:
            if not path.startswith("/"):
                raise ConfigError(f"proxy.passthrough has {path!r}: write the path from its first /, as in '/tokenize'")
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError(
                "proxy.api_keys has an empty token: every client without one would be let in. Write one, or take the "
                "entry out"
            )
        for name in (self.proxy_id, *self.api_keys.values()):
            if not 0 < len(name) <= 128:
                raise ConfigError(
                    f"proxy: the name {name[:40]!r} (proxy_id or a tenant of api_keys) must be 1..128 long"
                )
        if not is_loopback(self.host) and not self.api_keys and not self.allow_insecure:
            raise ConfigError(
                f"the proxy would listen on {self.host} (proxy.bind, or network.bind), reachable from other machines, "
                "but no client tokens are set: set proxy.api_keys, or listen on 127.0.0.1"
            )
