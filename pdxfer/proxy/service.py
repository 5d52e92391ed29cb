"""One request from arrival to last byte: admit, parse, route, drive the legs, relay, account for it.

decode leg fails before the client saw a byte → once more, on another pairing
decode engine lost in mid-stream              → another one continues the text (replay.py)
router unreachable                            → the decode engine used last, alone

One file: a request's life reads from top to bottom. What each step needs is next door (routing, legs, stream, replay).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import aiohttp
from aiohttp import web

from pdxfer.core.clock import Clock
from pdxfer.metrics.catalog import FALLBACKS, MetricSet
from pdxfer.metrics.timeline import HEADER
from pdxfer.metrics.tracing import Tracer
from pdxfer.proxy import access, body, outcome
from pdxfer.proxy.admission import Admission
from pdxfer.proxy.body import Endpoint, Parsed
from pdxfer.proxy.engine_http import EngineHttp, LegError
from pdxfer.proxy.engines import Engines
from pdxfer.proxy.errors import ApiError
from pdxfer.proxy.exchange import Exchange
from pdxfer.proxy.http_log import line
from pdxfer.proxy.legs import Legs
from pdxfer.proxy.outcome import accounted
from pdxfer.proxy.pairer import Pairer
from pdxfer.proxy.resume import Resumer
from pdxfer.proxy.routing import Routing
from pdxfer.proxy.settings import ProxySettings
from pdxfer.proxy.stream import Relay, Resume
from pdxfer.proxy.timeline import Entry, TimelineRing
from pdxfer.wire.messages import LegFailed, Local, Pairing, Redispatch

log = logging.getLogger(__name__)

_ATTEMPTS = 2


class Service:
    """Serves generation requests; holds no state of a single request."""

    def __init__(
        self,
        *,
        settings: ProxySettings,
        pairer: Pairer,
        http: EngineHttp,
        engines: Engines,
        routing: Routing,
        ring: TimelineRing,
        admission: Admission,
        metrics: MetricSet,
        clock: Clock,
        tracer: Tracer | None = None,
    ) -> None:
        self._settings, self._pairer, self._http, self._engines = settings, pairer, http, engines
        self._routing, self._ring, self._admission = routing, ring, admission
        self._metrics, self._clock, self._tracer = metrics, clock, tracer
        self._resumer = Resumer(http, routing, metrics)
        self._told: set[str] = set()
        self._legs: dict[str, Legs] = {}
        """Pairs under way, by transfer."""

    async def generate(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        """A completion or chat: by a pair if it can be."""

        async def serve(exchange: Exchange) -> web.StreamResponse:
            parsed = body.parse(endpoint, await self._read(exchange), self._engines.resolve)
            body.keep_apart(parsed.json, exchange.entry.tenant)
            await self._check_model(parsed.model)
            return await self._attempt(exchange, lambda last: self._pair_or_local(exchange, parsed, last))

        return await self._account(request, endpoint, serve)

    async def forward(self, request: web.Request, endpoint: str) -> web.StreamResponse:
        """Another JSON endpoint: to a decode engine alone."""

        async def serve(exchange: Exchange) -> web.StreamResponse:
            json = body.decode_object(await self._read(exchange))
            body.drop_transfer(json)
            body.keep_apart(json, exchange.entry.tenant)
            model = body.take_model(json, self._engines.resolve) if isinstance(json.get("model"), str) else ""
            await self._check_model(model)
            data = body.encode(json)
            return await self._attempt(exchange, lambda last: self._local(exchange, data, model, 0, "endpoint", last))

        return await self._account(request, endpoint, serve)

    async def passthrough(self, request: web.Request) -> web.StreamResponse:
        """A listed path: method, query and body as they are, to a decode engine; but see body.guarded for JSON."""

        async def serve(exchange: Exchange) -> web.StreamResponse:
            data = await self._read(exchange)
            if data and body.is_json(request.headers.get("Content-Type", "")):
                data = body.guarded(data, exchange.entry.tenant)
            return await self._attempt(exchange, lambda last: self._local(exchange, data, "", 0, "endpoint", last))

        return await self._account(request, "passthrough", serve)

    def redispatch(self, message: Redispatch) -> None:
        """The router has another engine for a prefill leg under way."""
        legs = self._legs.get(message.transfer_id)
        if legs is None:
            reason = "the request is over"
            failed = LegFailed(transfer_id=message.transfer_id, leg="prefill", reason=reason, epoch=message.epoch)
            self._pairer.send(failed)
        elif legs.redispatch(message):
            engine_id = message.prefill.engine_id
            log.warning("%s: %s; prefill goes on at %s", message.transfer_id, message.reason, engine_id)
            self._metrics.inc("pdxfer_proxy_redispatches_total")
            self._ring.redispatched(message, self._clock.wall())

    # ---- the way of one request ----------------------------------------------------------------------------------

    async def _account(
        self, request: web.Request, endpoint: str, serve: Callable[[Exchange], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Admit, run, and record the outcome."""
        loop = asyncio.get_running_loop()
        entry = Entry(
            request_id=access.request_id(request.headers),
            tenant=access.tenant(request.headers, self._settings),
            endpoint=endpoint,
            arrival=self._clock.wall(),
        )
        headers = access.engine_headers(request.headers, entry.request_id, self._settings)
        if endpoint != "passthrough":
            headers["Content-Type"] = "application/json"
        elif "Content-Type" in request.headers:
            headers["Content-Type"] = request.headers["Content-Type"]
        exchange = Exchange(request, entry, headers, loop.time() + self._settings.request_timeout_s)
        with (
            self._reported(entry, headers),
            accounted(entry, self._metrics, self._clock),
            self._admission.enter(entry.tenant),
        ):
            self._ring.open(entry)
            try:
                response = await serve(exchange)
                entry.outcome = outcome.of_status(response.status)
            except ApiError as error:
                if error.status in (400, 408):
                    self._metrics.inc("pdxfer_proxy_refused_total", reason="malformed")
                response = error.response()
                response.headers[access.REQUEST_ID] = entry.request_id
                entry.outcome = outcome.of_error(error)
            return response

    @contextmanager
    def _reported(self, entry: Entry, headers: dict[str, str]) -> Iterator[None]:
        """The router hears of every request that is over: its status page shows them. If it is traced, both legs carry
        its context."""
        trace = self._tracer.begin(headers, entry.endpoint, entry.arrival) if self._tracer is not None else None
        if trace is not None:
            headers |= trace.headers()
        try:
            yield
        finally:
            self._pairer.send(entry.served())
            if trace is not None:
                trace.end(entry.facts())

    async def _read(self, exchange: Exchange) -> bytes:
        """The request's body."""
        limit_s = min(self._settings.client_stall_s, exchange.remaining_s())
        declared, allowed = exchange.request.content_length or 0, self._settings.max_body_bytes
        try:
            if declared > allowed:
                raise web.HTTPRequestEntityTooLarge(allowed, declared)
            async with asyncio.timeout(limit_s):
                return await exchange.request.read()
        except TimeoutError as error:
            message = f"the request body did not arrive within {limit_s:g} s (proxy.client_stall_s)"
            raise ApiError(408, message, code="timeout") from error
        except web.HTTPRequestEntityTooLarge as error:
            self._metrics.inc("pdxfer_proxy_refused_total", reason="too_large")
            raise ApiError(
                413,
                f"the request body is larger than {self._settings.max_body_bytes} bytes (proxy.max_body_mib); "
                "shorten the prompt",
                code="body_too_large",
            ) from error
        except (aiohttp.ClientError, web.RequestPayloadError, ValueError) as error:
            message = f"the request body cannot be read: {line(str(error))}"
            raise ApiError(400, message, code="invalid_body") from error

    async def _check_model(self, model: str) -> None:
        try:
            await self._engines.check(model)
        except ApiError:
            self._metrics.inc("pdxfer_proxy_refused_total", reason="unknown_model")
            raise

    async def _attempt(
        self, exchange: Exchange, go: Callable[[bool], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Run `go(is_last)`, once more if an engine failed before the client saw a byte."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await go(attempt == _ATTEMPTS)
            except LegError as error:
                if error.kind == "timeout" and exchange.remaining_s() <= 0:
                    limit = self._settings.request_timeout_s
                    message = f"no answer within {limit:g} s (proxy.request_timeout_s)"
                    raise ApiError(504, message, code="timeout") from error
                if attempt == _ATTEMPTS:
                    raise ApiError(
                        502, f"the decode engine did not answer: {error}", code="engine_unreachable", retry_after_s=1
                    ) from error
                log.warning("%s: decode failed before its first byte, trying again", exchange.entry.request_id)
                self._metrics.inc("pdxfer_proxy_retries_total")
        raise AssertionError("unreachable")

    async def _pair_or_local(self, exchange: Exchange, parsed: Parsed, is_last: bool) -> web.StreamResponse:
        if parsed.local_reason:
            data = body.encode(parsed.json)
            return await self._local(exchange, data, parsed.model, parsed.num_tokens, parsed.local_reason, is_last)
        route = await self._routing.pair(exchange.need(parsed.model, parsed.num_tokens))
        exchange.entry.paired = self._clock.wall()
        if isinstance(route, Pairing):
            return await self._by_pair(exchange, parsed, route, is_last)
        return await self._by_one(exchange, body.encode(parsed.json), route, is_last, parsed)

    async def _local(
        self, exchange: Exchange, data: bytes, model: str, num_tokens: int, reason: str, is_last: bool
    ) -> web.StreamResponse:
        """Have one decode engine serve it, for our own reason."""
        route = await self._routing.one(exchange.need(model, num_tokens), reason)
        exchange.entry.paired = self._clock.wall()
        return await self._by_one(exchange, data, route, is_last)

    async def _by_pair(self, exchange: Exchange, parsed: Parsed, pairing: Pairing, is_last: bool) -> web.StreamResponse:
        """Both legs at once; the decode leg's answer is the client's."""
        self._ring.bind(exchange.entry, pairing)
        legs = Legs(
            engines=self._http,
            pairer=self._pairer,
            metrics=self._metrics,
            pairing=pairing,
            path=exchange.request.path,
            parsed=parsed,
            headers=exchange.headers,
            transfer_timeout_s=self._settings.transfer_timeout_s,
            deadline=exchange.deadline,
            tenant=exchange.entry.tenant,
            live=self._legs,
            traceparent=exchange.traceparent,
        )
        async with legs:
            try:
                response = await legs.decode()
                _refuse_5xx(response, is_last)
                return await self._relay(
                    exchange, response, self._resumer.resume(exchange, parsed, pairing.decode.engine_id)
                )
            except LegError as error:
                exchange.avoid.append(pairing.decode.engine_id)
                legs.decode_failed(error)
                raise

    async def _by_one(
        self, exchange: Exchange, data: bytes, route: Local, is_last: bool, parsed: Parsed | None = None
    ) -> web.StreamResponse:
        """One decode engine does everything."""
        self._note_fallback(exchange.entry, route)
        url = route.decode.url + exchange.request.rel_url.raw_path_qs  # a target may name the host, too
        response = None
        try:
            response = await self._http.send(exchange.request.method, url, data, exchange.headers, exchange.deadline)
            _refuse_5xx(response, is_last)
            resume = self._resumer.resume(exchange, parsed, route.decode.engine_id) if parsed is not None else None
            return await self._relay(exchange, response, resume)
        except LegError as error:
            exchange.avoid.append(route.decode.engine_id)
            log.warning("%s failed at %s: %s", exchange.entry.request_id, route.decode.engine_id, error)
            self._metrics.inc("pdxfer_proxy_leg_failures_total", leg="decode", kind=error.kind)
            raise
        finally:
            if response is not None:
                response.close()

    def _note_fallback(self, entry: Entry, route: Local) -> None:
        """Count and log why it is one engine: at INFO the first time, since it is often a client's habit."""
        self._ring.unbind(entry, route.decode, route.reason)
        label = route.reason if route.reason in FALLBACKS else "router"
        self._metrics.inc("pdxfer_proxy_fallbacks_total", reason=label)
        level = logging.DEBUG if label in self._told else logging.INFO
        self._told.add(label)
        log.log(level, "%s: %s alone, because of %s", entry.request_id, route.decode.engine_id, route.reason)

    async def _relay(
        self, exchange: Exchange, response: aiohttp.ClientResponse, resume: Resume | None = None
    ) -> web.StreamResponse:
        entry = exchange.entry

        def headers() -> dict[str, str]:
            return {access.REQUEST_ID: entry.request_id, HEADER: entry.timeline().header()}

        def first_byte() -> None:
            entry.first_byte = self._clock.wall()
            if response.status < 400:
                self._observe(entry)

        relay = Relay(
            exchange.request,
            response,
            headers=headers,
            on_first_byte=first_byte,
            hold_s=self._settings.timeline_hold_s,
            deadline=exchange.deadline,
            stall_s=self._settings.client_stall_s,
            resume=resume,
        )
        return await relay.run()

    def _observe(self, entry: Entry) -> None:
        for stage, ms in entry.timeline().stages_ms().items():
            self._metrics.observe("pdxfer_proxy_stage_seconds", ms / 1000, mode=entry.mode, stage=stage)


def _refuse_5xx(response: aiohttp.ClientResponse, is_last: bool) -> None:
    """Turn an engine's failure into LegError while there is another attempt; the last one is relayed as it is."""
    if response.status >= 500 and not is_last:
        raise LegError("status", f"{response.url} answered {response.status}")
