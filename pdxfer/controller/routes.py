"""The REST routes. Thin: each reads one snapshot of the router, or posts one wish and reads the state after it.

OpenAPI at /docs (the page is served from here whole: no CDN, no validator elsewhere), the status page at /. With a
token set, every path but those in access.py asks for it.
"""

import json
from dataclasses import dataclass
from typing import Annotated

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi_offline import FastAPIOffline

from pdxfer.client.model import EngineHealth, RequestTimeline, Summary
from pdxfer.controller.access import LimitBody, RequireToken
from pdxfer.controller.board import Board, health
from pdxfer.controller.cache import add_cache
from pdxfer.controller.metrics import RouterMetrics
from pdxfer.controller.operate import add_operate
from pdxfer.controller.operations import Operations
from pdxfer.controller.page import add_page, event_stream
from pdxfer.controller.settings import ControllerSettings
from pdxfer.controller.streams import Streams
from pdxfer.core.errors import DeadlineError
from pdxfer.metrics.exporter import CONTENT_TYPE
from pdxfer.router.server import EventRecord, RouterServer
from pdxfer.router.snapshot import EngineView

MAX_EVENTS = 1000


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterHealth:
    """Every engine and worker."""

    ok: bool
    engines: list[EngineHealth]


def make_app(router: RouterServer, settings: ControllerSettings, board: Board | None = None) -> FastAPI:
    """The application over a started router. `board` is the caller's to start and close."""
    board = board or Board(router)
    streams, operations = Streams(board, router), Operations(router)
    app = FastAPIOffline(
        title="pdxfer controller",
        summary="Membership, readiness, drain and metrics of one pdxfer router",
        redoc_url=None,
        swagger_ui_parameters={"validatorUrl": None},
    )
    metrics = RouterMetrics()
    router.listeners.append(metrics.on_router)

    @app.exception_handler(DeadlineError)
    async def too_slow(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=503)

    @app.exception_handler(RequestValidationError)
    async def unfit(_: Request, error: Exception) -> Response:
        """As FastAPI answers, in ASCII: what was sent may hold characters that UTF-8 has not."""
        assert isinstance(error, RequestValidationError)
        detail = json.dumps({"detail": jsonable_encoder(error.errors())})
        return Response(detail, status_code=422, media_type="application/json")

    @app.get("/health")
    def alive() -> Health:
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

    @app.get("/v1/summary")
    def summary() -> Summary:
        """The cluster on one screen: flows, tiers, times to first token, events; at most a second old."""
        return board.summary()

    @app.get("/v1/health")
    def cluster_health() -> ClusterHealth:
        """Each worker: allocator integrity, tiers reachable, channels open, lag."""
        engines = health(router.snapshot().engines)
        return ClusterHealth(ok=bool(engines) and all(engine.ok for engine in engines), engines=engines)

    @app.get("/v1/requests/{request_id:path}", responses={404: {}})
    def request_timeline(request_id: str) -> RequestTimeline:
        """One of the last requests that ended, by its X-Request-Id or its transfer id."""
        found = board.request(request_id)
        if found is None:
            raise HTTPException(404, f"no request {request_id[:80]!r} among the last that ended")
        return found

    @app.get("/v1/events", response_model=Events)
    async def events(
        request: Request, since: Annotated[int, Query(ge=0, le=1 << 62, description="Only later ones")] = 0
    ) -> Events | Response:
        """The last thousand events at most; with `Accept: text/event-stream`, all from `since` on as they come."""
        if "text/event-stream" in request.headers.get("accept", ""):
            return event_stream(request, streams, since)
        return Events(events=router.events_after(since, MAX_EVENTS))

    add_operate(app, router)
    add_cache(app, router, operations, settings.token)
    add_page(app, board, streams)
    app.add_middleware(LimitBody)
    if settings.token:
        app.add_middleware(RequireToken, token=settings.token)
    return app
