"""Who may ask, and how much: with a token set, every path asks for it but process checks and the page's empty shell."""

import hmac

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_PATHS = ("/health", "/ready", "/", "/ui/page.css", "/ui/page.js")
"""The page's shell holds no data; its script asks for the token and sends it with each request."""


class RequireToken:
    """Refuses every request without the bearer token, before any route sees it."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._token):
            await self._app(scope, receive, send)
            return
        refusal = JSONResponse(
            {"detail": "this path needs the cluster's token: send 'Authorization: Bearer TOKEN'"},
            status_code=401,
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal(scope, receive, send)


MAX_BODY_BYTES = 16 << 20
"""A prompt of 256 Ki tokens as JSON takes less than 3 MiB."""


class LimitBody:
    """Refuses requests whose body is larger, by its declared length or when it has come."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
            await _too_large(scope, receive, send)
            return
        num_bytes = 0

        async def bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > MAX_BODY_BYTES:
                return {"type": "http.disconnect"}
            return message

        async def answer(message: Message) -> None:
            if num_bytes <= MAX_BODY_BYTES:  # else it speaks of a body that ended too early
                await send(message)

        await self._app(scope, bounded, answer)
        if num_bytes > MAX_BODY_BYTES:
            await _too_large(scope, receive, send)


async def _too_large(scope: Scope, receive: Receive, send: Send) -> None:
    detail = f"the request's body is larger than {MAX_BODY_BYTES >> 20} MiB"
    await JSONResponse({"detail": detail}, status_code=413)(scope, receive, send)
