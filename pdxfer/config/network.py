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


def advertised(config: Config) -> str:
    """The address others connect to. Raises ConfigError if `network.interface` has none."""
    network = config.network
    if network.advertise:
        return network.advertise
    if network.interface:
        return _address_of(network)
    if not is_wildcard(network.bind):
        return network.bind
    router = urlsplit(config.router.endpoint).hostname if config.router.endpoint else None
    return _way_to(router or "192.0.2.1")


def router_endpoint(config: Config) -> str:
    """ZMQ address at which members find the router."""
    if config.router.endpoint:
        return config.router.endpoint
    host = _LOOPBACK if is_wildcard(config.network.bind) else config.network.bind
    return f"tcp://{join(host, config.router.port)}"


def controller_url(config: Config) -> str:
    """HTTP base of the management API, on the router's host."""
    host = urlsplit(router_endpoint(config)).hostname or _LOOPBACK
    return f"http://{join(host, config.controller.port)}"


def proxy_bind(config: Config) -> str:
    """Address the proxy listens on."""
    return config.proxy.bind or config.network.bind


def local_url(host: str, port: int) -> str:
    """HTTP base under which this machine itself reaches something bound to `host`."""
    return f"http://{join(_LOOPBACK if is_wildcard(host) else host, port)}"


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
    """Our address on the interface that routes to `host`; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return _LOOPBACK
