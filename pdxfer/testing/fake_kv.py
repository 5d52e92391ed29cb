"""KV cache of a FakeEngine: numpy memory in the layout of a real engine, with values that the prompt alone implies.

A block's values, bfloat16 and spread like real KV, are derived from all token ids up to its end and its layer, so KV of
another prompt, of another position or of another layer is recognised. Event-loop thread only, but for the node's
threads, which move the bytes.
"""

import asyncio
from collections import deque
from collections.abc import Callable

import numpy as np
from blake3 import blake3

from pdxfer.codec.values import from_float, to_float
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.kv.layout import KvLayout
from pdxfer.kv.runs import block_runs
from pdxfer.memory.region import Region
from pdxfer.testing.fake_compute import KvError
from pdxfer.testing.fake_model import pack
from pdxfer.testing.fake_store import FakeStore

SAMPLE = 13
"""Where a lossy codec was on the way, one value in so many is looked at."""
NEAR = 0.05
"""Largest mean error of KV that a lossy codec has touched, in parts of the mean value."""


class FakeCache:
    """A region and the pool of its blocks; block 0 is never given out, as in vLLM."""

    def __init__(
        self, *, num_blocks: int, block_size: int, num_layers: int, block_bytes: int, is_exact: bool = True
    ) -> None:
        """`is_exact` False: values near the prompt's count as its own (a lossy codec was on the way)."""
        self._is_exact = is_exact
        values = np.random.default_rng(0).standard_normal(block_bytes // 2).astype(np.float32)
        template = from_float(values, "bfloat16").view(np.uint16)
        self._template = np.concatenate((template, template))
        """Every block is a window of it with other low bits of the mantissas."""
        self._memory = np.zeros(num_layers * num_blocks * block_bytes, dtype=np.uint8)
        self.layout = KvLayout(
            base=self._memory.ctypes.data,
            num_bytes=self._memory.nbytes,
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            block_stride=block_bytes,
            layer_offsets=tuple(layer * num_blocks * block_bytes for layer in range(num_layers)),
            block_size=block_size,
        )
        self.region = Region(self.layout)
        self._free = deque(range(1, num_blocks))
        self._freed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<FakeCache free={self.num_free}/{self.layout.num_blocks - 1}>"

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def is_full(self) -> bool:
        """All blocks are free."""
        return len(self._free) == self.layout.num_blocks - 1

    def num_needed(self, num_tokens: int) -> int:
        """Blocks of a prompt."""
        return -(-num_tokens // self.layout.block_size)

    async def take(self, num_blocks: int) -> list[int]:
        """Reserve blocks, waiting until so many are free. The caller gives them back with `give`."""
        assert num_blocks < self.layout.num_blocks, f"{num_blocks} blocks of {self.layout.num_blocks - 1}"
        while len(self._free) < num_blocks:
            self._freed.clear()
            await self._freed.wait()
        return [self._free.popleft() for _ in range(num_blocks)]

    def give(self, block_ids: list[int]) -> None:
        """Return blocks, oldest use first."""
        self._free.extend(block_ids)
        self._freed.set()

    def write(self, block_ids: list[int], token_ids: list[int], first_block: int = 0) -> None:
        """Compute the KV of the prompt's blocks from `first_block` on into these blocks."""
        seeds = self._seeds(token_ids)[first_block : first_block + len(block_ids)]
        for block_id, seed in zip(block_ids, seeds, strict=True):
            for layer in range(self.layout.num_layers):
                np.copyto(np.frombuffer(self._view(block_id, layer), np.uint16), self._values(seed, layer))

    def first_wrong(self, block_ids: list[int], token_ids: list[int], first_block: int = 0) -> int | None:
        """Index of the first of these blocks, the prompt's from `first_block` on, with other bytes, or None."""
        seeds = self._seeds(token_ids)[first_block : first_block + len(block_ids)] if block_ids else []
        for index, (block_id, seed) in enumerate(zip(block_ids, seeds, strict=True)):
            for layer in range(self.layout.num_layers):
                if not self._is_right(np.frombuffer(self._view(block_id, layer), np.uint16), seed, layer):
                    return index
        return None

    def _seeds(self, token_ids: list[int]) -> list[bytes]:
        """One seed a block, over all tokens up to its end."""
        hasher, size, seeds = blake3(), self.layout.block_size, []
        for start in range(0, len(token_ids), size):
            hasher.update(pack(token_ids[start : start + size]))
            seeds.append(hasher.digest())
        return seeds

    def _is_right(self, found: "np.ndarray[tuple[int], np.dtype[np.uint16]]", seed: bytes, layer: int) -> bool:
        if self._is_exact:
            return bool(np.array_equal(found, self._values(seed, layer)))
        samples = (np.ascontiguousarray(words) for words in (found[::SAMPLE], self._values(seed, layer, SAMPLE)))
        values = [to_float(words.view(np.uint8), "bfloat16") for words in samples]
        return bool(np.abs(values[0] - values[1]).mean() <= NEAR * np.abs(values[1]).mean())

    def _values(self, seed: bytes, layer: int, step: int = 1) -> "np.ndarray[tuple[int], np.dtype[np.uint16]]":
        """One layer of a block, as bfloat16 words; each `step`-th of them."""
        number = int.from_bytes(blake3(seed + layer.to_bytes(4, "little")).digest(length=8), "little")
        num_words = self.layout.block_bytes // 2
        start, low = number % num_words, number // num_words % 64
        return self._template[start : start + num_words : step] ^ np.uint16(low)

    def _view(self, block_id: int, layer: int) -> memoryview:
        return self.region.views(block_runs(self.layout, [block_id], layer, 1))[0]


class Compute:
    """KV by computing it, at the rate of the engine, or from the store if there is one."""

    def __init__(self, cache: FakeCache, tokens_per_s: float) -> None:
        self.cache = cache
        self.store: FakeStore | None = None
        self.stepped: Callable[[int, float], None] | None = None
        """Is told how many tokens were computed in which time (Node.stepped)."""
        self._tokens_per_s = tokens_per_s

    async def blocks(self, block_ids: list[int], token_ids: list[int], first_block: int) -> None:
        """Fill these blocks: the prompt's from `first_block` on. Raises KvError if the store gave other bytes."""
        if not block_ids:
            return
        num_loaded = await self.store.load(block_ids, token_ids, first_block) if self.store else 0
        wrong = self.cache.first_wrong(block_ids[:num_loaded], token_ids, first_block)
        if wrong is not None:
            raise KvError(f"block {first_block + wrong} came from the store and does not hold this prompt's KV")
        rest, first_rest = block_ids[num_loaded:], first_block + num_loaded
        if rest:
            began, num_tokens = SYSTEM_CLOCK.now(), len(rest) * self.cache.layout.block_size
            self.cache.write(rest, token_ids, first_rest)
            await asyncio.sleep(num_tokens / self._tokens_per_s)
            if self.stepped:
                self.stepped(num_tokens, SYSTEM_CLOCK.now() - began)
            if self.store:
                self.store.save(rest, token_ids, first_rest)

    async def alone(self, token_ids: list[int]) -> None:
        """A whole prompt, in blocks that are given back at once."""
        block_ids = await self.cache.take(self.cache.num_needed(len(token_ids)))
        try:
            await self.blocks(block_ids, token_ids, 0)
        finally:
            self.cache.give(block_ids)


def digest(token_ids: list[int]) -> bytes:
    """Identity of a prompt, as in Grant.token_digest."""
    return blake3(pack(token_ids)).digest(length=16)
