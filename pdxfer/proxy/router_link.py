"""The real Pairer: pdxfer.router.client.ProxyClient, without waiting for a router that is known to be away.

While the link is up a question may wait as long as the router queues it. When it goes down, questions are given up
after GRACE_S, the time a restarted router needs to take them again.
"""

import asyncio

from pdxfer.core.clock import SYSTEM_CLOCK, Clock
from pdxfer.core.errors import UnreachableError
from pdxfer.proxy.pairer import OnMessage
from pdxfer.router.client import ClientSecurity, ProxyClient
from pdxfer.wire.messages import Busy, LegFailed, Local, Pair, Pairing, Release, Served

GRACE_S = 1.0


class RouterLink:
    """Implements proxy.pairer.Pairer. Event-loop thread only."""

    def __init__(
        self,
        *,
        endpoint: str,
        proxy_id: str,
        security: ClientSecurity | None,
        on_message: OnMessage,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._endpoint = endpoint
        self._client = ProxyClient(
            endpoint=endpoint,
            proxy_id=proxy_id,
            security=security,
            on_message=on_message,
            on_link=self._on_link,
            clock=clock,
        )
        self._waiting: dict[asyncio.Timeout, float] = {}
        """Questions without an answer → their own deadline, in loop time."""
        self._patience_ends = 0.0
        """Loop time from which on an absent router is not waited for; meaningless while the link is up."""

    def __repr__(self) -> str:
        return f"<RouterLink {self._client!r} waiting={len(self._waiting)}>"

    async def start(self) -> None:
        self._patience_ends = asyncio.get_running_loop().time() + GRACE_S
        await self._client.start()

    async def pair(self, request: Pair, timeout_s: float) -> Pairing | Local | Busy:
        deadline = asyncio.get_running_loop().time() + timeout_s
        is_up = self._client.connected
        scope = asyncio.timeout_at(deadline if is_up else min(deadline, self._patience_ends))
        self._waiting[scope] = deadline
        try:
            async with scope:
                return await self._client.pair(request, timeout_s)
        except TimeoutError as error:
            raise UnreachableError(f"the router at {self._endpoint} cannot be reached") from error
        finally:
            del self._waiting[scope]

    def send(self, message: Release | LegFailed | Served) -> None:
        self._client.send(message)

    async def close(self) -> None:
        await self._client.close()

    def _on_link(self, is_up: bool) -> None:
        self._patience_ends = asyncio.get_running_loop().time() + GRACE_S
        for scope, deadline in self._waiting.items():
            if not scope.expired():
                scope.reschedule(deadline if is_up else min(deadline, self._patience_ends))
