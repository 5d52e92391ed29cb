"""What is measured on running engines: each workload's latencies, a batch's rate, cold against warm, equal words."""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pdxfer.bench.reuse_arms import SERVED_NAME
from pdxfer.bench.reuse_work import NUM_NEW_TOKENS, Workloads
from pdxfer.bench.ttft_load import Answer, Client, completion
from pdxfer.bench.ttft_run import say

SETTLE_S = 0.3
"""Saves end and are told within this after an answer; a load that comes too early would show as a miss."""


@dataclass(slots=True, kw_only=True)
class Figures:
    """One arm's."""

    latencies_s: dict[str, list[float]] = field(default_factory=dict)
    """longdoc, chat, even chat, and their storing passes: request to last token."""
    batch_s: float = 0.0
    num_batch: int = 0
    long_s: list[float] = field(default_factory=list)
    """Time to first token of a long prompt that the tier has."""
    loaded_tokens: float = 0.0
    """Prompt tokens that came from the tier, by vLLM's own counter; the proof that the tier served."""


class Engine:
    """One running engine."""

    def __init__(self, client: Client, name: str, url: str, directory: Path | None = None) -> None:
        self.name, self._client, self._url, self._directory = name, client, url, directory
        self._count = 0

    async def ask(self, prompt: Sequence[int], num_tokens: int = NUM_NEW_TOKENS) -> Answer:
        """One streamed answer. What a disk tier reads is not in the page cache."""
        self._count += 1
        if self._directory is not None:
            await asyncio.to_thread(drop_page_cache, self._directory)
        body = completion(SERVED_NAME, prompt, num_tokens)
        return await self._client.stream(f"{self._url}/v1/completions", body, f"{self.name}-{self._count}")

    async def loaded_tokens(self) -> float:
        """vLLM's count of prompt tokens from outside."""
        text = await self._client.text(f"{self._url}/metrics")
        name = "vllm:external_prefix_cache_hits_total"
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


async def workload(engine: Engine, work: Workloads) -> Figures:
    """All three workloads and the long prompts, storing passes first."""
    figures = Figures()
    for _ in range(2):
        await engine.ask(work.equal[0])  # first touch of memory and code, not counted
    for name, first, then in (
        ("longdoc", work.longdoc_store, work.longdoc),
        ("chat", work.chat_store, work.chat),
        ("even chat", work.even_store, work.even),
    ):
        figures.latencies_s[f"{name}, storing"] = await _each(engine, first)
        figures.latencies_s[name] = await _each(engine, then)
        say(f"  {engine.name}: {name} done")
    await engine.ask(work.batch_store)
    await asyncio.sleep(SETTLE_S)
    began = time.perf_counter()
    await asyncio.gather(*(engine.ask(prompt) for prompt in work.batch))
    figures.batch_s, figures.num_batch = time.perf_counter() - began, len(work.batch)
    say(f"  {engine.name}: batch done")
    figures.loaded_tokens = await engine.loaded_tokens()
    return figures


async def _each(engine: Engine, prompts: Sequence[list[int]]) -> list[float]:
    """One after the other; seconds from request to last token."""
    found = []
    for prompt in prompts:
        found.append((await engine.ask(prompt)).times_s[-1])
        await asyncio.sleep(SETTLE_S)
    return found


async def warm(engine: Engine, prompts: Sequence[list[int]]) -> list[float]:
    """Time to first token of prompts that were asked before."""
    for prompt in prompts:
        await engine.ask(prompt)
        await asyncio.sleep(SETTLE_S)
    return [(await engine.ask(prompt)).ttft_s for prompt in prompts]


@dataclass(frozen=True, slots=True, kw_only=True)
class MissOnly:
    """What prompts that nobody has seen take: a plain engine's, and one's with the store, pair by pair."""

    plain_s: list[float] = field(default_factory=list)
    """To the first token of one prompt."""
    stored_s: list[float] = field(default_factory=list)
    plain_burst_s: list[float] = field(default_factory=list)
    """To the last token of several at once."""
    stored_burst_s: list[float] = field(default_factory=list)


async def miss_only(plain: Engine, stored: Engine, work: Workloads) -> MissOnly:
    """Both engines are up and one computes at a time, first the one, then the other."""
    found = MissOnly()
    for place in range(0, len(work.fresh), 2):
        turns = [
            (plain, found.plain_s, found.plain_burst_s, place),
            (stored, found.stored_s, found.stored_burst_s, place + 1),
        ]
        for engine, first_s, burst_s, index in turns if place % 4 else reversed(turns):
            first_s.append((await engine.ask(work.fresh[index])).ttft_s)
            await asyncio.sleep(SETTLE_S)
            began = time.perf_counter()
            await asyncio.gather(*(engine.ask(prompt) for prompt in work.bursts[index]))
            burst_s.append(time.perf_counter() - began)
            await asyncio.sleep(SETTLE_S)
    return found


async def count_equal(engine: Engine, prompts: Sequence[list[int]]) -> int:
    """How many prompts are continued with the same words when their KV is loaded as when it was computed."""
    computed = []
    for prompt in prompts:
        computed.append((await engine.ask(prompt)).text)
        await asyncio.sleep(SETTLE_S)
    return sum([(await engine.ask(p)).text == text for p, text in zip(prompts, computed, strict=True)])


def drop_page_cache(directory: Path) -> None:
    """Let the kernel forget what it holds of these files."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
