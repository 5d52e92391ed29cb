"""Aborts, deaths and load on real engines: nothing hangs, nothing fails, everything returns to the start.

Last in the session's order (the name sorts before test_requests, so the kill is in a class run at the end): a killed
engine is restarted by the supervisor and the tests after it see a fresh one.
"""

import asyncio
import random
import time

import aiohttp
import psutil
import pytest

from pdxfer.bench.texts import Prompts
from tests.e2e.conftest import RunningPair
from tests.e2e.engines import TIE, TIMEOUT, PairUrls, complete, metric, until

pytestmark = pytest.mark.vllm


async def used(pair: PairUrls) -> float:
    """Share of KV blocks in use, both engines added."""
    name = "vllm:kv_cache_usage_perc"
    return await metric(pair.prefill, name) + await metric(pair.decode, name)


async def is_idle(pair: PairUrls) -> bool:
    """No request runs or waits, no block is held. The gauges move with a step, so each engine is given one."""
    for url in (pair.prefill, pair.decode):
        await complete(url, [5, 6, 7], 1)
    running = [await metric(url, "vllm:num_requests_running") for url in (pair.prefill, pair.decode)]
    waiting = [await metric(url, "vllm:num_requests_waiting") for url in (pair.prefill, pair.decode)]
    return not any(running + waiting) and await used(pair) == 0.0


async def abandon(pair: PairUrls, ids: list[int], salt: str, after_s: float) -> None:
    """Start a streamed request and hang up after a while."""
    body = {
        "model": "demo", "prompt": ids, "max_tokens": 64, "temperature": 0, "stream": True, "ignore_eos": True,
        "cache_salt": salt,
    }  # fmt: skip
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        try:
            async with asyncio.timeout(after_s):
                async with session.post(pair.proxy + "/v1/completions", json=body) as response:
                    await response.read()
        except TimeoutError:
            return


async def test_aborts_at_random_moments_return_everything(pair: PairUrls, prompts: Prompts, is_full: bool) -> None:
    """A fifth of the requests hang up somewhere between arrival and the last token; the others are right."""
    rng = random.Random(11)
    wrong = 0

    async def one(number: int) -> None:
        nonlocal wrong
        length, salt = rng.randint(129, 900), f"abort-{number}"
        ids = prompts.ids(length, 3000 + number)
        if number % 5 == 0 or number % 5 == 3 and number < 20:
            await abandon(pair, ids, salt, rng.uniform(0.0, 3.0))
        else:
            reply = await complete(pair.proxy, ids, 4, cache_salt=salt)
            wrong += reply.status != 200

    total, at_once = (300, 8) if is_full else (40, 8)
    for start in range(0, total, at_once):
        await asyncio.gather(*[one(n) for n in range(start, min(total, start + at_once))])
    assert wrong == 0
    assert await until(lambda: is_idle(pair), 30.0), (await used(pair), "blocks are still held")


async def test_many_short_requests(pair: PairUrls, running: RunningPair, prompts: Prompts, is_full: bool) -> None:
    """Sequential and concurrent: none hangs, none fails, memory and blocks return to the start."""
    sequential, concurrent = (2000, 200) if is_full else (40, 32)
    await complete(pair.proxy, prompts.ids(140, 1), 1)
    memory = tree_memory(running)
    statuses = [(await complete(pair.proxy, prompts.ids(129 + n % 30, n), 1)).status for n in range(sequential)]
    asked = [complete(pair.proxy, prompts.ids(129 + n % 40, 5000 + n), 2) for n in range(concurrent)]
    statuses += [reply.status for reply in await asyncio.gather(*asked)]
    assert set(statuses) == {200}
    assert await until(lambda: is_idle(pair), 30.0)
    grown = tree_memory(running) - memory
    print(f"memory grew by {grown / 2**20:.0f} MiB over {len(statuses)} requests")
    assert grown < 400 * 2**20


async def test_preempted_decodes_say_the_same(pair: PairUrls, prompts: Prompts, is_full: bool) -> None:
    """The pool is too small for all at once: vLLM preempts, and what was received is computed again or reused."""
    before = await metric(pair.decode, "vllm:num_preemptions_total")
    count, tokens = 16, 300
    asked = [complete(pair.proxy, prompts.ids(350, 7000 + n), tokens, cache_salt=f"pre-{n}") for n in range(count)]
    answers = await asyncio.gather(*asked)
    assert await metric(pair.decode, "vllm:num_preemptions_total") > before, "nothing was preempted: the test is void"
    excused = 0
    for n, answer in list(enumerate(answers))[:: 1 if is_full else 8]:
        alone = await complete(pair.prefill, prompts.ids(350, 7000 + n), tokens, cache_salt=f"pre-{n}-alone")
        different = [i for i, (a, b) in enumerate(zip(answer.tokens, alone.tokens, strict=True)) if a != b]
        if different:
            assert alone.top2_gaps[different[0]] < TIE, (n, different[0])
            excused += 1
    print(f"excused ties: {excused}")


def tree_memory(running: RunningPair) -> int:
    """Resident bytes of all processes of the pair."""
    root = psutil.Process(running.process.pid)
    return sum(p.memory_info().rss for p in [root, *root.children(recursive=True)])


async def test_a_killed_prefill_costs_no_request(pair: PairUrls, running: RunningPair, prompts: Prompts) -> None:
    """kill -9 in mid-prefill: decode keeps what landed, computes the rest, and says the same tokens."""
    ids = prompts.ids(3000, 91)
    alone = await complete(pair.decode, ids, 8, cache_salt="kill-alone")
    before = await metric(pair.decode, "vllm:pdxfer_fallbacks_total")
    before += await metric(pair.decode, "vllm:pdxfer_failed_transfers_total")
    pending = asyncio.create_task(complete(pair.proxy, ids, 8, cache_salt="kill"))
    await until(lambda: started(pair), 20.0)
    killed_at = time.monotonic()
    running.kill_engine(pair.prefill)
    reply = await pending
    assert reply.status == 200 and reply.tokens == alone.tokens
    after = await metric(pair.decode, "vllm:pdxfer_fallbacks_total")
    after += await metric(pair.decode, "vllm:pdxfer_failed_transfers_total")
    assert after > before, "the kill came too late to matter"
    print(f"answered {time.monotonic() - killed_at:.1f} s after the kill")
    assert (await complete(pair.proxy, prompts.ids(300, 92), 4)).status == 200
    assert await until(lambda: paired_again(pair, prompts), 180.0), running.tail()


async def started(pair: PairUrls) -> bool:
    return await metric(pair.prefill, "vllm:num_requests_running") > 0


async def paired_again(pair: PairUrls, prompts: Prompts) -> bool:
    """An engine joins the router a moment before its HTTP server listens: both must be back."""
    try:
        await metric(pair.prefill, "vllm:num_requests_running")
    except aiohttp.ClientError:
        return False
    return (await complete(pair.proxy, prompts.ids(300, 93), 1)).mode == "pair"
