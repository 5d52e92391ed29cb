"""Pairs that are started otherwise: bfloat16, without prefix caching, with a LoRA adapter, two of each role.

Only in `tests/run.sh full`: each starts engines of its own. CI runs bfloat16 and an adapter in test_two_hosts.py.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdxfer.bench.texts import Prompts
from tests.e2e.adapter import make_adapter
from tests.e2e.conftest import RunningPair
from tests.e2e.engines import BF16_TOLERANCE, bf16_difference, complete, get, metric, until
from tests.e2e.test_right import BORDERS, LONG, both

pytestmark = [pytest.mark.vllm, pytest.mark.full]

SETS = ("router.min_remote_tokens=0", "engine.max_num_seqs=8")


@contextmanager
def started(log: Path, *sets: str) -> Iterator[RunningPair]:
    """A pair of its own, stopped at the end."""
    running = RunningPair(*SETS, *sets, log=log)
    try:
        yield running
    finally:
        running.stop()


async def test_bfloat16_agrees_within_the_tolerance(logs: Path, prompts: Prompts) -> None:
    """Greedy log-probabilities of the pair and of one engine, over the lengths of the float32 test."""
    worst = {}
    with started(logs / "bf16.log", "model.dtype=bfloat16") as running:
        for salt, length in enumerate(BORDERS + LONG):
            through, alone = await both(running.urls, prompts.ids(length, salt), f"bf16-{salt}")
            worst[length] = bf16_difference(through, alone)
    print(f"largest difference of a log-probability: {max(worst.values()):.4f}")
    assert max(worst.values()) <= BF16_TOLERANCE, worst


async def test_codecs_on_the_wire(logs: Path, prompts: Prompts) -> None:
    """KV that travels as lossless frames over tcp is the KV: as near to one engine as raw bytes are."""
    worst = {}
    sets = ("model.dtype=bfloat16", "transport.channels=[tcp]", "codec.wire=lossless")
    with started(logs / "wire.log", *sets) as running:
        for salt, length in enumerate((200, 257, 700, 1500, 3000)):
            through, alone = await both(running.urls, prompts.ids(length, salt), f"wire-{salt}")
            assert through.mode == "pair"
            worst[length] = bf16_difference(through, alone)

        async def has_counted() -> bool:
            return await metric(running.urls.controller, "pdxfer_node_wire_frames_total") > 0

        assert await until(has_counted)
        assert await metric(running.urls.controller, "pdxfer_node_wire_saved_bytes_total") > 0
    assert max(worst.values()) <= BF16_TOLERANCE, worst


async def test_without_prefix_caching(logs: Path, prompts: Prompts) -> None:
    """Nothing is reused: every block comes over the wire, also the second time, and the tokens are right."""
    sets = ("model.dtype=float32", "engine.prefix_caching=false")
    with started(logs / "uncached.log", *sets) as running:
        for salt, length in enumerate((*BORDERS[3:], *LONG, 700, 700)):
            through, alone = await both(running.urls, prompts.ids(length, salt), f"u-{salt}")
            assert through.tokens == alone.tokens, length
        batch = [complete(running.urls.proxy, prompts.ids(700, 5), 8) for _ in range(4)]
        answers = await asyncio.gather(*batch)
        assert len({tuple(a.tokens) for a in answers}) == 1


async def test_lora_adapters_are_kept_apart(logs: Path, prompts: Prompts, tmp_path: Path) -> None:
    """The same prompt with and without an adapter: each equals one engine's answer, and they differ."""
    adapter = make_adapter(tmp_path / "adapter")
    flags = f"--enable-lora,--max-lora-rank,8,--lora-modules,tuned={adapter}"
    with started(logs / "lora.log", "model.dtype=float32", f"engine.extra_args={flags}") as running:
        ids, said = prompts.ids(600, 8), {}
        for name in ("demo", "tuned", "demo"):
            through = await complete(running.urls.proxy, ids, 12, model=name)
            alone = await complete(running.urls.decode, ids, 12, model=name, cache_salt="alone")
            assert (through.status, alone.status, through.mode) == (200, 200, "pair"), (through.body, alone.body)
            assert through.tokens == alone.tokens, name
            said[name] = through.tokens
        assert said["demo"] != said["tuned"]


@pytest.fixture(scope="module")
def four(logs: Path) -> Iterator[RunningPair]:
    """Two engines of each role."""
    places = ("topology.prefill=2", "topology.decode=2", "model.dtype=float32", "engine.kv_cache_gib=0.5")
    with started(logs / "2p2d.log", *places) as running:
        yield running


def nth(url: str, number: int) -> str:
    """URL of another engine of the same role: they have neighbouring ports."""
    host, _, port = url.rpartition(":")
    return f"{host}:{int(port) + number}"


async def test_two_prefills_and_two_decodes(four: RunningPair, prompts: Prompts) -> None:
    """All four take part, and every answer is right."""
    ids = [prompts.ids(300 + 40 * n, n) for n in range(12)]
    answers = await asyncio.gather(*[complete(four.urls.proxy, i, 8, cache_salt="four") for i in ids])
    assert {a.mode for a in answers} == {"pair"}
    for prompt, answer in zip(ids, answers, strict=True):
        alone = await complete(four.urls.decode, prompt, 8, cache_salt="alone")
        assert answer.tokens == alone.tokens
    for url in (four.urls.prefill, four.urls.decode):
        for number in (0, 1):
            assert await metric(nth(url, number), "vllm:prompt_tokens_total") > 0, (url, number)


async def test_another_prefill_takes_over_a_real_transfer(four: RunningPair, prompts: Prompts) -> None:
    """kill -9 of a prefill in mid-transfer: what landed stays, the other one sends the rest, the tokens are right."""
    ids, urls = prompts.ids(3000, 92), four.urls
    alone = await complete(urls.decode, ids, 8, cache_salt="taken-alone")
    resumed = await metric(urls.controller, "pdxfer_node_resumed_transfers_total")
    pending = asyncio.create_task(complete(urls.proxy, ids, 8, cache_salt="taken"))
    used: list[float] = []

    async def is_under_way() -> bool:
        used[:] = [await metric(nth(urls.prefill, number), "vllm:kv_cache_usage_perc") for number in (0, 1)]
        return max(used) > 0

    assert await until(is_under_way, 30.0)  # told after the first of two steps
    victim = used.index(max(used))
    four.kill_engine(nth(urls.prefill, victim))
    reply = await pending
    assert reply.status == 200 and reply.tokens == alone.tokens

    async def is_counted() -> bool:
        return await metric(urls.controller, "pdxfer_node_resumed_transfers_total") == resumed + 1

    entry = await get(f"{urls.proxy}/v1/pdxfer/timeline/{reply.request_id}")
    assert await until(is_counted), entry
    (resume,) = entry["resumes"]
    assert (resume["before"], resume["prefill"], resume["epoch"]) == (f"p{victim}", f"p{1 - victim}", 2)
    assert resume["first_missing"] > 0
    print(f"from block {resume['first_missing']}: {resume['reason']}; {entry['transfer']}")
