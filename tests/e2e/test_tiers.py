"""Tiers that real engines share: a prompt without a grant goes through one, what a peer keeps is found, values of a
remote server outlive every engine.

Only in `tests/run.sh full`: each starts engines of its own.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers.redis import RedisServer

from pdxfer.bench.texts import Prompts
from tests.e2e.conftest import RunningPair, free_ports
from tests.e2e.engines import complete, metric, nodes, until
from tests.e2e.store_engine import StoreEngine
from tests.e2e.test_variants import started

pytestmark = [pytest.mark.vllm, pytest.mark.full]

HITS = "vllm:external_prefix_cache_hits_total"


@pytest.fixture
def spilling(logs: Path, tmp_path: Path) -> Iterator[RunningPair]:
    """A pair with a store process, whose engines have room for one large prompt: 16 blocks of 128 tokens."""
    sets = (
        "model.dtype=float32", "engine.max_model_len=2048", "engine.extra_args=--num-gpu-blocks-override,17",
        "store.enabled=true", f"store.shared_memory={tmp_path / 'store.sock'}",
        "store.tiers=[{url: 'dram:', capacity_gib: 0.5}]", "transport.spill_after_ms=300",
    )  # fmt: skip
    with started(logs / "spill.log", *sets) as running:
        yield running


async def test_a_prompt_that_decode_has_no_room_for_goes_through_the_store(
    spilling: RunningPair, prompts: Prompts
) -> None:
    """Paired while prefill was busy and decode had room; then another request took all of decode. prefill's blocks come
    back at once, and decode loads the prompt when it can, with the right tokens."""
    urls, ids = spilling.urls, prompts.ids(600, 1)
    alone = await complete(urls.prefill, ids, 8, cache_salt="alone")
    before = await metric(urls.decode, HITS)
    first = asyncio.create_task(complete(urls.prefill, prompts.ids(1900, 2), 1, cache_salt="first"))
    assert await until(lambda: runs(urls.controller, "p0"))
    through = asyncio.create_task(complete(urls.proxy, ids, 8, cache_salt="through"))
    assert await until(lambda: runs(urls.controller, "d0", "num_transfers"))
    hog = asyncio.create_task(complete(urls.decode, prompts.ids(1900, 3), 140, cache_salt="hog"))

    async def spilled() -> bool:
        return await metric(urls.controller, "pdxfer_node_spilled_prompts_total") == 1

    async def is_free() -> bool:
        await complete(urls.prefill, [5, 6, 7], 1)
        return await metric(urls.prefill, "vllm:kv_cache_usage_perc") == 0.0

    assert await until(spilled, 30.0), spilling.tail()
    assert await until(is_free, 5.0) and not hog.done() and not through.done()
    answer = await through
    assert (answer.status, answer.tokens) == (200, alone.tokens)
    assert hog.done() and await metric(urls.decode, HITS) - before == 512
    assert (await hog).status == (await first).status == 200


async def runs(controller: str, engine_id: str, what: str = "num_running") -> bool:
    """By the router's knowledge."""
    return bool((await nodes(controller))[engine_id][what])


async def test_what_a_peer_keeps_is_loaded_from_it(logs: Path, prompts: Prompts) -> None:
    """Computed and kept by one engine in its own memory; the other one loads it from there and says the same."""
    tiers = "store.tiers=[{url: 'dram:', capacity_gib: 0.2}, {url: 'peer:'}]"
    with started(logs / "peer.log", "model.dtype=float32", "store.enabled=true", tiers) as running:
        urls, loaded = running.urls, 0.0
        for number in range(5):
            ids, salt, kept = prompts.ids(1500, number), f"peer-{number}", await stored(urls.prefill)
            first = await complete(urls.prefill, ids, 8, cache_salt=salt)
            while await stored(urls.prefill) < kept + 6:
                await asyncio.sleep(0.05)
            before = await metric(urls.decode, HITS)
            second = await complete(urls.decode, ids, 8, cache_salt=salt)
            loaded += await metric(urls.decode, HITS) - before
            assert (second.status, second.tokens) == (200, first.tokens)

        async def served() -> bool:
            return await metric(urls.controller, "pdxfer_node_served_values_total") == 6 * loaded / 1408

        assert loaded % 1408 == 0 and loaded >= 4 * 1408, loaded  # the index may be late once
        assert await until(served)


async def stored(url: str) -> float:
    """Values that this engine's tiers took. Counters leave an engine with its steps: a short request makes some."""
    await complete(url, [1, 2, 3], 1)
    return await metric(url, "vllm:pdxfer_stored_values_total")


async def test_hits_from_redis_after_kill_9(logs: Path, tmp_path: Path, prompts: Prompts) -> None:
    """Every process but the server is killed: a new engine loads the prompt from it, and says the same."""
    (port,) = free_ports(1)
    with RedisServer("redis") as server:
        engine = StoreEngine(port, tmp_path, logs / "redis.log", second_tier=f"{{url: '{server.url()}'}}")
        try:
            await engine.outlive(prompts.ids(1500, 901))
        finally:
            engine.stop()
