"""A real pair, seen from outside: what observing costs next to a prefill; cache verbs name the right chunks."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdxfer.bench.texts import Prompts
from pdxfer.client.api import ControllerClient
from tests.e2e.conftest import RunningPair
from tests.e2e.engines import complete, nodes, until

sys.path.insert(0, str(Path(__file__).parent.parent))
from observe_cost import cost_s

pytestmark = pytest.mark.vllm

PROMPT_TOKENS = 1000
REPEATS = 4


def cpu_s(running: RunningPair, port: str) -> float:
    """CPU time of the engine that listens on a port: its API server and all its children."""
    for process in psutil.Process(running.process.pid).children(recursive=True):
        if "--port" in process.cmdline() and process.cmdline()[process.cmdline().index("--port") + 1] == port:
            family = [process, *process.children(recursive=True)]
            return sum(sum(one.cpu_times()[:2]) for one in family)
    raise AssertionError(f"no engine listens on {port}")


async def test_observing_costs_less_than_one_percent_of_a_prefill(
    running: RunningPair, prompts: Prompts, capsys: pytest.CaptureFixture[str]
) -> None:
    """CPU of all our metric, report and trace calls of a request, over CPU of one 1,000-token prefill."""
    url = running.urls.prefill
    port = url.rpartition(":")[2]
    await complete(url, prompts.ids(PROMPT_TOKENS, 9000), max_tokens=1)
    before = cpu_s(running, port)
    for number in range(REPEATS):
        await complete(url, prompts.ids(PROMPT_TOKENS, 9001 + number), max_tokens=1)
    prefill_s = (cpu_s(running, port) - before) / REPEATS
    ratio = cost_s() / prefill_s
    with capsys.disabled():
        print(f" observing / prefill, CPU: {100 * ratio:.3f} % ", end="")
    assert ratio < 0.01


async def test_the_router_knows_what_runs(running: RunningPair, prompts: Prompts) -> None:
    """Also of requests that were not paired; when they are over the cluster is at rest."""

    async def num_there() -> int:
        node = (await nodes(running.urls.controller))["d0"]
        return int(node["num_running"]) + int(node["num_waiting"])

    async def is_busy() -> bool:
        return await num_there() == 1

    async def is_idle() -> bool:
        return await num_there() == 0

    assert await until(is_idle)
    asked = asyncio.create_task(complete(running.urls.decode, prompts.ids(200, 31), max_tokens=60))
    assert await until(is_busy)
    await asked
    assert await until(is_idle)


async def test_lookup_finds_what_the_engines_saved(running: RunningPair, prompts: Prompts) -> None:
    """The controller's tokens and salt give the connector's keys; a clear makes the prefix vanish."""
    client = ControllerClient(running.urls.controller, timeout_s=20)
    text = "The lighthouse keeper wrote in his journal every evening about the sea. " * 60
    assert (await complete(running.urls.proxy, text, max_tokens=4)).status == 200
    salted = await complete(running.urls.proxy, text, max_tokens=4, cache_salt="tenant-x")
    assert salted.status == 200

    def found(**selector: Any) -> int:
        operation = client.cache("lookup", text=text, model="demo", **selector)
        assert operation.state == "done", operation
        return max(result["num_tokens"] for result in operation.results.values())

    async def both() -> bool:
        return found() >= 512 and found(salt="tenant-x") >= 512

    assert await until(both, 20)
    assert found(salt="nobody") == 0
    assert client.cache("clear", text=text, model="demo").state == "done"
    assert found() == 0 and found(salt="tenant-x") >= 512
    summary = client.summary()
    assert {tier.kind for tier in summary.tiers} == {"dram"} and summary.ttft
    assert all(engine.ok for engine in client.health())
