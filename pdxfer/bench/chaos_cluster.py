"""The cluster of a chaos run: `pdxfer launch --role all` as one child, its processes by name, and whether it is whole.

The launcher's own supervisor brings killed processes back: that is part of what is tested.
"""

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from pdxfer.bench.ttft_errors import BenchError

SERVED_NAME = "chaos"
_HOST = "127.0.0.1"
_POLL_S = 0.1
_PROBE_S = 5.0
_FRESH_S = 1.0
"""A member silent for longer is not taken for healthy."""
_STOP_S = 60.0
_TAIL_LINES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One process under a name."""

    name: str
    pid: int
    """It leads a group of its own."""
    incarnation: int
    """As the router knows an engine; 0 for the router itself."""


class Cluster:
    """A launched cluster with `prefill` and `decode` engines. `start`, then anything, then `stop`."""

    def __init__(self, *, engine: str, num_prefill: int, num_decode: int, log: Path, sets: Sequence[str]) -> None:
        ports = _free_ports(3 + num_prefill + num_decode)
        proxy, router, controller = ports[:3]
        prefill, decode = ports[3 : 3 + num_prefill], ports[3 + num_prefill :]
        self.proxy, self.controller = f"http://{_HOST}:{proxy}", f"http://{_HOST}:{controller}"
        self.engine_ports = {f"p{i}": port for i, port in enumerate(prefill)}
        self.engine_ports |= {f"d{i}": port for i, port in enumerate(decode)}
        self.log = log
        settings = (
            f"engine.kind={engine}", f"model.served_name={SERVED_NAME}", "engine.max_restarts=10000",
            f"proxy.port={proxy}", f"router.port={router}", f"controller.port={controller}",
            "network.ports=[0, 0]", f"topology.prefill={_places(prefill)}", f"topology.decode={_places(decode)}", *sets,
        )  # fmt: skip
        self._command = [sys.executable, "-m", "pdxfer.cli.main", "launch", "--role", "all", "--config", "cpu-1p1d"]
        for setting in settings:
            self._command += ["--set", setting]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def targets(self) -> list[str]:
        """Processes that may be hurt: all but the proxy, which clients hold connections to."""
        return ["router", *self.engine_ports]

    def url(self, engine_id: str) -> str:
        """HTTP base of one engine."""
        return f"http://{_HOST}:{self.engine_ports[engine_id]}"

    def start(self) -> None:
        """Start it; `until_whole` says when it can be used."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as out:
            self._process = subprocess.Popen(self._command, stdout=out, stderr=out, start_new_session=True)

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL to everything that is left."""
        if self._process is None:
            return
        left = _children(self._process.pid, recursive=True)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(self._process.wait, _STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        for process in left:
            if process.is_running():
                process.kill()

    async def life(self, session: aiohttp.ClientSession, name: str) -> Life:
        """The process that runs under this name now. Raises BenchError if none does."""
        pid = self._pid(name)
        if not pid:
            raise BenchError(f"{name} does not run (log: {self.log}):\n{self.tail()}")
        known = [int(n["incarnation"]) for n in await self._nodes(session) if n["engine_id"] == name]
        return Life(name=name, pid=pid, incarnation=known[0] if known else 0)

    async def until_whole(self, session: aiohttp.ClientSession, timeout_s: float, gone: Life | None = None) -> None:
        """Wait until all engines have joined and the proxy is ready, with a new process in the place of `gone`.
        Raises BenchError."""
        await self._until(lambda: self._problem(session, gone), timeout_s, "the cluster is not whole")

    async def until_idle(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        """Wait until nothing is promised, held or wrong anywhere. Raises BenchError with what is left."""
        await self._until(lambda: self._left(session), timeout_s, "something is left after the last request")

    def tail(self) -> str:
        """Last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])

    async def _until(self, problem: Callable[[], Awaitable[str]], timeout_s: float, what: str) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            try:
                reason = await problem()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                reason = f"{type(error).__name__}: {error}"
            if not reason:
                return
            assert self._process is not None
            code = self._process.poll()
            if code is not None:
                raise BenchError(f"pdxfer launch ended with exit code {code} (log: {self.log}):\n{self.tail()}")
            if loop.time() > deadline:
                raise BenchError(f"{what} after {timeout_s:g} s: {reason} (log: {self.log}):\n{self.tail()}")
            await asyncio.sleep(_POLL_S)

    async def _problem(self, session: aiohttp.ClientSession, gone: Life | None) -> str:
        """Why the cluster is not whole; empty if it is."""
        if gone is not None and self._pid(gone.name) in (0, gone.pid):
            return f"{gone.name} has not been started again"
        nodes = {node["engine_id"]: node for node in await self._nodes(session)}
        for name in self.engine_ports:
            node = nodes.get(name)
            if node is None:
                return f"{name} has not joined"
            if gone is not None and (name, int(node["incarnation"])) == (gone.name, gone.incarnation):
                return f"{name} has not joined again"
            if node["state"] != "ready" or node["silent_s"] > _FRESH_S:
                return f"{name} is {node['state']}, silent for {node['silent_s']:.1f} s"
            if await _status(session, self.url(name) + "/health") != 200:
                return f"{name}: /health does not answer 200"
        return "" if await _status(session, self.proxy + "/ready") == 200 else "the proxy is not ready"

    async def _left(self, session: aiohttp.ClientSession) -> str:
        for node in await self._nodes(session):
            for name in ("num_running", "num_waiting", "num_transfers", "reserved_blocks", "outstanding_tokens"):
                if node[name]:
                    return f"{node['engine_id']}: {name} is {node[name]}"
        health = await _json(session, self.controller + "/v1/health")
        return "" if health["ok"] else f"health: {health['engines']}"

    def _pid(self, name: str) -> int:
        """Child of the launcher that runs under this name, the leader of a process group; 0 if there is none."""
        words = ("--role", "router") if name == "router" else ("--port", str(self.engine_ports[name]))
        assert self._process is not None
        for child in _children(self._process.pid):
            try:
                line = child.cmdline()
            except psutil.Error:
                continue
            if words in zip(line, line[1:], strict=False):
                return child.pid
        return 0

    async def _nodes(self, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
        return list((await _json(session, self.controller + "/v1/nodes"))["nodes"])


async def _status(session: aiohttp.ClientSession, url: str) -> int:
    async with asyncio.timeout(_PROBE_S), session.get(url) as response:
        return response.status


async def _json(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with asyncio.timeout(_PROBE_S), session.get(url) as response:
        response.raise_for_status()
        return dict(await response.json())


def _children(pid: int, *, recursive: bool = False) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


def _places(ports: Sequence[int]) -> str:
    return "[" + ", ".join(f"{{port: {port}}}" for port in ports) + "]"


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server((_HOST, 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports
