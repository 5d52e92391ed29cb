"""The cluster of a chaos run: launched as children, its processes by name, and whether it is whole.

`pdxfer launch --role all` on the near side; with a link, the last prefill and, if there are several, the last decode
engine on the far side, each by a launcher of its own. The launchers' supervisors bring killed processes back: that is
part of what is tested.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from pdxfer.bench.chaos_faults import PROXY, ROUTER, STORE
from pdxfer.bench.chaos_plan import Plan
from pdxfer.bench.ttft_errors import BenchError

_POLL_S = 0.1
_PROBE_S = 5.0
_FRESH_S = 1.0
"""A member silent for longer is not taken for healthy."""
_STOP_S = 60.0
_TAIL_LINES = 40
_SETTLE_S = 30.0
"""doctor: what a killed router left ends after 10 s; channels and tiers are tried again after 10 s at most."""
_WORDS = {
    ROUTER: ("--role", "router"),
    PROXY: ("--role", "proxy"),
    STORE: ("-m", "pdxfer.store.server"),
}
"""Process → two neighbouring words of its command line; engines have their port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One process under a name."""

    name: str
    pid: int
    """It leads a group of its own."""
    incarnation: int
    """As the router knows an engine; 0 for others."""


class Cluster:
    """A launched cluster. `start`, then anything, then `stop`."""

    def __init__(self, plan: Plan, log: Path) -> None:
        self.plan, self.log = plan, log
        self.proxy, self.controller = plan.proxy_url, plan.controller_url
        self._launchers: list[subprocess.Popen[bytes]] = []

    def url(self, engine_id: str) -> str:
        """HTTP base of one engine."""
        return self.plan.engine_url(engine_id)

    def start(self) -> None:
        """Start it; `until_whole` says when it can be used."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as out:
            for command in self.plan.commands():
                self._launchers.append(
                    subprocess.Popen(
                        command, stdout=out, stderr=out, start_new_session=True, env=os.environ | self.plan.env
                    )
                )

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL to everything that is left."""
        left = [child for launcher in self._launchers for child in _children(launcher.pid, recursive=True)]
        for launcher in self._launchers:
            if launcher.poll() is None:
                launcher.send_signal(signal.SIGTERM)
        for launcher in self._launchers:
            try:
                await asyncio.to_thread(launcher.wait, _STOP_S)
            except subprocess.TimeoutExpired:
                launcher.kill()
                await asyncio.to_thread(launcher.wait)
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

    async def until_whole(
        self, session: aiohttp.ClientSession, timeout_s: float, gone: Life | None = None, without: str = ""
    ) -> None:
        """Wait until all engines (but one that is `without`) have joined and the proxy is ready, with a new process in
        the place of `gone`. Raises BenchError."""
        await self._until(lambda: self._problem(session, gone, without), timeout_s, "the cluster is not whole")

    async def until_back(self, session: aiohttp.ClientSession, timeout_s: float, gone: Life) -> None:
        """Wait until this engine has joined again with a new process. Raises BenchError."""

        async def problem() -> str:
            return await self._engine_problem(session, await self._nodes_by_id(session), gone.name, gone)

        await self._until(problem, timeout_s, f"{gone.name} is not back")

    async def until_busy(self, session: aiohttp.ClientSession, engine_id: str) -> None:
        """Wait until this engine computes something; the caller bounds it."""
        while not (await self._nodes_by_id(session)).get(engine_id, {}).get("num_running"):
            await asyncio.sleep(_POLL_S)

    async def until_idle(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        """Wait until nothing is promised, held or wrong anywhere. Raises BenchError with what is left."""
        await self._until(lambda: self._left(session), timeout_s, "something is left after the last request")
        await self._doctor()

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
            codes = [code for launcher in self._launchers if (code := launcher.poll()) is not None]
            if codes:
                raise BenchError(f"pdxfer launch ended with exit code {codes[0]} (log: {self.log}):\n{self.tail()}")
            if loop.time() > deadline:
                raise BenchError(f"{what} after {timeout_s:g} s: {reason} (log: {self.log}):\n{self.tail()}")
            await asyncio.sleep(_POLL_S)

    async def _problem(self, session: aiohttp.ClientSession, gone: Life | None, without: str) -> str:
        """Why the cluster is not whole; empty if it is."""
        if gone is not None and gone.name not in self.plan.engines and self._pid(gone.name) in (0, gone.pid):
            return f"{gone.name} has not been started again"
        nodes = await self._nodes_by_id(session)
        for name in self.plan.engines:
            if name != without and (problem := await self._engine_problem(session, nodes, name, gone)):
                return problem
        return "" if await _status(session, self.proxy + "/ready") == 200 else "the proxy is not ready"

    async def _engine_problem(
        self, session: aiohttp.ClientSession, nodes: dict[str, dict[str, Any]], name: str, gone: Life | None
    ) -> str:
        """Why this engine is not there; empty if it is. As `gone` it must have a new process and a new life."""
        is_new = gone is not None and gone.name == name
        if gone is not None and is_new and self._pid(name) in (0, gone.pid):
            return f"{name} has not been started again"
        node = nodes.get(name)
        if node is None:
            return f"{name} has not joined"
        if gone is not None and is_new and int(node["incarnation"]) == gone.incarnation:
            return f"{name} has not joined again"
        if node["state"] != "ready" or node["silent_s"] > _FRESH_S:
            return f"{name} is {node['state']}, silent for {node['silent_s']:.1f} s"
        return "" if await _status(session, self.url(name) + "/health") == 200 else f"{name}: /health is not 200"

    async def _left(self, session: aiohttp.ClientSession) -> str:
        for node in await self._nodes(session):
            for name in ("num_running", "num_waiting", "num_transfers", "reserved_blocks", "outstanding_tokens"):
                if node[name]:
                    return f"{node['engine_id']}: {name} is {node[name]}"
        health = await _json(session, self.controller + "/v1/health")
        return "" if health["ok"] else f"health: {health['engines']}"

    async def _doctor(self) -> None:
        """The integrity check. Raises BenchError with what it found."""
        command = [sys.executable, "-m", "pdxfer.cli.main", "doctor", "--live", "--json", "--url", self.controller]
        command += ["--settle", f"{_SETTLE_S:g}"]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not json.loads(done.stdout)["clean"]:
            raise BenchError(f"doctor --live after the last request: {done.stdout}{done.stderr}(log: {self.log})")

    def _pid(self, name: str) -> int:
        """Child of a launcher that runs under this name, the leader of a process group; 0 if there is none."""
        words = _WORDS.get(name) or ("--port", str(self.plan.engines[name].port))
        for child in (child for launcher in self._launchers for child in _children(launcher.pid)):
            try:
                line = child.cmdline()
            except psutil.Error:
                continue
            if words in zip(line, line[1:], strict=False):
                return child.pid
        return 0

    async def _nodes_by_id(self, session: aiohttp.ClientSession) -> dict[str, dict[str, Any]]:
        return {node["engine_id"]: node for node in await self._nodes(session)}

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
