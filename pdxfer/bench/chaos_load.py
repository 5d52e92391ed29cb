"""The load of a chaos run: prompts of real English, a steady stream of greedy completions, and what each one got.

Nothing is judged here (chaos_judge.py does): a request notes what it was told, when, and how it ended.
"""

import asyncio
import json
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from pdxfer.bench.chaos_plan import SERVED_NAME
from pdxfer.bench.texts import excerpt

_MIN_CHARS = 200
_REFUSED_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One prompt of the pool."""

    prompt: str
    num_tokens: int
    """To be generated."""

    def body(self, **more: object) -> dict[str, object]:
        """Body of a greedy completion."""
        return {
            "model": SERVED_NAME, "prompt": self.prompt, "max_tokens": self.num_tokens, "temperature": 0,
            "ignore_eos": True, **more,
        }  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Got:
    """One request, as its client saw it; times in event-loop seconds."""

    question: Question
    is_stream: bool
    began: float
    ended: float = 0.0
    pieces: list[str] = field(default_factory=list)
    logprobs: dict[str, Any] = field(default_factory=dict)
    """Of an answer that did not stream, if they were asked for."""
    failure: str = ""
    """Why it is not complete; empty if it is."""
    is_told: bool = False
    """The failure came as an error body or an error event, not as a cut connection."""
    is_hung: bool = False
    """Nothing ended it within its deadline."""
    has_left: bool = False
    """Its client went away before the end, as planned."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def questions(seed: int, max_chars: int, count: int = 24) -> list[Question]:
    """The pool: short and long prompts, all different."""
    source = random.Random(seed)
    found = []
    for number in range(count):
        num_chars = int(_MIN_CHARS * (max_chars / _MIN_CHARS) ** source.random())
        text = excerpt(num_chars, salt=seed * count + number)
        found.append(Question(prompt=f"{number}. {text}", num_tokens=source.randint(8, 48)))
    return found


async def ask(
    session: aiohttp.ClientSession, url: str, question: Question, deadline_s: float, *, is_stream: bool,
    leave_s: float | None = None, **more: object,
) -> Got:  # fmt: skip
    """Send one completion and note all that happens; with `leave_s` hang up after so long. Where nobody listens it
    tries again, as clients do. Raises nothing but CancelledError."""
    loop = asyncio.get_running_loop()
    got = Got(question=question, is_stream=is_stream, began=loop.time())
    try:
        async with (
            asyncio.timeout(deadline_s if leave_s is None else leave_s),
            await _post(session, f"{url}/v1/completions", question.body(stream=is_stream, **more)) as response,
        ):
            if response.status != 200:
                _failed(got, response.status, await response.read())
            elif is_stream:
                await _read_stream(got, response)
            else:
                [choice] = (await response.json())["choices"]
                got.pieces.append(choice["text"])
                got.logprobs = choice.get("logprobs") or {}
    except TimeoutError:
        got.is_hung, got.has_left = leave_s is None, leave_s is not None
        got.failure = "its client left" if got.has_left else f"nothing ended it within {deadline_s:g} s"
    except (aiohttp.ClientError, ValueError, OSError) as error:
        got.failure = f"{type(error).__name__}: {error}"
    got.ended = loop.time()
    return got


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> aiohttp.ClientResponse:
    """Until somebody accepts the connection."""
    while True:
        try:
            return await session.post(url, json=body)
        except aiohttp.ClientConnectorError:
            await asyncio.sleep(_REFUSED_S)


async def _read_stream(got: Got, response: aiohttp.ClientResponse) -> None:
    is_finished = False
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        if line.strip() == b"data: [DONE]":
            got.failure = "" if is_finished else "[DONE] came without a finish reason"
            return
        event = json.loads(line[5:])
        if "error" in event:
            got.failure, got.is_told = f"error event: {event['error'].get('code')}", True
            return
        for choice in event["choices"]:
            got.pieces.append(choice["text"])
            is_finished = is_finished or choice["finish_reason"] is not None
    got.failure = "the stream ended without [DONE]"


def _failed(got: Got, status: int, body: bytes) -> None:
    try:
        error = json.loads(body)["error"]
        got.is_told, got.failure = True, f"{status} {error.get('code')}: {str(error.get('message'))[:160]}"
    except (ValueError, KeyError, AttributeError):
        got.failure = f"{status}: {body[:160]!r}"


Send = Callable[[Question, bool, int], Coroutine[Any, Any, Got]]
"""Sends a question (as a stream or not, under a number) and says what came."""


class Load:
    """A steady stream of requests, `rate` a second, until `stop`; three of four are streams."""

    def __init__(self, send: Send, pool: list[Question], rate: float) -> None:
        self._send, self._pool, self._rate = send, pool, rate
        self._tasks: list[asyncio.Task[Got]] = []
        self._pump = asyncio.create_task(self._run())

    @property
    def num_sent(self) -> int:
        return len(self._tasks)

    async def until_sent(self, count: int, end: float = float("inf")) -> None:
        """Go on until so many were sent, or until `end` of the event loop's clock."""
        while self.num_sent < count and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(1.0 / self._rate)

    async def stop(self) -> list[Got]:
        """Send no more and wait for those on the way; each ends by its own deadline."""
        self._pump.cancel()
        await asyncio.wait([self._pump])
        return list(await asyncio.gather(*self._tasks))

    def abort(self) -> None:
        """Drop everything."""
        for task in (self._pump, *self._tasks):
            task.cancel()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        while True:
            number = len(self._tasks)
            await asyncio.sleep(max(0.0, start + number / self._rate - loop.time()))
            question = self._pool[number % len(self._pool)]
            is_stream = (number + number // len(self._pool)) % 4 != 3
            self._tasks.append(asyncio.create_task(self._send(question, is_stream, number)))
