"""How many requests may be inside at once, and whether new ones may enter at all. Event-loop thread only."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from pdxfer.metrics.catalog import MetricSet
from pdxfer.proxy.errors import ApiError

_SHARE = 4
"""A tenant may have this many times as many requests in flight as it leaves room for others: one that floods gets
4/5 of the limit, two get 4/9 each, and there is always a place for one who has none (dynamic thresholds, Choudhury and
Hahne 1998)."""


class Admission:
    """A bound on requests in flight, and the door that a drain closes."""

    def __init__(self, limit: int, metrics: MetricSet, *, num_tenants: int = 1) -> None:
        """`num_tenants` that share the limit; a single one may use it all."""
        self._limit, self._is_shared = limit, num_tenants > 1
        self._by_tenant: Counter[str] = Counter()
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
    def enter(self, tenant: str = "") -> Iterator[None]:
        """Count one request in for the block's duration. Raises ApiError 503 while draining, 429 when full."""
        if self.draining:
            self._metrics.inc("pdxfer_proxy_refused_total", reason="draining")
            raise ApiError(503, "this proxy is shutting down; send the request again", code="draining", retry_after_s=1)
        if self._in_flight >= self._limit or self._takes_too_much(self._by_tenant[tenant]):
            raise ApiError(
                429,
                f"{self._in_flight} requests are in flight, {self._by_tenant[tenant]} of them yours; the limit "
                f"(proxy.max_in_flight) is {self._limit} for all; send this one again in a moment",
                code="overloaded",
                retry_after_s=1,
            )
        self._change(tenant, +1)
        try:
            yield
        finally:
            self._change(tenant, -1)

    async def drained(self, timeout_s: float) -> bool:
        """Close the door and wait for those inside to leave; False if some were still there at the deadline."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _takes_too_much(self, num_own: int) -> bool:
        """Whether one more would leave too little for the others."""
        return self._is_shared and num_own > 0 and num_own >= _SHARE * (self._limit - self._in_flight - 1)

    def _change(self, tenant: str, by: int) -> None:
        self._in_flight += by
        self._by_tenant[tenant] += by
        self._metrics.set("pdxfer_proxy_in_flight_requests", self._in_flight)
        if self._in_flight:
            self._idle.clear()
        else:
            self._idle.set()
