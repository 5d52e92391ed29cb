"""A prefill engine that fails in mid-transfer: another one sends what is missing, what landed stays. On fakes.

Proxy, router and fake engines with real nodes over tcp; decode checks each byte of the KV before it answers.
"""

import asyncio
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from test_proxy_cluster import ANSWER, STREAM, Cluster, cluster, free_port, until

from pdxfer.wire.halves import Landed

pytestmark = pytest.mark.slow

NUM_BLOCKS, BLOCK_BYTES = 157, 4 * 16 * 256
FIRST_STEP = 32
"""Blocks of a fake prefill's first step."""


def hold(c: Cluster, *engine_ids: str) -> None:
    """These prefill engines compute one step of a prompt and no more: there is a middle to fail in."""
    for engine_id in engine_ids:
        compute = c.engines[engine_id].member._compute
        honest = compute.blocks

        async def blocks(ids: list[int], tokens: list[int], first: int, honest: Any = honest) -> None:
            if first:
                await asyncio.Event().wait()
            await honest(ids, tokens, first)

        compute.blocks = blocks  # type: ignore[method-assign]


def landed_blocks(c: Cluster) -> int:
    """Good blocks, from the start, of what d0 is receiving."""
    receiver = c.engines["d0"].member._node.receiver
    return sum(incoming.num_valid for incoming in list(receiver._grants.live.values()))


def landings(c: Cluster) -> list[Landed]:
    """What d0 is told of grants that are whole, from now on."""
    seen: list[Landed] = []
    receives = c.engines["d0"].member._receives
    landed = receives.landed

    def note(fact: Landed) -> None:
        seen.append(fact)
        landed(fact)

    receives.landed = note  # type: ignore[method-assign]
    return seen


async def timeline_of(c: Cluster, request_id: str) -> Any:
    """Once decode has told what moved."""
    found: Any = {}

    async def told() -> bool:
        nonlocal found
        _, found = await c.get(f"/v1/pdxfer/timeline/{request_id}")
        return bool(found["transfer"])

    await until(told, 30.0)
    return found


def resumed_right(timeline: Any, c: Cluster, facts: list[Landed], before: str, after: str) -> None:
    """What landed was kept, the second prefill sent the rest and only that, decode computed nothing."""
    (resume,) = timeline["resumes"]
    assert (resume["before"], resume["prefill"], resume["epoch"]) == (before, after, 2)
    first_missing = resume["first_missing"]
    assert 0 < first_missing < NUM_BLOCKS and resume["reason"]
    (fact,) = facts
    assert (fact.epoch, fact.num_bytes) == (2, (NUM_BLOCKS - first_missing) * BLOCK_BYTES)
    counts = c.engines["d0"].member._link.counts
    assert (counts["recomputed_blocks"], counts["resumed_transfers"]) == (0, 1)
    assert timeline["transfer"]["outcome"] == "delivered" and timeline["prefill"] == after
    assert timeline["transfer"]["num_bytes"] >= NUM_BLOCKS * BLOCK_BYTES


async def test_a_prefill_leg_that_breaks_in_mid_transfer_is_taken_over() -> None:
    """Its HTTP server goes; the proxy says so, decode takes its grant back, the other engine sends the rest."""
    async with cluster({"p0": "prefill", "p1": "prefill", "d0": "decode"}) as c:
        facts = landings(c)
        hold(c, "p0")
        request = asyncio.create_task(c.ask(STREAM, "q1"))
        await until(lambda: landed_blocks(c) == FIRST_STEP, 30.0)
        await c.engines["p0"].http.stop()
        text, _ = await request
        assert text == ANSWER
        resumed_right(await timeline_of(c, "q1"), c, facts, "p0", "p1")
        assert c.proxy.metrics.value("pdxfer_proxy_redispatches_total") == 1


async def test_without_another_prefill_the_rest_is_computed_and_what_landed_is_kept() -> None:
    async with cluster({"p0": "prefill", "d0": "decode"}) as c:
        hold(c, "p0")
        request = asyncio.create_task(c.ask(STREAM, "q1"))
        await until(lambda: landed_blocks(c) == FIRST_STEP, 30.0)
        await c.engines["p0"].http.stop()
        assert (await request)[0] == ANSWER
        timeline = await timeline_of(c, "q1")
        assert timeline["resumes"] == [] and "no other prefill engine" in timeline["transfer"]["reason"]
        assert c.engines["d0"].member._link.counts["recomputed_blocks"] == NUM_BLOCKS - FIRST_STEP


async def test_a_second_failure_is_computed() -> None:
    """At most one resume a transfer: the request must end."""
    async with cluster({"p0": "prefill", "p1": "prefill", "p2": "prefill", "d0": "decode"}) as c:
        hold(c, "p0", "p1")
        request = asyncio.create_task(c.ask(STREAM, "q1"))
        await until(lambda: landed_blocks(c) == FIRST_STEP, 30.0)
        await c.engines["p0"].http.stop()
        counts = c.engines["d0"].member._link.counts
        await until(lambda: counts["resumed_transfers"] == 1, 30.0)
        await c.engines["p1"].http.stop()
        assert (await request)[0] == ANSWER
        assert (counts["resumed_transfers"], counts["recomputed_blocks"]) == (1, NUM_BLOCKS - FIRST_STEP)


async def test_a_client_that_leaves_while_another_prefill_is_waited_for_leaves_nothing() -> None:
    """Checked as the cluster closes: all blocks and transfers are back."""
    async with cluster({"p0": "prefill", "p1": "prefill", "d0": "decode"}) as c:
        hold(c, "p0")
        c.engines["p1"].http.faults.hang = True
        request = asyncio.create_task(c.ask(STREAM, "q1"))
        await until(lambda: landed_blocks(c) == FIRST_STEP, 30.0)
        await c.engines["p0"].http.stop()
        await until(lambda: c.proxy.metrics.value("pdxfer_proxy_redispatches_total"), 30.0)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)


@asynccontextmanager
async def process_of_a0(c: Cluster) -> AsyncIterator[Process]:
    """A prefill engine that is a process; by its name it is taken first."""
    num_pairs = c.router.snapshot().num_pairs
    argv = ["--role", "prefill", "--engine-id", "a0", "--port", str(free_port()), "--router", c.router.endpoint]
    argv += ["--num-blocks", "1024", "--prefill-tokens-per-s", "400", "--log-level", "ERROR"]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "pdxfer.testing.fake_engine", *argv)
    try:
        await until(lambda: c.router.snapshot().num_pairs == num_pairs + 1, 60.0)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize(("how", "missed_heartbeats"), [(signal.SIGKILL, 20), (signal.SIGSTOP, 8)])
async def test_a_prefill_process_that_is_killed_or_hangs_in_mid_transfer_is_taken_over(
    how: signal.Signals, missed_heartbeats: int
) -> None:
    """kill -9: the proxy and decode see closed connections. SIGSTOP: the router misses its heartbeats."""
    roles = {"p1": "prefill", "d0": "decode"}
    async with cluster(roles, missed_heartbeats=missed_heartbeats) as c, process_of_a0(c) as process:
        facts = landings(c)
        request = asyncio.create_task(c.ask(STREAM, "q1"))
        await until(lambda: landed_blocks(c) > 0, 30.0)
        process.send_signal(how)
        assert (await request)[0] == ANSWER
        resumed_right(await timeline_of(c, "q1"), c, facts, "a0", "p1")
