"""What a client is told when its request cannot be served: one exception, one OpenAI-shaped body."""

import math

import msgspec
from aiohttp import web

_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "invalid_request_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Ends a request with `status`; `message` says what is wrong and what to do, `code` is for programs."""

    def __init__(self, status: int, message: str, *, code: str, param: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """``{"error": {message, type, param, code}}``, as OpenAI and vLLM write it."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, default),
            "param": self.param or None,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def headers(self) -> dict[str, str]:
        """Retry-After in whole seconds (rounded up), if it helps to try again."""
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))} if self.retry_after_s > 0 else {}

    def response(self) -> web.Response:
        """The whole answer."""
        return web.Response(
            status=self.status, body=self.body(), headers=self.headers(), content_type="application/json"
        )

    def event(self) -> bytes:
        """The same as one server-sent event, for a stream that has begun."""
        return b"data: " + self.body() + b"\n\n"
