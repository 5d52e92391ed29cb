"""Both legs of one pairing: sent at the same moment, ended together.

The prefill leg's answer is read and thrown away; if it fails, the router hears of it, so that decode stops waiting and
computes the prompt itself. The decode leg's response is what the client gets. Leaving the block aborts whatever still
runs and releases the pairing, always.
"""

import asyncio
import logging
from collections.abc import Mapping
from types import TracebackType

import aiohttp

from pdxfer.metrics.catalog import MetricSet
from pdxfer.proxy.body import JsonObject, Parsed, decode_body, encode, prefill_body
from pdxfer.proxy.engine_http import EngineHttp, LegError, read_all, refused
from pdxfer.proxy.pairer import Pairer
from pdxfer.wire.messages import Leg, LegFailed, Pairing, Release

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
    ) -> None:
        """`deadline` is the request's, in event-loop time; the KV has `transfer_timeout_s` of it."""
        self._engines, self._pairer, self._metrics = engines, pairer, metrics
        self._pairing, self._path, self._headers = pairing, path, headers
        now = asyncio.get_running_loop().time()
        self._deadline = deadline
        self._transfer_deadline = min(deadline, now + transfer_timeout_s)
        transfer: JsonObject = {
            "transfer_id": pairing.transfer_id,
            "deadline_s": round(self._transfer_deadline - now, 3),
        }
        if tenant:
            transfer["tenant"] = tenant
        self._prefill_body = encode(prefill_body(parsed, transfer))
        self._decode_body = encode(decode_body(parsed, transfer))
        self._prefill: asyncio.Task[None] | None = None
        self._response: aiohttp.ClientResponse | None = None
        self._end_reason = "done"

    async def __aenter__(self) -> "Legs":
        self._prefill = asyncio.create_task(self._run_prefill(), name=f"prefill-{self._pairing.transfer_id}")
        return self

    async def decode(self) -> aiohttp.ClientResponse:
        """Status and headers of the decode leg. Raises LegError. The response is closed with the block."""
        url = self._pairing.decode.url + self._path
        self._response = await self._engines.send("POST", url, self._decode_body, self._headers, self._deadline)
        return self._response

    def decode_failed(self, error: LegError) -> None:
        """The decode leg will not deliver: prefill need not wait for it."""
        self._end_reason = f"decode leg failed: {error}"
        self._failed("decode", error)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._end_reason == "done":
            self._end_reason = "client gone" if kind is asyncio.CancelledError else f"{kind.__name__}: {error}"
        try:
            if self._response is not None:
                self._response.close()
            if self._prefill is not None:
                self._prefill.cancel()
                await asyncio.wait([self._prefill])
        finally:
            release = Release(transfer_id=self._pairing.transfer_id, reason=self._end_reason[:2048])
            self._pairer.send(release)

    async def _run_prefill(self) -> None:
        url = self._pairing.prefill.url + self._path
        try:
            response = await self._engines.send("POST", url, self._prefill_body, self._headers, self._transfer_deadline)
            body = await read_all(response, self._transfer_deadline)
            if response.status >= 400:
                raise refused(url, response.status, body)
        except LegError as error:
            self._failed("prefill", error)

    def _failed(self, leg: Leg, error: LegError) -> None:
        log.warning("%s leg of %s failed (%s): %s", leg, self._pairing.transfer_id, error.kind, error)
        self._metrics.inc("pdxfer_proxy_leg_failures_total", leg=leg, kind=error.kind)
        reason = str(error)[:2048]
        self._pairer.send(LegFailed(transfer_id=self._pairing.transfer_id, leg=leg, reason=reason))
