"""Where one request goes: the router's answer, or without a router the decode engine used last."""

import logging
from dataclasses import dataclass

from pdxfer.core.errors import UnreachableError
from pdxfer.core.ids import new_request_id
from pdxfer.proxy.engines import Engines
from pdxfer.proxy.errors import ApiError
from pdxfer.proxy.pairer import Pairer
from pdxfer.proxy.readiness import Readiness
from pdxfer.wire.messages import MAX_AVOIDED, Busy, Local, Pair, Pairing

log = logging.getLogger(__name__)

ROUTER_UNREACHABLE = "router_unreachable"
_ANSWER_SHARE = 0.9
"""Of the wait, how much the router may use: its answer has to travel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one request asks for."""

    model: str
    num_tokens: int
    tenant: str
    remaining_s: float
    avoid: tuple[str, ...] = ()
    """Engines that have failed it: taken only if there is no other."""
    traceparent: str = ""


class Routing:
    """Asks, and remembers what it learns."""

    def __init__(self, pairer: Pairer, engines: Engines, readiness: Readiness, pair_timeout_s: float) -> None:
        self._pairer, self._engines, self._readiness = pairer, engines, readiness
        self._pair_timeout_s = pair_timeout_s

    async def pair(self, need: Need) -> Pairing | Local:
        """A pair, or what the router gives instead. Raises ApiError 503."""
        answer = await self._ask(need, local_only=False)
        if isinstance(answer, Pairing):
            self._readiness.paired()
        return answer

    async def one(self, need: Need, reason: str) -> Local:
        """A decode engine alone, for our own `reason`. Raises ApiError 503."""
        answer = await self._ask(need, local_only=True)
        assert isinstance(answer, Local), f"the router paired a request that asked for one engine: {answer}"
        if answer.reason == ROUTER_UNREACHABLE:
            return answer
        return Local(request_id=answer.request_id, decode=answer.decode, reason=reason)

    async def _ask(self, need: Need, *, local_only: bool) -> Pairing | Local:
        timeout_s = min(self._pair_timeout_s, need.remaining_s)
        request = Pair(
            request_id=new_request_id(),
            num_tokens=need.num_tokens,
            deadline_s=timeout_s * _ANSWER_SHARE,
            model=self._engines.base(need.model),
            tenant=need.tenant,
            local_only=local_only,
            avoid=[*self._engines.lacking(need.model), *need.avoid][-MAX_AVOIDED:],
            traceparent=need.traceparent,
        )
        try:
            answer = await self._pairer.pair(request, timeout_s)
        except UnreachableError as error:
            return self._last_resort(need, error)
        if isinstance(answer, Busy):
            raise ApiError(
                503,
                f"no engine can take the request now: {answer.reason}; send it again in {answer.retry_after_s:g} s",
                code="busy",
                retry_after_s=max(answer.retry_after_s, 1.0),
            )
        self._engines.remember(answer.decode)
        return answer

    def _last_resort(self, need: Need, error: UnreachableError) -> Local:
        engine = self._engines.last_resort(need.model, need.avoid)
        if engine is None:
            raise ApiError(
                503, f"the router does not answer and no engine is known: {error}", code="unreachable", retry_after_s=2
            ) from error
        log.warning("router unreachable (%s): serving by %s alone", error, engine.engine_id)
        return Local(request_id="", decode=engine, reason=ROUTER_UNREACHABLE)
