"""How many requests may be inside at once, and whether new ones may enter at all. Event-loop thread only."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pdxfer.metrics.catalog import MetricSet
from pdxfer.proxy.errors import ApiError


class Admission:
    """A bound on requests in flight, and the door that a drain closes."""

    def __init__(self, limit: int, metrics: MetricSet) -> None:
        self._limit = limit
        self._metrics = metrics
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    def __repr__(self) -> str:
        return f"<Admission {self._in_flight}/{self._limit}{' draining' if self.draining else ''}>"

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Count one request in for the block's duration. Raises ApiError 503 while draining, 429 when full."""
        if self.draining:
            self._metrics.inc("pdxfer_proxy_refused_total", reason="draining")
            raise ApiError(503, "this proxy is shutting down; send the request again", code="draining", retry_after_s=1)
        if self._in_flight >= self._limit:
            raise ApiError(
                429,
                f"{self._in_flight} requests are in flight, the limit (proxy.max_in_flight) is {self._limit}; "
                "send this one again in a moment",
                code="overloaded",
                retry_after_s=1,
            )
        self._change(+1)
        try:
            yield
        finally:
            self._change(-1)

    async def drained(self, timeout_s: float) -> bool:
        """Close the door and wait for those inside to leave; False if some were still there at the deadline."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _change(self, by: int) -> None:
        self._in_flight += by
        self._metrics.set("pdxfer_proxy_in_flight_requests", self._in_flight)
        if self._in_flight:
            self._idle.clear()
        else:
            self._idle.set()
