"""Step 13 of the request's life on one rank: chunks of the store → the blocks of a waiting request.

Every Load is answered by one Loaded, when nothing of it is written any more: delivered, short, stopped or too late.
Only leading chunks count: a gap ends what is good. Everything runs on the store's thread and its workers.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future

from pdxfer.codec.frame import FrameHeader
from pdxfer.core.clock import Clock
from pdxfer.node.store_blocks import Blocks
from pdxfer.store.chunk import Wanted
from pdxfer.store.runtime import StoreThread
from pdxfer.store.tiered import TieredStore
from pdxfer.wire.store_facts import Load, Loaded, Unload

log = logging.getLogger(__name__)


class Loader:
    """Loads of one rank."""

    def __init__(
        self,
        rank: int,
        block_size: int,
        blocks: Blocks,
        thread: StoreThread,
        report: Callable[[Loaded], None],
        clock: Clock,
    ) -> None:
        self._rank, self._block_size, self._blocks = rank, block_size, blocks
        self._thread, self._report, self._clock = thread, report, clock
        self._running: dict[str, Future[None]] = {}

    def load(self, load: Load) -> None:
        """Begin (half link's thread)."""
        future = self._thread.submit(lambda store: self._load(store, load))
        self._running[load.load_id] = future
        future.add_done_callback(lambda _: self._running.pop(load.load_id, None))

    def stop(self, unload: Unload) -> None:
        """End it early; Loaded follows, or is on its way."""
        future = self._running.get(unload.load_id)
        if future is not None:
            future.cancel()

    async def _load(self, store: TieredStore, load: Load) -> None:
        delivered: set[int] = set()
        reason = "stopped"
        try:
            late = await self._deliver(store, load, delivered)
            reason = "the load's time is over" if late else "a chunk is in no tier any more, or was damaged"
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # The request computes what is missing; the engine goes on.
            log.exception("store: %s failed: please report this", load.load_id)
            reason = f"{type(error).__name__}: {error}"
        finally:
            if len(delivered) < len(load.keys):
                _hear(store)
            self._report(self._loaded(load, delivered, reason))

    async def _deliver(self, store: TieredStore, load: Load, delivered: set[int]) -> bool:
        """True: the deadline ended it."""
        per_block = self._blocks.bytes_per_block
        wanted = [
            Wanted(key=key, num_tokens=count * self._block_size, raw_bytes=count * per_block)
            for key, count in zip(load.keys, load.num_blocks, strict=True)
        ]
        targets = _targets(load)

        def scatter(index: int, header: FrameHeader, raw: memoryview) -> None:
            ids = targets[index]
            self._blocks.fill(ids, load.num_blocks[index] - len(ids), raw)
            delivered.add(index)

        loaded = await store.load(wanted, scatter, self._clock.now() + load.timeout_s)
        return loaded.late

    def _loaded(self, load: Load, delivered: set[int], reason: str) -> Loaded:
        num_chunks = next(i for i in range(len(load.keys) + 1) if i not in delivered)
        num_valid = max(0, sum(load.num_blocks[:num_chunks]) - load.skip_blocks)
        return Loaded(
            rank=self._rank,
            load_id=load.load_id,
            num_valid=num_valid,
            num_bytes=num_valid * self._blocks.bytes_per_block,
            num_chunks=num_chunks,
            wall=self._clock.wall(),
            reason="" if num_chunks == len(load.keys) else reason[:1000],
        )


def _hear(store: TieredStore) -> None:
    """What turned out to be gone or damaged is told before the load is over: the request must not ask for it again."""
    for slot in store.slots:
        store.writer.take_evictions(slot)
    store.events.flush()


def _targets(load: Load) -> list[list[int]]:
    """Destination blocks of each chunk; the first one without those that are not wanted."""
    targets, at = [], -load.skip_blocks
    for count in load.num_blocks:
        targets.append(load.block_ids[max(0, at) : at + count])
        at += count
    assert at == len(load.block_ids), (at, len(load.block_ids))
    return targets
