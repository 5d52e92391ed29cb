"""One engine in store mode, started by `pdxfer launch --role both`: memory and disk tiers, float32, greedy is exact."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import urllib3

from tests.e2e.engines import Reply, complete, metric, post, until

START_S = 300


class StoreEngine:
    """A running engine; `kill` leaves no time for anything, `start` begins again on the same directory."""

    def __init__(self, port: int, directory: Path, log: Path, second_tier: str = "") -> None:
        """Below memory is `second_tier`, as in store.tiers, or the disk."""
        self.url = f"http://127.0.0.1:{port}"
        self._second = second_tier or f"{{url: 'file://{directory}', capacity_gib: 1, codec: lossless}}"
        self._log, self._port = log, port
        self.start()

    def start(self) -> None:
        tiers = f"[{{url: 'dram:', capacity_gib: 0.15}}, {self._second}]"
        sets = [
            "model.dtype=float32", "model.served_name=demo", f"store.tiers={tiers}", "engine.max_num_seqs=4",
            "engine.env={VLLM_SERVER_DEV_MODE: '1', VLLM_CPU_OMP_THREADS_BIND: '0'}",
        ]  # fmt: skip
        args = [arg for setting in sets for arg in ("--set", setting)]
        command = [
            sys.executable, "-m", "pdxfer.cli.main", "launch", "--role", "both", "--config", "cpu-both",
            "--port", str(self._port), *args,
        ]  # fmt: skip
        with self._log.open("a") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        http, deadline = urllib3.PoolManager(retries=False, timeout=2), time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                pytest.fail(f"the store engine ended at start:\n{self.tail()}")
            try:
                if http.request("GET", self.url + "/health").status == 200:
                    return
            except urllib3.exceptions.HTTPError:
                pass
            time.sleep(0.3)
        self.kill()
        pytest.fail(f"the store engine was not ready within {START_S} s:\n{self.tail()}")

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def tail(self) -> str:
        return "\n".join(self.log().splitlines()[-60:])

    def kill(self) -> None:
        """kill -9 of the whole launch; its engine is gone, and its port free, when this returns."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)):
                    return
            time.sleep(0.05)
        pytest.fail("the engine outlived its launch")

    async def outlive(self, ids: list[int]) -> None:
        """Store a prompt of 1,500 tokens, kill everything, start again: it is loaded, and the answer is the same."""
        first = await self.ask_and_store(ids, "over", 6)
        self.kill()
        self.start()
        again = await self.ask(ids, "over")
        assert (again.tokens, await self.hits()) == (first.tokens, 1408)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            return -9

    async def forget(self) -> None:
        """Empty the engine's own prefix cache, which fails while blocks are held: all must come back."""

        async def done() -> bool:
            reply = await post(self.url, "/reset_prefix_cache", {})
            return reply.body.get("success") is True

        assert await until(done, 20.0), "the engine's cache could not be emptied: somebody holds blocks"

    async def count(self, name: str) -> float:
        """One of our counters. They leave an engine with its steps: a request of three tokens makes some."""
        await complete(self.url, [1, 2, 3], 1)
        return await metric(self.url, f"vllm:pdxfer_{name}_total")

    async def hits(self) -> float:
        """Prompt tokens that came from the store, by vLLM's own count."""
        return await metric(self.url, "vllm:external_prefix_cache_hits_total")

    async def ask_and_store(self, ids: list[int], salt: str, num_chunks: int, tokens: int = 16, **more: Any) -> Reply:
        """Ask, wait until memory and disk have so many new chunks each, and empty the engine's cache."""
        before = await self.count("stored_values")
        reply = await self.ask(ids, salt, tokens, **more)

        async def stored() -> bool:
            return await self.count("stored_values") >= before + 2 * num_chunks

        assert await until(stored, 20.0), f"{await self.count('stored_values') - before} of {2 * num_chunks} stored"
        await self.forget()
        return reply

    async def ask(self, ids: list[int], salt: str, tokens: int = 16, **more: Any) -> Reply:
        """Greedy."""
        reply = await complete(self.url, ids, tokens, cache_salt=salt, **more)
        assert reply.status == 200, reply.body
        return reply
