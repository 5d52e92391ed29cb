"""`pdxfer doctor --live`: clean after a run, each leak and fault named, exit codes as documented."""

import asyncio
import json
import random
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest
from router_kit import SmallEngine, wait_until
from status_rig import serving
from test_proxy_cluster import STREAM, cluster, text_of

from pdxfer.cli import main
from pdxfer.cli.checks.live import in_both, look
from pdxfer.cli.doctor_live import examine
from pdxfer.client.api import ControllerClient
from pdxfer.client.model import FlowRate
from pdxfer.controller.board import Board, health
from pdxfer.router.server import RouterServer
from pdxfer.router.snapshot import TierView
from pdxfer.testing.fake_model import next_words


class _InProcess:
    """What a ControllerClient would answer, without HTTP."""

    def __init__(self, router: RouterServer, board: Board) -> None:
        self.summary = board.summary
        self.health = lambda: health(router.snapshot().engines)
        self.nodes = lambda: router.snapshot().engines


def _doctor(url: str, *args: str) -> int:
    return main.run(["doctor", "--live", "--url", url, *args])


def _views(client: ControllerClient) -> Any:
    return client.health(), client.summary(), client.nodes()


def test_a_cluster_at_rest_is_clean_and_each_leak_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Over a real controller; the leaks are put into what it answered."""
    with serving() as site:
        to = site.router.endpoint
        engines = [SmallEngine(to, "p0", "prefill"), SmallEngine(to, "d0", "decode")]
        try:
            wait_until(lambda: site.router.snapshot().num_pairs == 1, what="a pair")
            client = site.client()
            wait_until(lambda: len(client.summary().nodes) == 2, what="the summary")
            assert _doctor(site.url, "--json") == 0
            report = json.loads(capsys.readouterr().out)
            assert report["clean"] is True and report["at_rest"] is True and report["num_engines"] == 2
            _check_leaks(client)
        finally:
            for engine in engines:
                engine.close()


def _check_leaks(client: ControllerClient) -> None:
    engines, summary, nodes = _views(client)
    node = nodes[0]

    def told(changed: Any, summary: Any = summary) -> list[str]:
        return [problem.text for problem in look(engines, summary, [changed, *nodes[1:]]).problems]

    assert told(node) == []
    assert "7 of 1000 KV blocks are not free" in told(replace(node, credit_blocks=993))[0]
    assert told(replace(node, credit_blocks=999)) == [], "vLLM's own block"
    assert "5 blocks are still promised" in told(replace(node, reserved_blocks=5, credit_blocks=995))[0]
    assert "count as its load" in told(replace(node, outstanding_tokens=9))[0]
    assert "2 transfers have not ended" in told(replace(node, num_transfers=2))[0]
    assert told(replace(node, credit_blocks=10, num_running=1)) == [], "in use, not lost"
    tier = TierView(
        kind="dram", used_bytes=0, capacity_bytes=0, num_values=0, pinned_bytes=0, leases=3, hits=0, misses=0, puts=0,
        evictions=0, failures=0, reachable=True,
    )  # fmt: skip
    leased = replace(node, ranks=[replace(node.ranks[0], tiers=[tier])])
    assert told(leased) == ["3 leases on values of tier dram were not returned"]
    flow = FlowRate(prefill="p0", decode="d0", channel="tcp", num_live=1, bytes_per_s=0, num_bytes=0, num_failed=0)
    assert "never ended" in told(node, replace(summary, flows=[flow]))[0]
    sick = replace(engines[0], ranks=[replace(engines[0].ranks[0], problems=["tier dram does not add up: gap"])])
    first = look([sick], summary, nodes)
    assert [problem.text for problem in first.problems] == ["tier dram does not add up: gap"]
    assert in_both(first, look(engines, summary, nodes)).clean, "what is over is no problem"


def test_a_lost_engine_is_a_problem_with_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    """An engine that has fallen silent, seen in every look."""
    with serving(heartbeat_s=0.1, missed_heartbeats=5) as site:
        engine = SmallEngine(site.router.endpoint, "d0", "decode")
        wait_until(lambda: any(one.state == "ready" for one in site.router.snapshot().engines), what="joined")
        engine.close()
        wait_until(lambda: site.router.snapshot().engines[0].state == "suspect", what="suspect")
        assert _doctor(site.url, "--settle", "0") == 1
        assert "PROBLEM  d0: it is suspect" in capsys.readouterr().out


def test_no_controller_is_exit_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert _doctor("http://127.0.0.1:9") == 3
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=pytest.mark.full)])
async def test_a_fifth_of_the_clients_leave_and_everything_is_back(count: int) -> None:
    """Prompts of random length over real nodes and real bytes, clients that leave at random moments: the others are
    answered right, and the integrity check of the whole cluster is clean."""
    rng, num_left = random.Random(count), 0
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(cluster({"p0": "prefill", "d0": "decode"}))

        async def ask(number: int) -> None:
            prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 500))]
            body = {**STREAM, "prompt": prompt}
            async with rig.http.post(rig.url + "/v1/completions", json=body) as response:
                assert text_of(await response.read()) == "".join(next_words(prompt, 6)), number

        async def leave(number: int) -> None:
            nonlocal num_left
            with suppress(TimeoutError):
                async with asyncio.timeout(rng.uniform(0, 0.1)):
                    await ask(number)
            num_left += 1

        for first in range(0, count, 20):
            async with asyncio.TaskGroup() as group:
                for number in range(first, first + 20):
                    group.create_task(leave(number) if number % 5 == 0 else ask(number))
        board = Board(rig.router)
        board.start()
        stack.callback(board.close)
        client = _InProcess(rig.router, board)
        await asyncio.to_thread(wait_until, lambda: not any(node.num_running for node in client.nodes()))
        report = await asyncio.to_thread(examine, client, 10.0)  # type: ignore[arg-type]
        assert report.clean and report.at_rest and report.num_engines == 2, report
    assert num_left == count // 5
