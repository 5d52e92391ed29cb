"""A router in the test's own process: answers from a script, keeps what the proxy sent."""

import asyncio
from collections import deque
from collections.abc import Callable

from pdxfer.core.errors import UnreachableError
from pdxfer.core.ids import new_transfer_id
from pdxfer.wire.messages import (
    Busy,
    Ended,
    EngineRef,
    LegFailed,
    Local,
    Message,
    Pair,
    Pairing,
    Redispatch,
    Release,
    Served,
    Stamp,
)

Answer = Callable[[Pair], "Pairing | Local | Busy"]


class FakePairer:
    """Implements proxy.pairer.Pairer. Pairs `prefill` with `decode` unless `answers` holds something else."""

    def __init__(self, prefill: EngineRef, decode: EngineRef) -> None:
        self.prefill, self.decode = prefill, decode
        self.spare: EngineRef | None = None
        """A second decode engine, for requests that avoid the first."""
        self.on_message: Callable[[Stamp | Ended | LegFailed | Redispatch], None] = lambda message: None
        self.answers: deque[Answer] = deque()
        """Taken one by one before the standard answer."""
        self.is_unreachable = False
        self.asked: list[Pair] = []
        self.sent: list[Release | LegFailed] = []
        self.served: list[Served] = []
        self.pairings: list[Pairing] = []
        self._changed = asyncio.Event()

    async def start(self) -> None:
        return

    async def close(self) -> None:
        return

    async def pair(self, request: Pair, timeout_s: float) -> Pairing | Local | Busy:
        self.asked.append(request)
        if self.is_unreachable:
            raise UnreachableError("the fake router was told not to answer")
        if self.answers:
            return self.answers.popleft()(request)
        return self.local(request) if request.local_only else self.pairing(request)

    def send(self, message: Release | LegFailed | Served) -> None:
        if isinstance(message, Served):
            self.served.append(message)
        else:
            self.sent.append(message)
        self._changed.set()

    async def wait_for(self, kind: type[Message], timeout_s: float = 20.0) -> Message:
        """The first message of this kind that the proxy sent, waiting for it."""
        async with asyncio.timeout(timeout_s):
            while True:
                for message in self.sent:
                    if isinstance(message, kind):
                        return message
                self._changed.clear()
                await self._changed.wait()

    def pairing(self, request: Pair) -> Pairing:
        """The standard answer."""
        pairing = Pairing(
            request_id=request.request_id,
            transfer_id=new_transfer_id(),
            prefill=self.prefill,
            decode=self.decode,
            lease_s=30.0,
        )
        self.pairings.append(pairing)
        return pairing

    def local(self, request: Pair, reason: str = "short prompt") -> Local:
        failed = self.decode.engine_id in request.avoid
        decode = self.spare if failed and self.spare is not None else self.decode
        return Local(request_id=request.request_id, decode=decode, reason=reason)
