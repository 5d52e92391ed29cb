"""Step 12 of the request's life on one rank: planned chunks → the store, and word back that their blocks are free.

The compute thread hands a step's plans over when its forward has run; everything else is on the store's thread. Every
save id is answered exactly once, whatever happens to it.
"""

import asyncio
import logging
from collections.abc import Callable

from pdxfer.core.clock import Clock
from pdxfer.node.outgoing import Ready
from pdxfer.node.plan import SavePlan
from pdxfer.node.store_blocks import Blocks
from pdxfer.store.chunk import NewChunk, SaveResult
from pdxfer.store.chunk import Saved as Became
from pdxfer.store.runtime import StoreThread
from pdxfer.store.tiered import TieredStore
from pdxfer.wire.store_facts import Saved

log = logging.getLogger(__name__)

AT_ONCE = 2
"""Chunks of one step that are copied at the same time."""
SAVE_TIMEOUT_S = 2.0
"""A chunk that finds no room for so long is dropped: its blocks are wanted back."""
DROPPED = (Became.DROPPED, Became.FAILED, Became.SKIPPED)


class Saver:
    """Saves of one rank."""

    def __init__(
        self, rank: int, blocks: Blocks, thread: StoreThread, report: Callable[[Saved], None], clock: Clock
    ) -> None:
        self._rank, self._blocks, self._thread, self._report, self._clock = rank, blocks, thread, report, clock
        self._gate = asyncio.Semaphore(AT_ONCE)

    def save(self, plans: tuple[SavePlan, ...], ready: Ready) -> None:
        """The step of these plans has run (on a device: once `ready` returns). Compute thread; only hands over."""
        self._thread.submit(lambda store: self._save_all(store, plans, ready))

    async def _save_all(self, store: TieredStore, plans: tuple[SavePlan, ...], ready: Ready) -> None:
        if ready is not None:
            await store.workers.run(ready)
        await asyncio.gather(*(self._save(store, plan) for plan in plans))

    async def _save(self, store: TieredStore, plan: SavePlan) -> None:
        size, dropped = 0, 1
        try:
            async with self._gate:
                result = await self._put(store, plan)
            if result.outcome not in DROPPED:
                size, dropped = self._blocks.bytes_per_block * len(plan.block_ids), 0
        except Exception:
            # A bug here must not keep the engine's blocks for ever.
            log.exception("store: chunk %s was not saved: please report this", plan.keys[self._rank].hex()[:12])
        finally:
            fact = Saved(rank=self._rank, save_ids=[plan.save_id], num_bytes=size, num_dropped=dropped)
            self._report(fact)

    async def _put(self, store: TieredStore, plan: SavePlan) -> SaveResult:
        parts = await store.workers.run(self._blocks.parts, plan.block_ids)
        chunk = NewChunk(
            key=plan.keys[self._rank], num_tokens=plan.num_tokens, parts=parts, first_token=plan.first_token
        )
        deadline = self._clock.now() + SAVE_TIMEOUT_S
        return await store.save(chunk, deadline, tenant=plan.tenant, reserved=plan.reserved)
