"""aiohttp's server, whose own refusals are in OpenAI's form too: what is no HTTP reaches neither route nor middleware.

Used by app.py. Knows no path and no request of ours.
"""

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError

from pdxfer.proxy.errors import ApiError


class JsonRunner(web.AppRunner):
    """An AppRunner whose server is ours."""

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
    __slots__ = ()

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
    return ApiError(status, f"the request cannot be read: {' '.join(message.split())}", code="invalid_http")
