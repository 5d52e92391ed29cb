"""The REST routes. Thin: each reads one snapshot of the router, or posts one wish and reads the state after it.

OpenAPI at /docs. With a token set, every path but /health and /ready asks for it, routes added later included.
"""

import hmac
from dataclasses import dataclass
from typing import Annotated

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pdxfer.controller.metrics import RouterMetrics
from pdxfer.controller.settings import ControllerSettings
from pdxfer.core.errors import DeadlineError
from pdxfer.metrics.exporter import CONTENT_TYPE
from pdxfer.router.server import EventRecord, RouterServer
from pdxfer.router.snapshot import EngineView

_OPEN_PATHS = ("/health", "/ready")


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The process is alive."""

    status: str = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Whether a request could be served by a pair, and what is in the way."""

    ready: bool
    reasons: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """All engines that the router knows."""

    nodes: list[EngineView]


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Recent events, oldest first."""

    events: list[EventRecord]


def make_app(router: RouterServer, settings: ControllerSettings) -> FastAPI:
    """The application over a started router."""
    app = FastAPI(title="pdxfer controller", summary="Membership, readiness, drain and metrics of one pdxfer router")
    metrics = RouterMetrics()

    @app.exception_handler(DeadlineError)
    async def too_slow(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=503)

    @app.get("/health")
    def health() -> Health:
        """200 while the router's loop answers."""
        router.snapshot()
        return Health()

    @app.get("/ready", responses={503: {"model": Ready}})
    def ready(response: Response) -> Ready:
        """200 when at least one pair, or one engine for both roles, can take requests; else 503 with the reasons."""
        snapshot = router.snapshot()
        response.status_code = 200 if snapshot.is_ready else 503
        return Ready(ready=snapshot.is_ready, reasons=snapshot.reasons)

    @app.get("/metrics", response_class=Response)
    def get_metrics() -> Response:
        """Prometheus text format."""
        return Response(metrics.render(router.snapshot()), media_type=CONTENT_TYPE)

    @app.get("/v1/nodes")
    def nodes() -> Nodes:
        """Every engine: state, load, credit, channels."""
        return Nodes(nodes=router.snapshot().engines)

    @app.get("/v1/events")
    def events(since: Annotated[int, Query(ge=0, description="Only events with a larger number")] = 0) -> Events:
        """The last thousand events at most."""
        return Events(events=[event for event in router.events() if event.number > since])

    @app.post("/v1/nodes/{engine_id}/drain", responses={404: {}})
    def drain(engine_id: str) -> EngineView:
        """No new requests for this engine; running ones finish. Answers with its state afterwards."""
        return set_drain(engine_id, True)

    @app.post("/v1/nodes/{engine_id}/undrain", responses={404: {}})
    def undrain(engine_id: str) -> EngineView:
        """Take new requests again. Answers with its state afterwards."""
        return set_drain(engine_id, False)

    def set_drain(engine_id: str, on: bool) -> EngineView:
        router.drain(engine_id, on)
        found = [engine for engine in router.snapshot().engines if engine.engine_id == engine_id]
        if not found:
            raise HTTPException(404, f"no engine {engine_id!r} has joined; GET /v1/nodes lists those that have")
        return found[0]

    if settings.token:
        app.add_middleware(RequireToken, token=settings.token)
    return app


class RequireToken:
    """Refuses every request without the bearer token, before any route sees it."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
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
