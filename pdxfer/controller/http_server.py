"""uvicorn's protocol for the controller's HTTP server, with a deadline for requests that do not come to their end.

Used by app.py. Knows no path and no request of ours. uvicorn waits for ever for whoever sends nothing, or half a
request.
"""

import asyncio
import logging

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from pdxfer.core.late import Late

log = logging.getLogger(__name__)


def http_protocol(stall_s: float) -> type[asyncio.Protocol]:
    """What serves one connection: it is cut off when a request has not come whole, or the first one has not begun,
    after `stall_s`."""

    class Http(_Http):
        limit_s = stall_s

    return Http


class _Http(H11Protocol):
    limit_s: float
    _late: Late

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._late = Late(self.loop, self.limit_s, self._cut_off)
        self._late.start()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._late.stop()
        else:
            self._late.start()

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.stop()
        super().connection_lost(exc)

    def _cut_off(self) -> None:
        log.debug("cut off %s: no whole request within %g s (proxy.client_stall_s)", self.client, self.limit_s)
        self.transport.close()
