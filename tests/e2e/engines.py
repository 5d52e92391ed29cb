"""Talks to a running pair: the proxy, and each engine directly (one engine alone is the reference)."""

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any

import aiohttp

MODEL = "demo"
TIE = 1e-4
"""Below this gap between the two best log-probabilities, batch composition may swap them."""
BF16_TOLERANCE = 0.2
"""Largest difference of a greedy token's log-probability between two computations of one prompt in bfloat16. One vLLM
engine differs from itself by up to 0.127 when it answers from its own prefix cache (7 lengths on an AMD EPYC)."""
TIMEOUT = aiohttp.ClientTimeout(total=300)


@dataclass(frozen=True, slots=True)
class PairUrls:
    """Where the parts of a running pair listen."""

    proxy: str
    prefill: str
    decode: str
    controller: str


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer, with what the proxy says about how it came to be."""

    status: int
    body: dict[str, Any]
    timeline: str
    request_id: str = ""

    @property
    def text(self) -> str:
        choice = self.body["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]

    @property
    def tokens(self) -> list[str]:
        """Greedy tokens, as text pieces (logprobs must have been asked for)."""
        return list(self.body["choices"][0]["logprobs"]["tokens"])

    @property
    def token_logprobs(self) -> list[float]:
        """Log-probability of each greedy token."""
        return list(self.body["choices"][0]["logprobs"]["token_logprobs"])

    @property
    def top2_gaps(self) -> list[float]:
        """Per position: log-probability of the best minus the second best token."""
        gaps = []
        for top in self.body["choices"][0]["logprobs"]["top_logprobs"]:
            best = sorted(top.values(), reverse=True)
            gaps.append(best[0] - best[1] if len(best) > 1 else 99.0)
        return gaps

    @property
    def mode(self) -> str:
        """pair or local, from the timeline header."""
        found = re.search(r"mode=(\w+)", self.timeline)
        return found.group(1) if found else ""


async def post(url: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Reply:
    """One request, not streamed."""
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        async with session.post(url + path, json=body, headers=headers) as response:
            text, got = await response.text(), response.headers
    payload = json.loads(text) if text.startswith("{") else {"raw": text}
    return Reply(response.status, payload, got.get("x-pdxfer-timeline", ""), got.get("x-request-id", ""))


async def complete(url: str, prompt: list[int] | str, max_tokens: int = 16, **more: Any) -> Reply:
    """A greedy completion with the two best log-probabilities of each token."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return await post(url, "/v1/completions", {**body, "logprobs": 2, **more})


def bf16_difference(one: Reply, other: Reply) -> float:
    """Largest difference of log-probabilities while both say the same tokens; where they part, the reference's gap
    between its two best tokens: a tie within the tolerance may fall either way, and what follows is another text."""
    worst = 0.0
    for at, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)):
        if a != b:
            return max(worst, other.top2_gaps[at])
        worst = max(worst, abs(one.token_logprobs[at] - other.token_logprobs[at]))
    return worst


async def metric(url: str, name: str) -> float:
    """Sum of all samples of one Prometheus metric."""
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session, session.get(url + "/metrics") as response:
        text = await response.text()
    lines = [line for line in text.splitlines() if re.match(rf"{re.escape(name)}(\{{|\s)", line)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def get(url: str) -> Any:
    """A JSON answer."""
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session, session.get(url) as response:
        return await response.json()


async def nodes(controller: str) -> dict[str, dict[str, Any]]:
    """What the router knows of each engine."""
    return {node["engine_id"]: node for node in (await get(controller + "/v1/nodes"))["nodes"]}


async def until(condition: Any, timeout_s: float = 10.0) -> bool:
    """Poll an async condition until it holds or the deadline passes."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while asyncio.get_running_loop().time() < deadline:
        if await condition():
            return True
        await asyncio.sleep(0.05)
    return False
