"""What the proxy needs of the router. `pdxfer.router.client.ProxyClient` is the real one; tests bring their own."""

from collections.abc import Callable
from typing import Protocol

from pdxfer.wire.messages import Busy, Ended, LegFailed, Local, Pair, Pairing, Redispatch, Release, Served, Stamp

Notice = Stamp | Ended | LegFailed | Redispatch
OnMessage = Callable[[Notice], None]
"""Called on the event loop for what the router tells about this proxy's transfers."""


class Pairer(Protocol):
    """Introduces requests to engines."""

    async def start(self) -> None:
        """Begin to connect; returns without waiting for the router."""
        ...

    async def pair(self, request: Pair, timeout_s: float) -> Pairing | Local | Busy:
        """Where to send one request. Raises UnreachableError when no answer came in time."""
        ...

    def send(self, message: Release | LegFailed | Served) -> None:
        """Tell the router; never blocks, dropped if it is unreachable."""
        ...

    async def close(self) -> None:
        """Leave; idempotent."""
        ...
