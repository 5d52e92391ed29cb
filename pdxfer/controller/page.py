"""The routes of the status page: its shell, its frames as a stream, and the timeline of one request as a fragment."""

from pathlib import Path

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, StreamingResponse

from pdxfer.controller.board import Board
from pdxfer.controller.streams import MAX_STREAMS, Streams
from pdxfer.controller.ui.charts import waterfall
from pdxfer.controller.ui.markup import esc

_UI = Path(__file__).parent / "ui"
_SSE = "text/event-stream"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI, board: Board, streams: Streams) -> None:
    """Add the page's routes; none of them is part of the API."""

    @app.get("/", include_in_schema=False)
    def page() -> Response:
        return _file("page.html", "text/html")

    @app.get("/ui/page.css", include_in_schema=False)
    def style() -> Response:
        return _file("page.css", "text/css")

    @app.get("/ui/page.js", include_in_schema=False)
    def script() -> Response:
        return _file("page.js", "text/javascript")

    @app.get("/ui/requests/{request_id:path}", include_in_schema=False)
    def timeline(request_id: str) -> HTMLResponse:
        found = board.request(request_id)
        if found is None:
            text = f'<p class="empty">No request {esc(request_id[:80])} among the last that ended.</p>'
            return HTMLResponse(text, status_code=404, headers=_HEADERS)
        return HTMLResponse(waterfall(found), headers=_HEADERS)

    @app.get("/v1/live", include_in_schema=False)
    async def live() -> Response:
        refuse_if_full(streams)
        return StreamingResponse(streams.frames(), media_type=_SSE, headers={"Cache-Control": "no-store"})


def event_stream(request: Request, streams: Streams, since: int) -> Response:
    """Events from `since` on, or from where a reader that comes back says it was."""
    refuse_if_full(streams)
    last = request.headers.get("last-event-id", "")
    start = int(last) if last.isascii() and last.isdigit() and len(last) < 19 else since
    return StreamingResponse(streams.events(start), media_type=_SSE, headers={"Cache-Control": "no-store"})


def refuse_if_full(streams: Streams) -> None:
    """503 once MAX_STREAMS are open."""
    if streams.is_full:
        raise HTTPException(503, f"{MAX_STREAMS} streams are open already; close one", headers={"Retry-After": "5"})


def _file(name: str, kind: str) -> Response:
    return Response((_UI / name).read_bytes(), media_type=kind, headers=_HEADERS)
