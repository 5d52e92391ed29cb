"""The client of the TTFT bench: streams completions and notes when each piece came. asyncio, one event loop.

Times are seconds since the request was sent (to whichever leg was first), read where the client reads its socket.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from pdxfer.bench.ttft_errors import BenchError

TIMELINE_HEADER = "x-pdxfer-timeline"
_REQUEST_TIMEOUT_S = 300.0
_EXCERPT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """KV of one request that went from prefill to decode."""

    num_bytes: int
    num_units: int
    channel: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One streamed completion."""

    request_id: str
    times_s: tuple[float, ...]
    """When each piece with a token came."""
    text: str
    stages_ms: Mapping[str, float] = field(default_factory=dict)
    """pdxfer only: where the time went, by stage."""
    landed_after_ms: float | None = None
    """pdxfer only: from prefill's end to the last landed byte as stamped, negative where it landed before."""
    moved: Moved | None = None
    """pdxfer only: what the pair moved."""
    alone_because: str = ""
    """pdxfer only: why no pair served it."""

    @property
    def ttft_s(self) -> float:
        """Time to the first piece."""
        return self.times_s[0]


class Client:
    """Sends requests to vLLM-like servers. `async with`."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Client":
        timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, trust_env=False)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def get(self, url: str) -> dict[str, Any] | None:
        """The JSON object there; None if it answers 404."""
        assert self._session is not None
        async with _translated(url), self._session.get(url) as response:
            if response.status == 404:
                return None
            await _check(response)
            return dict(await response.json())

    async def text(self, url: str) -> str:
        """The body there."""
        assert self._session is not None
        async with _translated(url), self._session.get(url) as response:
            await _check(response)
            return await response.text()

    async def post(self, url: str, body: Mapping[str, Any], request_id: str) -> tuple[dict[str, Any], str]:
        """A JSON answer and its timeline header (empty if it has none)."""
        assert self._session is not None
        async with (
            _translated(url),
            self._session.post(url, json=body, headers={"X-Request-Id": request_id}) as response,
        ):
            await _check(response)
            return dict(await response.json()), response.headers.get(TIMELINE_HEADER, "")

    async def stream(
        self,
        url: str,
        body: Mapping[str, Any],
        request_id: str,
        *,
        sent: float | None = None,
        on_token: Callable[[float], None] | None = None,
    ) -> Answer:
        """A streamed completion. `sent` (perf_counter seconds) is set where an earlier leg counts in; `on_token` is
        called with the perf_counter of each piece."""
        assert self._session is not None
        sent = time.perf_counter() if sent is None else sent
        times: list[float] = []
        texts: list[str] = []
        headers = {"X-Request-Id": request_id}
        async with (
            _translated(url),
            self._session.post(url, json={**body, "stream": True}, headers=headers) as response,
        ):
            await _check(response)
            async for line in response.content:
                piece = parse_event(line, url)
                if piece is None:
                    continue
                now = time.perf_counter()
                times.append(now - sent)
                texts.append(piece)
                if on_token is not None:
                    on_token(now)
        if not times:
            raise BenchError(f"{url} ended a stream without a token (request {request_id})")
        return Answer(request_id=request_id, times_s=tuple(times), text="".join(texts))


def parse_event(line: bytes, url: str) -> str | None:
    """The text of one server-sent event; None if the line carries no token. Raises BenchError for an error event."""
    if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
        return None
    event = json.loads(line[5:])
    if "error" in event:
        raise BenchError(f"{url} failed in the middle of a stream: {event['error']}")
    choices = event.get("choices")
    if not choices:
        return None
    if choices[0].get("finish_reason") == "error":
        raise BenchError(f"{url} ended a stream with finish_reason=error: its KV load failed, see the engine's log")
    return str(choices[0]["text"])


def completion(model: str, prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
    """Body of a greedy completion of exactly `num_tokens`."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def poisson_arrivals(rate: float, count: int, seed: int = 0) -> list[float]:
    """Seconds from the start at which requests arrive, `rate` a second on average; the same for every arm."""
    source = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        now += source.expovariate(rate)
        times.append(now)
    return times


async def open_loop(arrivals: Sequence[float], send: Callable[[int], Awaitable[Answer]]) -> list[Answer]:
    """Send request i at arrivals[i], whether or not earlier ones were answered; all answers in that order."""
    loop = asyncio.get_running_loop()
    start = loop.time()

    async def one(index: int) -> Answer:
        await asyncio.sleep(max(0.0, start + arrivals[index] - loop.time()))
        return await send(index)

    tasks = [asyncio.create_task(one(index)) for index in range(len(arrivals))]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def _translated(url: str) -> AsyncIterator[None]:
    """Turns aiohttp's errors into BenchError that names the url."""
    try:
        yield
    except TimeoutError as error:
        raise BenchError(f"{url} did not finish within {_REQUEST_TIMEOUT_S:g} s") from error
    except aiohttp.ClientError as error:
        raise BenchError(f"{url}: {type(error).__name__}: {error}") from error


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        text = (await response.text())[:_EXCERPT]
        raise BenchError(f"{response.url} answered {response.status}: {text}")
