"""Both legs of one pairing: sent at the same moment, ended together.

If the prefill leg fails, the router hears of it, so that decode stops waiting: it computes the prompt itself, or has
the router send the leg to another engine (Redispatch). The decode leg's response is what the client gets. Leaving the
block aborts whatever still runs and releases the pairing, always; so what may fail is done inside it.
"""

import asyncio
import logging
from collections.abc import Mapping
from types import TracebackType

import aiohttp

from pdxfer.metrics.catalog import MetricSet
from pdxfer.proxy.attempts import Attempts
from pdxfer.proxy.body import JsonObject, Parsed, decode_body, encode, prefill_body
from pdxfer.proxy.engine_http import EngineHttp, LegError, read_all, refused
from pdxfer.proxy.pairer import Pairer
from pdxfer.wire.messages import EngineRef, Leg, LegFailed, Pairing, Redispatch, Release

log = logging.getLogger(__name__)


class Legs:
    """``async with Legs(...) as legs: response = await legs.decode()``."""

    def __init__(
        self,
        *,
        engines: EngineHttp,
        pairer: Pairer,
        metrics: MetricSet,
        pairing: Pairing,
        path: str,
        parsed: Parsed,
        headers: Mapping[str, str],
        transfer_timeout_s: float,
        deadline: float,
        tenant: str = "",
        traceparent: str = "",
        live: dict[str, "Legs"] | None = None,
    ) -> None:
        """`deadline` is the request's, in event-loop time; the KV has `transfer_timeout_s` of it. While the block runs
        `live` names it by transfer, for Redispatch."""
        self._engines, self._pairer, self._metrics = engines, pairer, metrics
        self._pairing, self._path, self._headers = pairing, path, headers
        now = asyncio.get_running_loop().time()
        self._deadline = deadline
        self._transfer_deadline = min(deadline, now + transfer_timeout_s)
        self._parsed, self._tenant, self._traceparent = parsed, tenant, traceparent
        self._prefill = Attempts(pairing.transfer_id, self._run_prefill, self._prefill_failed)
        self._live = live if live is not None else {}
        self._response: aiohttp.ClientResponse | None = None
        self._end_reason = "done"

    async def __aenter__(self) -> "Legs":
        self._live[self._pairing.transfer_id] = self
        self._prefill.begin(1, self._pairing.prefill)
        return self

    def redispatch(self, message: Redispatch) -> bool:
        """Another engine is to prefill, for decode has lost the last one. False: an old or repeated word."""
        return self._prefill.begin(message.epoch, message.prefill)

    async def decode(self) -> aiohttp.ClientResponse:
        """Status and headers of the decode leg. Raises LegError, or ApiError for a body that cannot be sent on. The
        response is closed with the block."""
        url, data = self._pairing.decode.url + self._path, encode(decode_body(self._parsed, self._transfer()))
        self._response = await self._engines.send("POST", url, data, self._headers, self._deadline)
        return self._response

    def decode_failed(self, error: LegError) -> None:
        """The decode leg will not deliver: prefill need not wait for it."""
        self._end_reason = f"decode leg failed: {error}"
        self._failed("decode", error, self._prefill.epoch)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._end_reason == "done":
            self._end_reason = "client gone" if kind is asyncio.CancelledError else f"{kind.__name__}: {error}"
        self._live.pop(self._pairing.transfer_id, None)
        try:
            if self._response is not None:
                self._response.close()
            await self._prefill.close()
        finally:
            release = Release(transfer_id=self._pairing.transfer_id, reason=self._end_reason[:2048])
            self._pairer.send(release)

    def _transfer(self) -> JsonObject:
        """Our part of kv_transfer_params, as of now."""
        left_s = self._transfer_deadline - asyncio.get_running_loop().time()
        transfer: JsonObject = {
            "transfer_id": self._pairing.transfer_id,
            "deadline_s": max(0.001, round(left_s, 3)),
        }
        if self._tenant:
            transfer["tenant"] = self._tenant
        if self._traceparent:
            transfer["traceparent"] = self._traceparent
        return transfer

    async def _run_prefill(self, prefill: EngineRef) -> None:
        url, data = prefill.url + self._path, encode(prefill_body(self._parsed, self._transfer()))
        response = await self._engines.send("POST", url, data, self._headers, self._transfer_deadline)
        body = await read_all(response, self._transfer_deadline)
        if response.status >= 400:
            raise refused(url, response.status, body)

    def _prefill_failed(self, epoch: int, error: LegError) -> None:
        self._failed("prefill", error, epoch)

    def _failed(self, leg: Leg, error: LegError, epoch: int) -> None:
        log.warning("%s leg of %s failed (%s): %s", leg, self._pairing.transfer_id, error.kind, error)
        self._metrics.inc("pdxfer_proxy_leg_failures_total", leg=leg, kind=error.kind)
        reason = str(error)[:2048]
        self._pairer.send(LegFailed(transfer_id=self._pairing.transfer_id, leg=leg, reason=reason, epoch=epoch))
