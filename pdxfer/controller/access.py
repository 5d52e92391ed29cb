"""Who may ask: with a token set, every path asks for it but the process checks and the page's empty shell."""

import hmac

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = ("/health", "/ready", "/", "/ui/page.css", "/ui/page.js")
"""The page's shell holds no data; its script asks for the token and sends it with each request."""


class RequireToken:
    """Refuses every request without the bearer token, before any route sees it."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
            return
        refusal = JSONResponse(
            {"detail": "this path needs the cluster's token: send 'Authorization: Bearer TOKEN'"},
            status_code=401,
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal(scope, receive, send)
