"""A FakeEngine's place in the cluster: real sockets, a real node that moves the bytes, vLLM's part done by FakeCache.

job without transfer → compute      prefill leg → FakeSends      decode leg → FakeReceives
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.node.node import Node
from pdxfer.testing.fake_api import Job
from pdxfer.testing.fake_kv import Compute, FakeCache
from pdxfer.testing.fake_link import FakeLink, MemberSettings
from pdxfer.testing.fake_receives import FakeReceives
from pdxfer.testing.fake_sends import FakeSends
from pdxfer.testing.fake_store import FakeStore
from pdxfer.wire.halves import Fenced, Landed, Settled, ToScheduler
from pdxfer.wire.messages import CancelGrant, FromRouter, LegFailed, Started

log = logging.getLogger(__name__)

MAX_EARLY = 4096
"""Messages kept for requests that have not arrived yet."""


class FakeMember:
    """Implements fake_compute.Kv. Made on the event loop; `await close()` when the HTTP server has stopped."""

    def __init__(self, settings: MemberSettings, cache: FakeCache, make_node: Callable[[], Node]) -> None:
        """Joins the router when the node that `make_node` makes has connected to us."""
        self.cache = cache
        self._compute = Compute(cache, settings.prefill_tokens_per_s)
        self._early: OrderedDict[str, Started | LegFailed | CancelGrant] = OrderedDict()
        self._cleanups: set[asyncio.Task[None]] = set()
        self._link = FakeLink(settings, cache, self._on_message, self._on_fact)
        self._node = make_node()
        self._compute.stepped = self._node.stepped
        if self._node.store is not None:
            self._compute.store = FakeStore(self._node.store.thread, cache.region, settings.chunk_tokens)
        self._sends = FakeSends(
            self._link, lambda: self._node, self._compute, settings.step_tokens, self._in_background
        )
        self._receives = FakeReceives(self._link, settings.engine_id, self._compute, self._in_background)

    def __repr__(self) -> str:
        return f"<FakeMember {self.cache!r} in={len(self._receives)} out={len(self._sends)}>"

    @property
    def is_idle(self) -> bool:
        """No transfer is unsettled and all blocks are back."""
        return not (self._receives or self._sends or self._cleanups) and self.cache.is_full

    async def close(self) -> None:
        """Leave the cluster and stop the node."""
        for task in self._cleanups:
            task.cancel()
        await asyncio.gather(*self._cleanups, return_exceptions=True)
        await asyncio.to_thread(self._link.close)
        await asyncio.to_thread(self._node.close)

    @asynccontextmanager
    async def filled(self, job: Job) -> AsyncIterator[None]:
        self._link.num_running += 1
        try:
            async with self._filled(job):
                yield
        finally:
            self._link.num_running -= 1

    @asynccontextmanager
    async def _filled(self, job: Job) -> AsyncIterator[None]:
        transfer = job.transfer
        if transfer is None or len(job.prompts) != 1:
            for token_ids in job.prompts:
                await self._compute.alone(token_ids)
            yield
            return
        [token_ids] = job.prompts
        if self._link.traces is not None:
            self._link.traces.begin(transfer.transfer_id, transfer.traceparent)
        early = self._early.pop(transfer.transfer_id, None)
        if transfer.leg == "prefill":
            failed = "" if early is None or isinstance(early, Started) else early.reason or "cancelled"
            await self._sends.run(transfer, token_ids, failed)
            yield
        else:
            news = None if isinstance(early, CancelGrant) else early
            try:
                async with self._receives.run(transfer, token_ids, news):
                    yield
            finally:
                if self._link.traces is not None:
                    self._link.traces.over(transfer.transfer_id, SYSTEM_CLOCK.wall())

    def _on_message(self, message: FromRouter) -> None:
        match message:
            case Started() | LegFailed() if self._receives.told(message):
                pass
            case LegFailed() | CancelGrant() if self._sends.cancel(message.transfer_id, message.reason):
                pass
            case Started() | LegFailed() | CancelGrant():
                self._early[message.transfer_id] = message
                while len(self._early) > MAX_EARLY:
                    self._early.popitem(last=False)
            case _:
                log.debug("ignored %s", message)

    def _on_fact(self, fact: ToScheduler) -> None:
        match fact:
            case Landed():
                self._receives.landed(fact)
            case Fenced():
                self._receives.fenced(fact)
            case Settled():
                self._sends.settled(fact)
            case _:
                log.debug("ignored %s", fact)

    def _in_background(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)
