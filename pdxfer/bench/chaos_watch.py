"""What a chaos run asks the proxy beside its answers: how many streams it continued elsewhere, and what a transfer
moved, which is compared with the bytes that crossed the link."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import aiohttp

from pdxfer.bench.chaos_cluster import Cluster
from pdxfer.bench.chaos_link import FaultyLink
from pdxfer.bench.chaos_load import Question
from pdxfer.bench.ttft_errors import BenchError
from pdxfer.bench.ttft_link import require_crossed

_REPLAYS = re.compile(rb"^pdxfer_proxy_replays_total (\S+)", re.MULTILINE)
_PROBE_S = 20.0
_TIMELINE_S = 10.0
_POLL_S = 0.05


class Watch:
    """Questions to the proxy of one cluster."""

    def __init__(self, cluster: Cluster, session: aiohttp.ClientSession) -> None:
        self._cluster, self._session = cluster, session
        self._replays = [0]
        """Of each proxy process so far; the last one still counts."""

    @property
    def num_replays(self) -> int:
        """Streams continued by another engine, by the last look at each proxy process."""
        return sum(self._replays)

    async def look(self) -> None:
        """Read the counter. What a proxy counted after the last look before it was killed is lost."""
        async with asyncio.timeout(_PROBE_S), self._session.get(f"{self._cluster.proxy}/metrics") as response:
            found = _REPLAYS.search(await response.read())
        self._replays[-1] = int(float(found[1])) if found else 0

    def proxy_is_new(self) -> None:
        """It counts from zero."""
        self._replays.append(0)

    async def crossed(self, link: FaultyLink, questions: Sequence[Question], deadline_s: float) -> int:
        """Send one request after another until one has its engines on both sides; the bytes that it put on the link.
        Raises BenchError if they are fewer than its KV, or if none is sent across."""
        far = self._cluster.plan.far
        for number, question in enumerate(questions):
            before = sum(link.sent())
            entry = await self._ask(question, f"crossing-{number}", deadline_s)
            moved = entry["transfer"]
            if moved and moved["outcome"] == "delivered" and (entry["prefill"] in far) != (entry["decode"] in far):
                name = f"{entry['prefill']} → {entry['decode']} by {moved['channel']}"
                return require_crossed(name, before, sum(link.sent()), int(moved["num_bytes"]))
        raise BenchError(f"none of {len(questions)} requests was prefilled on one side and decoded on the other")

    async def _ask(self, question: Question, name: str, deadline_s: float) -> dict[str, Any]:
        """The timeline of one request whose transfer has been settled."""
        url, body = self._cluster.proxy, question.body(cache_salt=name)
        async with asyncio.timeout(deadline_s), self._session.post(f"{url}/v1/completions", json=body) as response:
            await response.read()
            request_id = response.headers["X-Request-Id"]
        async with asyncio.timeout(_TIMELINE_S):
            while True:
                async with self._session.get(f"{url}/v1/pdxfer/timeline/{request_id}") as response:
                    entry = dict(await response.json())
                if entry["transfer"] or entry["mode"] != "pair":
                    return entry
                await asyncio.sleep(_POLL_S)
