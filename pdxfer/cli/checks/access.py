"""Keys, token, and whether a router elsewhere answers."""

import socket
from pathlib import Path
from urllib.parse import urlsplit

from pdxfer.cli.checks.finding import Finding, blocks, ok, warning
from pdxfer.config.network import bind_address, is_loopback, proxy_bind, router_endpoint
from pdxfer.config.schema import Config
from pdxfer.config.token import read_token
from pdxfer.core.errors import ConfigError

_CONNECT_S = 3.0
_SEE = "see the message"


def check_access(config: Config) -> list[Finding]:
    """What guards the cluster, and the way to it."""
    return [_keys(config), _token(config), *_proxy(config), *_router(config)]


def require_secrets(config: Config) -> None:
    """Raise ConfigError if keys or token that this configuration needs, or names, are not there."""
    for finding in (_keys(config), _token(config)):
        if finding.status == "blocks":
            raise ConfigError(f"{finding.name}: {finding.text}" + ("" if finding.fix == _SEE else f"; {finding.fix}"))


def _keys(config: Config) -> Finding:
    from pdxfer.wire.keys import load_client_security, load_server_security

    bind = bind_address(config)
    if not config.security.keys_dir:
        if is_loopback(bind):
            return ok("keys", f"none, and none needed on {bind}")
        if config.security.allow_insecure:
            return warning("keys", f"none on {bind}, allowed by security.allow_insecure", "pdxfer keys new DIR")
        return blocks("keys", f"none, but {bind} is reachable by others", "pdxfer keys new DIR; set security.keys_dir")
    folder = Path(config.security.keys_dir).expanduser()
    problems = []
    for side, load in (("members", load_client_security), ("router", load_server_security)):
        try:
            load(folder)
        except ConfigError as error:
            problems.append(f"not for {side}: {error}")
    if len(problems) == 2:
        return blocks("keys", problems[0], "pdxfer keys new DIR")
    return ok("keys", f"{folder}" + (f"; {problems[0]}" if problems else ""))


def _token(config: Config) -> Finding:
    try:
        token = read_token(config.security.token_file)
    except ConfigError as error:
        return blocks("token", str(error), _SEE)
    if token:
        return ok("token", f"read from {config.security.token_file}")
    bind = bind_address(config)
    if is_loopback(bind) or config.security.allow_insecure:
        return ok("token", "none: management API and engines are open to this machine")
    return blocks("token", f"none, but {bind} is reachable by others", "set security.token_file")


def _proxy(config: Config) -> list[Finding]:
    """Only of one that would be reachable; `network.bind` alone may be meant for engines."""
    bind = proxy_bind(config)
    if is_loopback(bind) or config.proxy.api_keys or config.security.allow_insecure:
        return []
    text = f"a proxy here would listen on {bind}, reachable by others, and refuses to without api_keys"
    found = blocks if config.proxy.bind else warning
    return [found("proxy", text, "set proxy.api_keys, or proxy.bind: 127.0.0.1")]


def _router(config: Config) -> list[Finding]:
    """Only of a router that is said to be elsewhere."""
    if not config.router.endpoint:
        return []
    parts = urlsplit(router_endpoint(config))
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 0), _CONNECT_S):
            return [ok("router", f"{config.router.endpoint} accepts connections")]
    except (OSError, ValueError) as error:
        return [warning("router", f"{config.router.endpoint}: {error}", "start it, or look at firewall and address")]
