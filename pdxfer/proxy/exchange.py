"""One request being served: what its steps share. Event-loop thread only."""

import asyncio
import re
from collections.abc import Mapping

from aiohttp import web

from pdxfer.proxy.routing import Need
from pdxfer.proxy.timeline import Entry

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Exchange:
    """Lives from arrival to last byte; `deadline` is in event-loop time."""

    def __init__(self, request: web.Request, entry: Entry, headers: Mapping[str, str], deadline: float) -> None:
        self.request, self.entry, self.headers, self.deadline = request, entry, headers, deadline
        self.avoid: list[str] = []
        """Engines that failed it."""

    def remaining_s(self) -> float:
        return max(0.0, self.deadline - asyncio.get_running_loop().time())

    @property
    def traceparent(self) -> str:
        """W3C trace context for router and engines; empty: not traced."""
        value = self.headers.get("traceparent", "")
        return value if _TRACEPARENT.fullmatch(value) else ""

    def need(self, model: str, num_tokens: int) -> Need:
        """What it asks of the router."""
        return Need(
            model=model,
            num_tokens=num_tokens,
            tenant=self.entry.tenant,
            remaining_s=self.remaining_s(),
            avoid=tuple(self.avoid),
            traceparent=self.traceparent,
        )
