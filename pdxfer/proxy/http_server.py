"""aiohttp's server, whose own refusals are in OpenAI's form too: what is no HTTP reaches neither route nor middleware.

Used by app.py. Knows no path and no request of ours. A client that begins no request, or does not come to the end of
its head, is cut off.
"""

import asyncio
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError

from pdxfer.core.late import Late
from pdxfer.proxy.errors import ApiError
from pdxfer.proxy.http_log import HTTP_LOG, line


class JsonRunner(web.AppRunner):
    """An AppRunner whose server is ours. It takes `stall_s` too: how long the first request, or the rest of a head, may
    take."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        options = {name: value for name, value in self._kwargs.items() if name != "handler_cancellation"}
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **options,
        )


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Handler(self, loop=self._loop, **self._kwargs)


class _Handler(web.RequestHandler):
    __slots__ = ("_late", "_stall_s")

    def __init__(self, manager: web.Server, *, stall_s: float, **options: Any) -> None:
        super().__init__(manager, **options)
        self._stall_s = stall_s
        self._late = Late(self._loop, stall_s, self._cut_off)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._late.start()

    def data_received(self, data: bytes) -> None:
        """aiohttp waits (`_waiter`) while there is no whole head; bodies have the deadline of who reads them."""
        num_before = self._request_count
        super().data_received(data)
        if self._request_count != num_before:
            self._late.stop()
        elif self._waiter is not None and not self._waiter.done():
            self._late.start()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._late.stop()
        super().connection_lost(exc)

    def _cut_off(self) -> None:
        HTTP_LOG.debug("cut off %s: no whole head within %g s (proxy.client_stall_s)", self.peername, self._stall_s)
        self.force_close()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """As aiohttp's (which logs), with our body. The connection is closed after it."""
        super().handle_error(request, status, exc, message)
        answer = _refusal(status, exc, message or "").response()
        answer.force_close()
        return answer


def _refusal(status: int, error: BaseException | None, message: str) -> ApiError:
    if status >= 500:
        return ApiError(status, "the proxy failed; its log has the reason", code="internal")
    if isinstance(error, ContentEncodingError):
        return ApiError(
            415,
            "the request body's Content-Encoding is not understood here; send it as it is, or with gzip or deflate",
            code="unsupported_encoding",
        )
    return ApiError(status, f"the request cannot be read: {line(message)}", code="invalid_http")
