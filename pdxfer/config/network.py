"""Addresses that follow from the configuration: where this host is reached, where the router is.

Used by the launcher, the connector and the CLI, so that all of them agree.
"""

import ipaddress
import socket
from urllib.parse import urlsplit

import psutil

from pdxfer.config.schema import Config, NetworkConfig
from pdxfer.core.errors import ConfigError

_LOOPBACK = "127.0.0.1"
_ANYWHERE = "192.0.2.1"
"""A documentation address (RFC 5737): the way to it is the default route."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Whether `host` means every address of this machine."""
    return host.strip("[]") in ("0.0.0.0", "::", "*")


def join(host: str, port: int) -> str:
    """`host:port`, IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def bind_address(config: Config) -> str:
    """The address that router, engines and data channels of this host listen on."""
    if config.network.bind:
        return config.network.bind
    if config.network.interface:
        return _address_of(config.network)
    router = _router_host(config)
    return _LOOPBACK if not router or is_loopback(router) else _way_to(router)


def advertised(config: Config) -> str:
    """The address others connect to. Raises ConfigError if `network.interface` has none."""
    network = config.network
    if network.advertise:
        return network.advertise
    if network.interface:
        return _address_of(network)
    bind = bind_address(config)
    return _way_to(_router_host(config) or _ANYWHERE) if is_wildcard(bind) else bind


def router_endpoint(config: Config) -> str:
    """ZMQ address at which members find the router. Raises ConfigError if `router.endpoint` is no address."""
    if _router_host(config):
        return config.router.endpoint
    bind = bind_address(config)
    return f"tcp://{join(_LOOPBACK if is_wildcard(bind) else bind, config.router.port)}"


def endpoint_problem(config: Config) -> str:
    """Why members that go to `router.endpoint` would not find a router of this host; empty if they may."""
    endpoint = router_endpoint(config)
    parts, bind = urlsplit(endpoint), bind_address(config)
    ours = _own_addresses() if is_wildcard(bind) else _resolved(bind)
    if parts.port == config.router.port and ours & _resolved(parts.hostname or ""):
        return ""
    return (
        f"members go to {endpoint} (router.endpoint), but the router listens on "
        f"tcp://{join(bind, config.router.port)}: they find it only if something forwards there"
    )


def controller_url(config: Config) -> str:
    """HTTP base of the management API, on the router's host."""
    host = urlsplit(router_endpoint(config)).hostname or _LOOPBACK
    return f"http://{join(host, config.controller.port)}"


def proxy_bind(config: Config) -> str:
    """Address the proxy listens on."""
    return config.proxy.bind or config.network.bind or _LOOPBACK


def local_url(host: str, port: int) -> str:
    """HTTP base under which this machine itself reaches something bound to `host`."""
    return f"http://{join(_LOOPBACK if is_wildcard(host) else host, port)}"


def _router_host(config: Config) -> str:
    """Host of `router.endpoint`; empty if none is set. Raises ConfigError if it is no address."""
    if not config.router.endpoint:
        return ""
    try:
        parts = urlsplit(config.router.endpoint)
        is_address = parts.scheme == "tcp" and parts.hostname and parts.port
    except ValueError:
        is_address = None
    if not is_address:
        raise ConfigError(f"router.endpoint is {config.router.endpoint!r}: write it as tcp://HOST:PORT")
    return parts.hostname or ""


def _address_of(network: NetworkConfig) -> str:
    known = psutil.net_if_addrs()
    for address in known.get(network.interface, []):
        if address.family == socket.AF_INET:
            return address.address
    raise ConfigError(
        f"network.interface is {network.interface!r}, which has no IPv4 address here; "
        f"use one of {', '.join(sorted(known))}, or set network.advertise"
    )


def _way_to(host: str) -> str:
    """Our address on the interface that routes to `host`; nothing is sent. Loopback where there is no way."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise ConfigError(
            f"router.endpoint names {host}, which is not known here: {error.strerror or error}; correct it, or set "
            "network.bind and network.advertise"
        ) from error
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return _LOOPBACK


def _resolved(host: str) -> set[str]:
    """Addresses of a name; empty if it is not known."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return set()


def _own_addresses() -> set[str]:
    return {found.address.partition("%")[0] for address in psutil.net_if_addrs().values() for found in address}
