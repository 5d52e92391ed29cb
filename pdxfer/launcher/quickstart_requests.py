"""The quickstart's requests: what is asked, and one streamed answer timed by its client.

Text is CPython's own documentation (pydoc_data), which every machine has: real English, no download.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import aiohttp

from pdxfer.core.clock import Clock
from pdxfer.core.errors import PdxferError, UnreachableError
from pdxfer.metrics.timeline import HEADER, parse_header

_CHARS_PER_TOKEN = 4.3
"""Of this text under the demo model's tokenizer; the table shows the engine's own count."""
_TIMEOUT_S = 300.0
_SETTLE_S = 5.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One of the quickstart's requests."""

    name: str
    prompt: str
    max_tokens: int = 48
    is_paired: bool = True
    """Long enough for a transfer; shorter ones are the decode engine's alone."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """One streamed answer, as its client saw it."""

    text: str = ""
    request_id: str = ""
    num_prompt_tokens: int = 0
    ttft_ms: float = 0.0
    times: list[float] = field(default_factory=list)
    """Clock seconds of each piece of text."""
    mode: str = ""
    """From the proxy's timeline: pair or local; empty from an engine."""
    stages_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What the proxy knows of one request's transfer."""

    outcome: str = ""
    channel: str = ""
    num_bytes: int = 0
    num_units: int = 0
    num_tokens: int = 0
    reason: str = ""


def questions() -> list[Question]:
    """A short chat, and two texts with a question."""
    return [
        Question(name="short chat", prompt="Give me three short tips for a good night's sleep.", is_paired=False),
        Question(name="1,000 tokens", prompt=text(1000, "compound") + "\n\nWhat is this text about? Answer briefly."),
        Question(name="3,000 tokens", prompt=text(3000, "types") + "\n\nWhat is this text about? Answer briefly."),
    ]


def text(num_tokens: int, topic: str) -> str:
    """About so many tokens of documentation, whole paragraphs."""
    from pydoc_data.topics import topics

    paragraphs = (" ".join(p.split()) for p in str(topics[topic]).split("\n\n"))
    taken, room = [], num_tokens * _CHARS_PER_TOKEN
    for paragraph in paragraphs:
        if len(paragraph) < 80:
            continue
        taken.append(paragraph)
        room -= len(paragraph)
        if room <= 0:
            break
    return "\n\n".join(taken)


class Asker:
    """Sends chat requests to one base URL (an engine or the proxy)."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, clock: Clock) -> None:
        self._session, self._url, self._model, self._clock = session, url, model, clock

    async def ask(self, question: Question) -> Answer:
        """The whole answer, timed."""
        answer = Answer()
        async for _ in self.stream(question, answer):
            pass
        return answer

    async def stream(self, question: Question, answer: Answer, *, ignore_eos: bool = False) -> AsyncIterator[None]:
        """Yields at each piece of text, filling `answer`. Leaving early aborts the request."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": question.prompt}],
            "max_tokens": question.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": ignore_eos,
        }
        began = self._clock.now()
        try:
            async with self._session.post(
                f"{self._url}/v1/chat/completions", json=body, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)
            ) as response:
                if response.status != 200:
                    raise PdxferError(f"{self._url} answered {response.status}: {(await response.text())[:300]}")
                _read_headers(response.headers, answer)
                async for event in _events(response):
                    if self._take(event, answer, began):
                        yield
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UnreachableError(f"{self._url}: {type(error).__name__} {error}".rstrip()) from error

    def _take(self, event: Mapping[str, object], answer: Answer, began: float) -> bool:
        """Note one event; True if it carried text."""
        usage = event.get("usage")
        if isinstance(usage, dict):
            answer.num_prompt_tokens = int(usage["prompt_tokens"])
        choices = event.get("choices")
        piece = choices[0].get("delta", {}).get("content") if isinstance(choices, list) and choices else None
        if not piece:
            return False
        now = self._clock.now()
        answer.text += str(piece)
        answer.times.append(now)
        if len(answer.times) == 1:
            answer.ttft_ms = (now - began) * 1000
        return True


async def moved(session: aiohttp.ClientSession, proxy: str, answer: Answer, clock: Clock) -> Moved:
    """What moved for a request, once decode has settled it (bounded); also completes the answer's stages."""
    deadline = clock.now() + _SETTLE_S
    while True:
        async with session.get(f"{proxy}/v1/pdxfer/timeline/{answer.request_id}") as response:
            entry = await response.json()
        answer.stages_ms |= {stage: ms for stage, ms in entry.get("stages_ms", {}).items() if stage != "ttft"}
        transfer = entry.get("transfer")
        if transfer:
            return Moved(**{key: transfer[key] for key in Moved.__slots__})
        if entry.get("mode") != "pair":
            return Moved(reason=str(entry.get("reason") or "no pair"))
        if clock.now() > deadline:
            return Moved(reason="the decode engine never settled the transfer")
        await asyncio.sleep(_POLL_S)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Mapping[str, object]]:
    async for line in response.content:
        if line.startswith(b"data:") and b"[DONE]" not in line:
            event = json.loads(line[5:])
            if "error" in event:
                raise PdxferError(f"the stream broke off: {event['error']}")
            yield event


def _read_headers(headers: Mapping[str, str], answer: Answer) -> None:
    answer.request_id = headers.get("X-Request-Id", "")
    if HEADER in headers:
        texts, answer.stages_ms = parse_header(headers[HEADER])
        answer.mode = texts.get("mode", "")
