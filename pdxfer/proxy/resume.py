"""Continues a stream whose decode engine was lost on another decode engine. What may be continued, and how its events
read, is decided in replay.py; here it is asked for and passed on."""

import logging
from collections.abc import AsyncIterator

from pdxfer.metrics.catalog import MetricSet
from pdxfer.proxy import body
from pdxfer.proxy.body import JsonObject, Parsed
from pdxfer.proxy.engine_http import EngineHttp, chunks
from pdxfer.proxy.errors import ApiError
from pdxfer.proxy.exchange import Exchange
from pdxfer.proxy.replay import DONE, CannotContinue, Continued, Sent, continuation, refusal
from pdxfer.proxy.routing import Routing
from pdxfer.proxy.stream import Resume

log = logging.getLogger(__name__)


class Resumer:
    """Knows other engines. Holds no state of a request."""

    def __init__(self, http: EngineHttp, routing: Routing, metrics: MetricSet) -> None:
        self._http, self._routing, self._metrics = http, routing, metrics

    def resume(self, exchange: Exchange, parsed: Parsed, engine_id: str) -> Resume | None:
        """How this answer goes on if `engine_id` is lost; None where it must not."""
        if refusal(parsed):
            return None

        async def rest(sent: Sent) -> AsyncIterator[bytes]:
            exchange.avoid.append(engine_id)
            self._metrics.inc("pdxfer_proxy_replays_total")
            async for events in self._rest(exchange, parsed, sent):
                yield events

        return rest

    async def _rest(self, exchange: Exchange, parsed: Parsed, sent: Sent) -> AsyncIterator[bytes]:
        """What follows the text that the client has. Raises CannotContinue, LegError."""
        account = sent.account()
        if account.is_finished:
            options = parsed.json.get("stream_options")
            if isinstance(options, dict) and options.get("include_usage"):
                raise CannotContinue("only its usage was missing")
            yield DONE
            return
        base = await self._other(exchange, parsed)
        tokens = await self._http.tokenize(base, parsed.model, account.text, exchange.headers, exchange.deadline)
        log.warning("%s: decode lost after %d tokens, %s goes on", exchange.entry.request_id, len(tokens), base)
        url, data = base + exchange.request.path, _encoded(continuation(parsed, account.text, tokens))
        response = await self._http.send("POST", url, data, exchange.headers, exchange.deadline)
        try:
            if response.status != 200:
                raise CannotContinue(f"{url} answered {response.status}")
            continued = Continued(account, len(tokens))
            async for chunk in chunks(response, exchange.deadline):
                yield continued.take(chunk)
        finally:
            response.close()

    async def _other(self, exchange: Exchange, parsed: Parsed) -> str:
        """URL of a decode engine that has not failed this request. Raises CannotContinue."""
        try:
            route = await self._routing.one(exchange.need(parsed.model, parsed.num_tokens), "replay")
        except ApiError as error:
            raise CannotContinue(error.message) from error
        if route.decode.engine_id in exchange.avoid:
            raise CannotContinue(f"there is no decode engine but {route.decode.engine_id}")
        return route.decode.url


def _encoded(asked: JsonObject) -> bytes:
    """Bytes to send. Raises CannotContinue: the client has its status, and part of its stream."""
    try:
        return body.encode(asked)
    except ApiError as error:
        raise CannotContinue(error.message) from error
