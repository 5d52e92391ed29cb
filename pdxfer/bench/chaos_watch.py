"""What a chaos run asks beside its answers: how many streams the proxy continued elsewhere, how many transfers another
prefill took over, and what a transfer moved, which is compared with the bytes that crossed the link."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import aiohttp

from pdxfer.bench.chaos_cluster import Cluster
from pdxfer.bench.chaos_link import FaultyLink
from pdxfer.bench.chaos_load import Question
from pdxfer.bench.report import Value
from pdxfer.bench.ttft_errors import BenchError
from pdxfer.bench.ttft_link import require_crossed

_REPLAYS = re.compile(r"^pdxfer_proxy_replays_total() (\S+)", re.MULTILINE)
_RESUMED = re.compile(r"^pdxfer_node_resumed_transfers_total(\{.*\}) (\S+)", re.MULTILINE)
_PROBE_S = 20.0
_TIMELINE_S = 10.0
_POLL_S = 0.05


class Sum:
    """Of a counter with one label at most, whose processes may begin again from zero."""

    def __init__(self) -> None:
        self.total = 0
        self._last: dict[str, int] = {}

    def see(self, sample: re.Pattern[str], text: str) -> None:
        """Add what a scrape shows since the last one."""
        for label, shown in sample.findall(text):
            value, last = int(float(shown)), self._last.get(label, 0)
            self.total += value - last if value >= last else value
            self._last[label] = value


class Watch:
    """Questions to one cluster."""

    def __init__(self, cluster: Cluster, session: aiohttp.ClientSession) -> None:
        self._cluster, self._session = cluster, session
        self._replayed, self._resumed = Sum(), Sum()

    @property
    def counts(self) -> dict[str, Value]:
        """Streams that another decode engine continued, transfers that another prefill engine took over."""
        return {"replayed": self._replayed.total, "resumed": self._resumed.total}

    async def look(self) -> None:
        """Read the counters. What a process counted after the last look before it was killed is lost."""
        self._replayed.see(_REPLAYS, await self._metrics(self._cluster.proxy))
        self._resumed.see(_RESUMED, await self._metrics(self._cluster.controller))

    async def _metrics(self, url: str) -> str:
        async with asyncio.timeout(_PROBE_S), self._session.get(f"{url}/metrics") as response:
            return await response.text()

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
