"""Runs a router or a proxy in this very process: config sections → the settings those packages take."""

import logging
from pathlib import Path

from pdxfer.config import network
from pdxfer.config.schema import Config
from pdxfer.config.token import read_token
from pdxfer.controller.settings import ControllerSettings
from pdxfer.launcher.machine import this_machine
from pdxfer.proxy.settings import ProxySettings
from pdxfer.router.settings import RouterSettings

log = logging.getLogger(__name__)


def serve_router(config: Config) -> None:
    """Router and controller until a signal."""
    from pdxfer.controller.app import serve

    if problem := network.endpoint_problem(config):
        log.warning("%s", problem)
    serve(router_settings(config), controller_settings(config))


def serve_proxy(config: Config) -> None:
    """Proxy until a signal."""
    from pdxfer.proxy.app import serve

    serve(proxy_settings(config))


def router_settings(config: Config) -> RouterSettings:
    """Section `router`, with what it needs of `network` and `security`."""
    router = config.router
    return RouterSettings(
        bind=f"tcp://{network.join(network.bind_address(config), router.port)}",
        keys_dir=_keys_dir(config),
        allow_insecure=config.security.allow_insecure,
        heartbeat_s=router.heartbeat_s,
        missed_heartbeats=router.missed_heartbeats,
        settle_s=2 * config.router.heartbeat_s,
        forget_s=router.forget_s,
        min_remote_tokens=router.min_remote_tokens,
        max_queue=router.max_queue,
        max_wait_s=router.max_wait_s,
        lease_s=router.lease_s,
        message_rate=router.message_rate,
        otlp_endpoint=config.metrics.otlp_endpoint,
    )


def controller_settings(config: Config) -> ControllerSettings:
    """Section `controller`, with what it needs of `network` and `security`."""
    return ControllerSettings(
        host=network.bind_address(config),
        port=config.controller.port,
        token=read_token(config.security.token_file),
        allow_insecure=config.security.allow_insecure,
        drain_timeout_s=config.proxy.drain_timeout_s,
        client_stall_s=config.proxy.client_stall_s,
    )


def proxy_settings(config: Config) -> ProxySettings:
    """Section `proxy`, with what it needs of `network`, `security` and `transport`."""
    proxy = config.proxy
    return ProxySettings(
        host=network.proxy_bind(config),
        port=proxy.port,
        router=network.router_endpoint(config),
        keys_dir=_keys_dir(config),
        allow_insecure=config.security.allow_insecure,
        proxy_id=f"{this_machine().hostname}-{proxy.port}",
        aliases=proxy.aliases,
        passthrough=tuple(proxy.passthrough),
        api_keys=proxy.api_keys,
        engine_api_key=read_token(config.security.token_file),
        request_timeout_s=proxy.request_timeout_s,
        pair_timeout_s=proxy.pair_timeout_s,
        client_stall_s=proxy.client_stall_s,
        transfer_timeout_s=config.transport.deadline_s,
        max_body_bytes=int(proxy.max_body_mib * (1 << 20)),
        max_in_flight=proxy.max_in_flight,
        otlp_endpoint=config.metrics.otlp_endpoint,
        trace_sample=config.metrics.trace_sample,
        timeline_entries=config.metrics.timelines,
        drain_timeout_s=proxy.drain_timeout_s,
    )


def _keys_dir(config: Config) -> Path | None:
    return Path(config.security.keys_dir).expanduser() if config.security.keys_dir else None
