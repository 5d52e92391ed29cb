"""The proxy's HTTP server: routes, error form, start, drain and stop. Imports neither torch nor vllm."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from pdxfer.core.clock import SYSTEM_CLOCK, Clock
from pdxfer.core.descriptors import AcceptErrors
from pdxfer.core.errors import CutOffError, ListenError
from pdxfer.metrics.catalog import MetricSet
from pdxfer.metrics.exporter import CONTENT_TYPE, render
from pdxfer.metrics.tracing import Tracer
from pdxfer.proxy import access
from pdxfer.proxy.admission import Admission
from pdxfer.proxy.engine_http import EngineHttp
from pdxfer.proxy.engines import Engines
from pdxfer.proxy.errors import ApiError
from pdxfer.proxy.http_log import HTTP_LOG
from pdxfer.proxy.http_server import JsonRunner
from pdxfer.proxy.pairer import Notice, OnMessage, Pairer
from pdxfer.proxy.readiness import Readiness
from pdxfer.proxy.router_link import RouterLink
from pdxfer.proxy.routing import Routing
from pdxfer.proxy.service import Service
from pdxfer.proxy.settings import ProxySettings
from pdxfer.proxy.stream import ClientGone, StreamBroken
from pdxfer.proxy.timeline import TimelineRing
from pdxfer.wire.keys import load_client_security
from pdxfer.wire.messages import Ended, LegFailed, Redispatch, Stamp

log = logging.getLogger(__name__)

_FORWARDED = {"/v1/responses": "responses", "/v1/messages": "messages", "/v1/embeddings": "embeddings"}
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Proxy:
    """One proxy: `await start()`, then it serves until `await stop()`."""

    def __init__(
        self, settings: ProxySettings, make_pairer: Callable[[OnMessage], Pairer], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._settings, self._clock = settings, clock
        self._make_pairer = make_pairer
        self.metrics = MetricSet("proxy")
        self._ring = TimelineRing(settings.timeline_entries, settings.timeline_entries + settings.max_in_flight)
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self.port = settings.port

    def __repr__(self) -> str:
        return f"<Proxy {self._settings.host}:{self.port} {self._admission if self._runner else 'stopped'}>"

    @property
    def in_flight(self) -> int:
        """Requests that run."""
        return self._admission.in_flight

    async def start(self) -> None:
        """Listen. Raises ListenError if the address cannot be had, ConfigError if the router's is none."""
        settings = self._settings
        self._pairer = self._make_pairer(self._on_notice)
        await self._pairer.start()  # first: if it refuses the router's address, nothing else is open
        self._http = EngineHttp(settings.connect_timeout_s)
        self._tracer = self._make_tracer()
        self._admission = Admission(
            settings.max_in_flight, self.metrics, num_tenants=len(set(settings.api_keys.values()))
        )
        self._readiness = Readiness(self._pairer, self._http, self._clock)
        self._engines = Engines(
            http=self._http,
            pairer=self._pairer,
            clock=self._clock,
            headers=access.authorization({}, settings),
            aliases=settings.aliases,
            ttl_s=settings.models_ttl_s,
            timeout_s=settings.connect_timeout_s,
        )
        self._service = Service(
            settings=settings,
            pairer=self._pairer,
            http=self._http,
            engines=self._engines,
            routing=Routing(self._pairer, self._engines, self._readiness, settings.pair_timeout_s),
            ring=self._ring,
            admission=self._admission,
            metrics=self.metrics,
            clock=self._clock,
            tracer=self._tracer,
        )
        await self._listen()

    async def stop(self, *, force: asyncio.Event | None = None) -> int:
        """Stop accepting, let running requests finish within the bound (or until `force`), close everything. Returns
        how many were cut off."""
        if self._runner is None:
            return 0
        if self._site is not None:
            await self._site.stop()
        drained = asyncio.create_task(self._admission.drained(self._settings.drain_timeout_s))
        forced = asyncio.create_task((force or asyncio.Event()).wait())
        await asyncio.wait([drained, forced], return_when=asyncio.FIRST_COMPLETED)
        num_cut = self._admission.in_flight
        if num_cut:
            log.warning("cutting off %d running requests", num_cut)
        for task in (drained, forced):
            task.cancel()
        await asyncio.gather(drained, forced, return_exceptions=True)
        await self._runner.cleanup()
        self._engines.close()
        await self._pairer.close()
        await self._http.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        self._runner = None
        return num_cut

    def _make_tracer(self) -> Tracer | None:
        settings = self._settings
        return Tracer(settings.otlp_endpoint, settings.trace_sample) if settings.otlp_endpoint else None

    # ---- routes --------------------------------------------------------------------------------------------------

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=self._settings.max_body_bytes, middlewares=[self._errors])
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        for path in _FORWARDED:
            app.router.add_post(path, self._forward)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._model)
        app.router.add_get("/v1/pdxfer/timeline/{request_id}", self._timeline)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_route("*", "/{path:.*}", self._other)
        return app

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._service.generate(request, "completions")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._service.generate(request, "chat")

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        return await self._service.forward(request, _FORWARDED[request.path])

    async def _models(self, request: web.Request) -> web.Response:
        access.tenant(request.headers, self._settings)
        return _json({"object": "list", "data": await self._engines.models()})

    async def _model(self, request: web.Request) -> web.Response:
        access.tenant(request.headers, self._settings)
        name = request.match_info["model"]
        for entry in await self._engines.models():
            if entry["id"] == name:
                return _json(entry)
        raise ApiError(404, f"the model {name!r} does not exist; see GET /v1/models", code="model_not_found")

    async def _timeline(self, request: web.Request) -> web.Response:
        tenant = access.tenant(request.headers, self._settings)
        request_id = request.match_info["request_id"]
        entry = self._ring.get(request_id)
        if entry is None or entry.tenant != tenant:
            raise ApiError(
                404,
                f"no request {request_id!r} among the last {self._settings.timeline_entries}; use the X-Request-Id of "
                "an answer of this proxy",
                code="unknown_request",
            )
        return web.Response(body=entry.json(), content_type="application/json")

    async def _health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        reasons = ["shutting down"] if self._admission.draining else await self._readiness.reasons()
        return _json({"ready": not reasons, "reasons": reasons}, status=503 if reasons else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=render(self.metrics), headers={"Content-Type": CONTENT_TYPE})

    async def _other(self, request: web.Request) -> web.StreamResponse:
        if self._is_passthrough(request.path):
            return await self._service.passthrough(request)
        self.metrics.inc("pdxfer_proxy_refused_total", reason="unknown_path")
        raise ApiError(
            404,
            f"{request.method} {request.path} is not served here; if the engines serve this path, list it in "
            "proxy.passthrough",
            code="unknown_path",
        )

    def _is_passthrough(self, path: str) -> bool:
        """`..` would be resolved on the way to the engine: to a path that may not be listed."""
        return ".." not in path.split("/") and any(
            path.startswith(listed[:-1]) if listed.endswith("*") else path == listed
            for listed in self._settings.passthrough
        )

    # ---- plumbing ------------------------------------------------------------------------------------------------

    @web.middleware
    async def _errors(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Every refusal in OpenAI's form; connections that broke are cut, not answered."""
        try:
            return await handler(request)
        except ApiError as error:
            if error.status == 401:
                self.metrics.inc("pdxfer_proxy_refused_total", reason="unauthorized")
            return error.response()
        except (ClientGone, StreamBroken):
            if request.transport is not None:
                request.transport.close()
            return web.Response()
        except web.HTTPException as error:
            return ApiError(error.status, f"{request.method} {request.path}: {error.reason}", code="http").response()
        except Exception:
            log.exception("bug: %s %s", request.method, request.path)
            return ApiError(500, "the proxy failed; its log has the reason", code="internal").response()

    async def _listen(self) -> None:
        self._runner = JsonRunner(
            self._app(), handler_cancellation=True, access_log=None, logger=HTTP_LOG, shutdown_timeout=0.2,
            keepalive_timeout=75.0, stall_s=self._settings.client_stall_s,
        )  # fmt: skip
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._settings.host, self._settings.port)
        try:
            await site.start()
        except OSError as error:
            await self.stop()
            raise ListenError(
                f"the proxy cannot listen on {self._settings.host}:{self._settings.port}: {error.strerror or error}. "
                "Choose another proxy.port, or stop what uses this one"
            ) from error
        self._site = site
        self.port = self._runner.addresses[0][1]
        log.info("proxy on http://%s:%d, router %s", self._settings.host, self.port, self._settings.router)

    def _on_notice(self, notice: Notice) -> None:
        if isinstance(notice, Stamp):
            self._ring.stamp(notice)
        elif isinstance(notice, Ended):
            self._ring.ended(notice)
            self.metrics.inc("pdxfer_proxy_transfers_total", outcome=notice.outcome)
            self.metrics.inc("pdxfer_proxy_transfer_bytes_total", notice.num_bytes)
        elif isinstance(notice, Redispatch):
            self._service.redispatch(notice)
        elif isinstance(notice, LegFailed):
            log.info("%s leg of %s failed: %s", notice.leg, notice.transfer_id, notice.reason)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def serve(settings: ProxySettings) -> None:
    """Run one proxy until SIGTERM; a second signal does not wait for running requests. Raises ConfigError,
    ListenError, and CutOffError if requests were cut off."""
    security = load_client_security(settings.keys_dir) if settings.keys_dir else None

    def make_pairer(on_message: OnMessage) -> Pairer:
        return RouterLink(
            endpoint=settings.router, proxy_id=settings.proxy_id, security=security, on_message=on_message
        )

    asyncio.run(run(settings, make_pairer))


async def run(settings: ProxySettings, make_pairer: Callable[[OnMessage], Pairer]) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal cuts what still runs. Raises CutOffError if so."""
    stop, force = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (force if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(AcceptErrors())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    proxy = Proxy(settings, make_pairer)
    await proxy.start()
    await stop.wait()
    log.info("draining: no new requests, %d still run; a second signal cuts them off", proxy.in_flight)
    if num_cut := await proxy.stop(force=force):
        raise CutOffError(
            f"the proxy was stopped with {num_cut} requests running: a second signal came, or they had not ended "
            f"within {settings.drain_timeout_s:g} s (proxy.drain_timeout_s)"
        )
