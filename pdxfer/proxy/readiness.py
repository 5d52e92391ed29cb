"""Whether a request would be served by a pair now, found out by asking the router for one.

Its engines must answer us as well: an engine joins the router some seconds before its HTTP server listens.
"""

import asyncio

from pdxfer.core.clock import Clock
from pdxfer.core.errors import UnreachableError
from pdxfer.core.ids import new_request_id
from pdxfer.proxy.engine_http import EngineHttp, LegError, read_all
from pdxfer.proxy.pairer import Pairer
from pdxfer.wire.messages import (
    ONE_BLOCK,
    PREFILL_TOO_SMALL,
    SHORT_PROMPT,
    EngineRef,
    Local,
    Pair,
    Pairing,
    Release,
)

PROBE_TOKENS = 1024
"""Long enough to be paired under the usual router.min_remote_tokens, short enough to fit."""
PAIR_IS_THERE = (SHORT_PROMPT, ONE_BLOCK, PREFILL_TOO_SMALL)
"""Where it is not paired for one of these, a prompt of another length would be."""
PROBE_TIMEOUT_S = 1.0
BELIEVE_S = 5.0
"""A pairing seen this recently proves that a pair exists."""


class Readiness:
    """The answer to GET /ready, without asking the router more than needed."""

    def __init__(self, pairer: Pairer, http: EngineHttp, clock: Clock) -> None:
        self._pairer, self._http, self._clock = pairer, http, clock
        self._paired = float("-inf")

    def paired(self) -> None:
        """The router has just made a pairing."""
        self._paired = self._clock.now()

    async def reasons(self) -> list[str]:
        """Why no pair can be had; empty means ready."""
        if self._clock.now() < self._paired + BELIEVE_S:
            return []
        probe = Pair(request_id=new_request_id(), num_tokens=PROBE_TOKENS, deadline_s=PROBE_TIMEOUT_S / 2)
        try:
            answer = await self._pairer.pair(probe, PROBE_TIMEOUT_S)
        except UnreachableError as error:
            return [f"router unreachable: {error}"]
        if isinstance(answer, Pairing):
            self._pairer.send(Release(transfer_id=answer.transfer_id, reason="readiness probe"))
            return await self._problems(answer.prefill, answer.decode)
        if isinstance(answer, Local) and answer.reason in PAIR_IS_THERE:
            return await self._problems(answer.decode)
        if isinstance(answer, Local):
            return [f"no pair, only decode engine {answer.decode.engine_id} alone: {answer.reason}"]
        return [f"no engine can take a request: {answer.reason}"]

    async def _problems(self, *engines: EngineRef) -> list[str]:
        """Why one of the pair is of no use; empty: it is believed in for a while."""
        problems = [p for p in await asyncio.gather(*map(self._problem, engines)) if p]
        if not problems:
            self.paired()
        return problems

    async def _problem(self, engine: EngineRef) -> str:
        """Why the engine's HTTP server is of no use; empty if it is well."""
        deadline = asyncio.get_running_loop().time() + PROBE_TIMEOUT_S
        try:
            answer = await self._http.send("GET", f"{engine.url}/health", b"", {}, deadline)
            await read_all(answer, deadline)
        except LegError as error:
            return f"engine {engine.engine_id} has joined the router but does not answer: {error}"
        return "" if answer.status == 200 else f"engine {engine.engine_id}: /health answers {answer.status}"
