"""What the connector needs, from vLLM's kv_connector_extra_config and the pdxfer config it names."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from pdxfer.config.load import load_config
from pdxfer.config.network import advertised, bind_address
from pdxfer.config.schema import Config
from pdxfer.config.store import CodecConfig, StoreConfig
from pdxfer.connector.compat import VllmConfig
from pdxfer.core.errors import ConfigError
from pdxfer.core.ids import is_engine_id
from pdxfer.router.client import ClientSecurity
from pdxfer.transport.base import EndpointOptions
from pdxfer.wire.keys import load_client_security
from pdxfer.wire.messages import Role
from pdxfer.wire.run_sockets import socket_path

KNOWN = ("role", "config", "set", "router", "url", "engine_id", "layerwise")
"""Keys of kv_connector_extra_config: `config` is a file, a packaged name or a list of them, `set` a list of key=value;
`layerwise` stands here too because vLLM asks a class method for it before any config is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    """One engine's settings; the same in both halves."""

    role: Role
    engine_id: str
    url: str
    """HTTP base under which the proxy reaches this engine."""
    router: str
    """ZMQ endpoint of the router; empty runs without one."""
    halves_path: str
    security: ClientSecurity | None = None
    allow_insecure: bool = False
    """The cluster runs without keys on purpose."""
    channels: tuple[str, ...] = ("local", "nixl", "tcp")
    options: EndpointOptions = field(default_factory=EndpointOptions)
    chunk_tokens: int = 256
    integrity: str = "full"
    layerwise: bool = True
    drain_s: float = 0.2
    spill_after_s: float = 2.0
    max_resumes: int = 1
    max_deadline_s: float = 600.0
    """Upper bound of a request's own deadline."""
    store: StoreConfig = field(default_factory=StoreConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)
    otlp_endpoint: str = ""
    """Where our spans go; empty: none are made."""
    max_early: int = 4096
    """Messages about transfers whose request has not arrived yet."""

    @property
    def tables_dir(self) -> Path:
        """Calibrated tables of codecs, by model."""
        return Path(self.codec.tables_dir).expanduser()


def settings_from(config: VllmConfig) -> ConnectorSettings:
    """Settings of this engine. Raises ConfigError naming the key of kv_connector_extra_config that is wrong."""
    transfer = config.kv_transfer_config
    assert transfer is not None
    extra: dict[str, Any] = transfer.kv_connector_extra_config
    unknown = sorted(set(extra) - set(KNOWN))
    if unknown:
        raise ConfigError(f"kv_connector_extra_config: unknown key {unknown[0]!r}; known are {', '.join(KNOWN)}")
    if not transfer.is_kv_consumer:
        raise ConfigError(
            f'kv_role is {transfer.kv_role}; use "kv_both" on every engine: a producer is given blocks that a step '
            "may still write, and what is loaded into them is wrong"
        )
    role = extra.get("role", "both")
    if role not in ("prefill", "decode", "both"):
        raise ConfigError(f"kv_connector_extra_config: role is {role!r}; use prefill, decode or both")
    run_id = str(transfer.engine_id)
    engine_id = str(extra.get("engine_id") or _engine_id(role, str(extra.get("url", "")), run_id))
    if not is_engine_id(engine_id):
        raise ConfigError(f"engine_id {engine_id!r}: use letters, digits, '.', '_' and '-', at most 64")
    ours = _load(extra)
    router = str(extra.get("router") or ours.router.endpoint)
    if router and not extra.get("url"):
        raise ConfigError('kv_connector_extra_config: "url" is missing: the http://HOST:PORT of this vLLM server')
    transport, keys_dir = ours.transport, ours.security.keys_dir
    return ConnectorSettings(
        role=role,
        engine_id=engine_id,
        url=str(extra.get("url", "")).rstrip("/"),
        router=router,
        halves_path=socket_path(run_id),
        security=load_client_security(Path(keys_dir).expanduser()) if keys_dir else None,
        allow_insecure=ours.security.allow_insecure,
        channels=tuple(transport.channels),
        options=_options(ours, router),
        chunk_tokens=transport.chunk_tokens,
        integrity=transport.integrity,
        layerwise=bool(extra.get("layerwise", transport.layerwise)),
        drain_s=transport.drain_s,
        spill_after_s=transport.spill_after_ms / 1000,
        max_resumes=transport.max_resumes,
        max_deadline_s=transport.deadline_s,
        store=ours.store,
        codec=ours.codec,
        otlp_endpoint=ours.metrics.otlp_endpoint,
    )


def _engine_id(role: str, url: str, run_id: str) -> str:
    """The same after a restart where a URL says which engine it is: directories of its tiers are named by it."""
    place = re.sub(r"[^A-Za-z0-9.]+", "-", urlsplit(url).netloc.rpartition("@")[2])
    return f"{role}-{place.strip('-.')[-50:]}" if place else f"{role}-{run_id[:8]}"


def _load(extra: dict[str, Any]) -> Config:
    files, sets = extra.get("config") or [], extra.get("set") or []
    return load_config([files] if isinstance(files, str) else files, [sets] if isinstance(sets, str) else sets)


def _options(config: Config, router: str) -> EndpointOptions:
    if not config.router.endpoint:
        config = msgspec.structs.replace(config, router=msgspec.structs.replace(config.router, endpoint=router))
    transport = config.transport
    return EndpointOptions(
        bind=bind_address(config),
        advertise=advertised(config),
        ports=config.network.ports,
        connect_timeout_s=transport.connect_timeout_s,
        write_timeout_s=transport.write_timeout_s,
        max_fence_groups=transport.max_fence_groups,
    )
