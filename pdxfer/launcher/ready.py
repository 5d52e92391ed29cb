"""Is it there yet: ports that must be free before a start, and probes that say when a process is ready."""

import asyncio
import errno
import json
import socket
from collections.abc import Iterable

import aiohttp
import psutil

from pdxfer.launcher.errors import LaunchError
from pdxfer.launcher.spec import PortUse, ProcessSpec

_LAST_PORT = 65535
_PROBE_S = 5.0
_INTERVAL_S = 0.2
_UNIX = "unix:"


def check_ports(specs: Iterable[ProcessSpec]) -> None:
    """Raise LaunchError for the first port or socket that something else holds."""
    for spec in specs:
        path = spec.ready_url.removeprefix(_UNIX)
        if path != spec.ready_url and _is_served(path):
            raise LaunchError(
                f"{spec.name} cannot listen on {path}: another process serves it; stop it, or choose another path"
            )
        for use in spec.ports:
            if use.port and (problem := _problem(use)):
                raise LaunchError(f"{spec.name} cannot listen on {use.host}:{use.port} ({use.key}): {problem}")


def _problem(use: PortUse) -> str:
    """Why the port cannot be had; empty if it can."""
    if use.port > _LAST_PORT:
        return f"ports end at {_LAST_PORT}; set {use.key} lower"
    family = socket.AF_INET6 if ":" in use.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((use.host.strip("[]"), use.port))
            probe.listen(1)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return f"{error.strerror or error}; check network.bind"
            return f"the port is taken by {_holder(use.port)}; stop it, or set {use.key} to another"
    return ""


def _is_served(path: str) -> bool:
    """Whether somebody accepts connections at this Unix socket; the file alone may be a dead one's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(path)
        except OSError:  # nobody is there, or there is no such path: its own process says what is wrong with it
            return False
        return True


def holders(spec: ProcessSpec) -> list[psutil.Process]:
    """Processes that hold ports or socket of this one, as far as we may see them."""
    path = spec.ready_url.removeprefix(_UNIX) if spec.ready_url.startswith(_UNIX) else ""
    try:
        unix = {found.pid for found in psutil.net_connections("unix") if path and str(found.laddr) == path}
        pids = unix.union(*(_pids(use.port) for use in spec.ports))
        return [psutil.Process(pid) for pid in sorted(filter(None, pids))]
    except (psutil.Error, OSError):
        return []


def _holder(port: int) -> str:
    try:
        for pid in _pids(port):
            return f"{psutil.Process(pid).name()} (pid {pid})"
    except (psutil.Error, OSError):
        pass
    return "another process"


def _pids(port: int) -> list[int]:
    """Of processes that listen on it."""
    found = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN and one.pid]
    return [one.pid for one in found if one.pid and one.laddr and one.laddr.port == port]


class Prober:
    """Asks one process whether it is ready, until it is."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.reason = "does not listen yet"
        """What the last answer was."""

    async def until_ready(self) -> None:
        """Return once the url answers 200, or the socket accepts; the caller sets the deadline."""
        if self._url.startswith(_UNIX):
            while not await self._accepts(self._url.removeprefix(_UNIX)):
                await asyncio.sleep(_INTERVAL_S)
            return
        timeout = aiohttp.ClientTimeout(total=_PROBE_S)
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
            while not await self._ask(session):
                await asyncio.sleep(_INTERVAL_S)

    async def _accepts(self, path: str) -> bool:
        try:
            _, writer = await asyncio.open_unix_connection(path)
        except OSError:
            return False
        writer.close()
        return True

    async def _ask(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(self._url) as answer:
                self.reason = "" if answer.status == 200 else _reason(answer.status, await answer.text())
                return answer.status == 200
        except aiohttp.ClientConnectionError:
            self.reason = "does not listen yet"
        except (aiohttp.ClientError, TimeoutError) as error:
            self.reason = f"gives no answer ({type(error).__name__})"
        return False


def _reason(status: int, body: str) -> str:
    """The reasons of our own /ready, else the status."""
    try:
        reasons = json.loads(body)["reasons"]
    except (ValueError, KeyError, TypeError):
        return f"answers {status}"
    return "; ".join(map(str, reasons))
