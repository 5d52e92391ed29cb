"""Our references on vLLM's KV blocks: what is being sent, and what must not be reused yet.

Lives on the EngineCore thread; vLLM's pool is not thread-safe. Every take is matched by one give_back.
"""

from collections.abc import Iterable

from pdxfer.connector.compat import BlockPool, KVCacheBlock


class References:
    """Counts on blocks of vLLM's pool."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._quarantine: dict[str, list[int]] = {}

    def bind(self, pool: BlockPool) -> None:
        """The pool exists (once, after the cache manager was built)."""
        self._pool = pool

    def free_blocks(self, default: int) -> int:
        """Blocks a new request may take; `default` before the pool exists. Any thread (reads one integer)."""
        return int(self._pool.get_num_free_blocks()) if self._pool is not None else default

    def take(self, block_ids: Iterable[int]) -> None:
        """One more reference on each block."""
        assert self._pool is not None
        self._pool.touch([self._pool.blocks[i] for i in block_ids])

    def give_back(self, block_ids: list[int]) -> None:
        """Our reference on each block ends; the list is emptied. The tail goes first, as vLLM frees."""
        assert self._pool is not None
        self._pool.free_blocks([self._pool.blocks[i] for i in reversed(block_ids)])
        block_ids.clear()

    def kept(self, block_ids: Iterable[int]) -> bool:
        """Whether these blocks, given back by their request in this very step, were not handed out again."""
        assert self._pool is not None
        return all(self._pool.blocks[i].ref_cnt == 0 for i in block_ids)

    def next_out(self, count: int) -> list[KVCacheBlock]:
        """The free blocks that the pool will hand out, and forget, next."""
        assert self._pool is not None
        found: list[KVCacheBlock] = []
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        while block is not None and block.block_id >= 0 and len(found) < count:
            found.append(block)
            block = block.next_free_block
        return found

    def block(self, block_id: int) -> KVCacheBlock:
        """vLLM's record of a block."""
        assert self._pool is not None
        return self._pool.blocks[block_id]

    def quarantine(self, transfer_id: str, block_ids: list[int]) -> None:
        """Keep these blocks out of the pool although their request is over: bytes may still land in them."""
        self.take(block_ids)
        self._quarantine.setdefault(transfer_id, []).extend(block_ids)

    def release(self, transfer_id: str) -> None:
        """Nothing of this transfer can land any more."""
        if blocks := self._quarantine.pop(transfer_id, None):
            self.give_back(blocks)

    @property
    def num_quarantined(self) -> int:
        """Blocks in quarantine."""
        return sum(len(blocks) for blocks in self._quarantine.values())
