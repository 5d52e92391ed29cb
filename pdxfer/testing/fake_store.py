"""A FakeEngine's use of the tiered store: whole chunks of a prompt are loaded instead of computed, and saved else.

The store is the node's own, with the tiers of the configuration; what it gives back must be the prompt's KV.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.kv.chunks import ChunkKey, chunk_keys
from pdxfer.memory.region import Region
from pdxfer.node.store_blocks import HostBlocks
from pdxfer.store.chunk import NewChunk, SaveResult, Wanted
from pdxfer.store.runtime import StoreThread
from pdxfer.store.tiered import TieredStore

LOAD_TIMEOUT_S = 2.0
SAVE_TIMEOUT_S = 5.0


class FakeStore:
    """Loads and saves for one fake engine. Event-loop thread only."""

    def __init__(self, thread: StoreThread, region: Region, chunk_tokens: int) -> None:
        self._thread, self._layout, self._chunk_tokens = thread, region.layout, chunk_tokens
        self._blocks = HostBlocks(region)

    async def load(self, block_ids: Sequence[int], token_ids: Sequence[int], first_block: int) -> int:
        """Fill the leading ones of these blocks, the prompt's from `first_block` on; how many were filled."""
        wanted = self._chunks(token_ids, first_block, len(block_ids))
        if not wanted:
            return 0
        per_chunk, size = self._per_chunk, self._blocks.bytes_per_block
        questions = [Wanted(key=chunk.key, num_tokens=chunk.num_tokens, raw_bytes=per_chunk * size) for chunk in wanted]

        def fill(index: int, header: object, raw: memoryview) -> None:
            self._blocks.fill(block_ids[index * per_chunk : (index + 1) * per_chunk], 0, raw)

        deadline = SYSTEM_CLOCK.now() + LOAD_TIMEOUT_S
        loaded = await asyncio.wrap_future(self._thread.submit(lambda store: store.load(questions, fill, deadline)))
        return loaded.prefix() * per_chunk

    def save(self, block_ids: Sequence[int], token_ids: Sequence[int], first_block: int) -> None:
        """Keep the whole chunks among these blocks, in the background. One copy."""
        for index, chunk in enumerate(self._chunks(token_ids, first_block, len(block_ids))):
            ids = block_ids[index * self._per_chunk : (index + 1) * self._per_chunk]
            parts = [bytes(part) for part in self._blocks.parts(ids)]
            new = NewChunk(key=chunk.key, num_tokens=chunk.num_tokens, parts=parts, first_token=chunk.first_token)
            self._submit(new)

    def _submit(self, chunk: NewChunk) -> "Future[SaveResult]":
        async def save(store: TieredStore) -> SaveResult:
            return await store.save(chunk, store.clock.now() + SAVE_TIMEOUT_S)

        return self._thread.submit(save)

    def _chunks(self, token_ids: Sequence[int], first_block: int, num_blocks: int) -> list[ChunkKey]:
        """Whole chunks of the prompt within these blocks; none unless they begin with one."""
        if first_block % self._per_chunk:
            return []
        identity = self._thread.store.coder.identity
        keys = chunk_keys(
            token_ids, (), identity, self._chunk_tokens, block_size=self._layout.block_size, with_partial=False
        )
        first = first_block // self._per_chunk
        return keys[first : first + num_blocks // self._per_chunk]

    @property
    def _per_chunk(self) -> int:
        return self._chunk_tokens // self._layout.block_size
