"""The quickstart's measurements: each question to one engine and to the pair; a stream beside a long prefill."""

import asyncio
import statistics
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

import aiohttp

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.launcher.quickstart_requests import Answer, Asker, Moved, Question, moved, questions, text

_STREAM_TOKENS = 2000
_LEAD_TOKENS = 12
"""Tokens of the running stream before the long prompt is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One question, both ways."""

    question: Question
    alone: Answer
    pair: Answer
    moved: Moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A running stream while a long prompt is prefilled."""

    median_ms: float
    """Between two tokens."""
    longest_ms: float
    num_tokens: int
    prompt_ttft_ms: float
    """Of the long prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Everything the quickstart shows."""

    compared: list[Compared]
    stream_alone: Stream
    stream_pair: Stream


async def measure(engine_url: str, proxy_url: str, model: str, say: Callable[[str], None]) -> Measured:
    """Ask everything, one thing after the other. `engine_url` is the decode engine, asked without any transfer."""
    async with aiohttp.ClientSession(trust_env=False) as session:
        alone = Asker(session, engine_url, model, SYSTEM_CLOCK)
        pair = Asker(session, proxy_url, model, SYSTEM_CLOCK)
        await _warm_up(alone, pair, say)
        compared = []
        for question in questions():
            say(f"asking: {question.name}, one engine")
            first = await alone.ask(question)
            say(f"asking: {question.name}, pair")
            second = await pair.ask(question)
            what = await moved(session, proxy_url, second, SYSTEM_CLOCK)
            compared.append(Compared(question=question, alone=first, pair=second, moved=what))
        say("a running stream beside a 3,000-token prompt, one engine")
        stream_alone = await _stream_beside(alone)
        say("a running stream beside a 3,000-token prompt, pair")
        stream_pair = await _stream_beside(pair)
    return Measured(compared=compared, stream_alone=stream_alone, stream_pair=stream_pair)


async def _warm_up(alone: Asker, pair: Asker, say: Callable[[str], None]) -> None:
    """First requests compile and allocate; they are not shown."""
    say("warming up both engines")
    question = Question(name="warm-up", prompt=text(700, "debugger"), max_tokens=4)
    await alone.ask(question)
    await pair.ask(question)


async def _stream_beside(asker: Asker) -> Stream:
    """Gaps of a running stream between sending a long prompt and that prompt's first token."""
    running = Question(name="stream", prompt="Tell me a long story about the sea.", max_tokens=_STREAM_TOKENS)
    long = Question(name="long", prompt=text(3000, "specialnames"), max_tokens=1)
    answer, window = Answer(), asyncio.Event()
    began = 0.0
    prefill: asyncio.Task[Answer] | None = None
    async with aclosing(asker.stream(running, answer, ignore_eos=True)) as pieces:  # type: ignore[type-var]
        async for _ in pieces:
            if len(answer.times) == _LEAD_TOKENS:
                began = answer.times[-1]
                prefill = asyncio.create_task(asker.ask(long))
                prefill.add_done_callback(lambda _: window.set())
            if window.is_set():
                break
    assert prefill is not None
    prompt = await prefill
    return _gaps([began, *(t for t in answer.times if t > began)], prompt.ttft_ms)


def _gaps(times: list[float], prompt_ttft_ms: float) -> Stream:
    gaps = [(after - before) * 1000 for before, after in zip(times, times[1:], strict=False)] or [0.0]
    return Stream(
        median_ms=statistics.median(gaps), longest_ms=max(gaps), num_tokens=len(gaps), prompt_ttft_ms=prompt_ttft_ms
    )
