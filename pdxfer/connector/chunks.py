"""The chunk keys of one request, for every rank, growing with its tokens. Scheduler half only.

A rank's identity is in its keys (kv/chunks.py), so a request has one chain a rank; a chunk is here a tuple of ChunkKey,
one a rank, all with the same tokens. Extra keys are vLLM's own per block, with a LoRA adapter named by its weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdxfer.connector.compat import Request, generate_block_hash_extra_keys
from pdxfer.connector.requests import adapter_digest
from pdxfer.core.errors import ConfigError
from pdxfer.kv.chunks import ChunkKey, Scheme, chunk_keys, extra_bytes, partial_keys

RankChunk = tuple[ChunkKey, ...]
"""One chunk: its key on each rank."""
MAX_CHUNKS = (1 << 15) - 1
"""Of one prompt, and an incomplete one after them: what a message to a rank may name (wire/store_facts.Keys). What lies
beyond is computed; with a chunk a block of 16 tokens that is half a million."""


@dataclass(slots=True)
class Grid:
    """How this engine cuts prompts into chunks, and who it is."""

    chunk_tokens: int
    block_size: int
    scheme: Scheme
    with_partial: bool
    world_size: int
    identities: dict[int, bytes] = field(default_factory=dict)
    """Rank → identity; filled as ranks report."""

    def __post_init__(self) -> None:
        if self.chunk_tokens % self.block_size:
            raise ConfigError(
                f"transport.chunk_tokens {self.chunk_tokens} is not a multiple of the KV block size {self.block_size}, "
                "so the store cannot cut chunks: change one of them, or set store.chunking: blocks"
            )

    @property
    def is_ready(self) -> bool:
        """All ranks have said who they are."""
        return len(self.identities) == self.world_size


class PromptChunks:
    """Chunk keys over all tokens of one request: prompt and output."""

    def __init__(self, request: Request, grid: Grid) -> None:
        self.request, self._grid = request, grid
        self._full: list[list[ChunkKey]] = [[] for _ in range(grid.world_size)]
        self._extras: list[bytes] = []
        self._mm_index = 0
        self._has_extras = bool(request.lora_request or request.mm_features or request.cache_salt)
        self._adapter = ("", "")
        """Path and digest of its LoRA adapter, looked at once: all its blocks are of the same weights."""

    def full(self, num_tokens: int) -> list[RankChunk]:
        """The complete chunks among the first `num_tokens` tokens, at most MAX_CHUNKS."""
        count = min(MAX_CHUNKS, min(num_tokens, self.request.num_tokens) // self._grid.chunk_tokens)
        if count > len(self._full[0]):
            self._extend(count)
        return list(zip(*(chain[:count] for chain in self._full), strict=True))

    def tail(self, num_tokens: int) -> RankChunk | None:
        """The incomplete chunk at the end of the first `num_tokens` tokens: its whole blocks, if there are any."""
        grid, end = self._grid, min(num_tokens, self.request.num_tokens)
        end -= end % grid.block_size
        if not grid.with_partial or end % grid.chunk_tokens == 0 or end // grid.chunk_tokens > MAX_CHUNKS:
            return None
        before = self.full(end)
        return self._partials(before[-1] if before else None, end)[0]

    def tails(self, after: RankChunk | None) -> list[RankChunk]:
        """All incomplete chunks that could follow `after` (None: at the start), longest first."""
        if not self._grid.with_partial or self._grid.chunk_tokens == self._grid.block_size:
            return []
        return self._partials(after, self.request.num_tokens)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _extend(self, count: int) -> None:
        grid = self._grid
        end = count * grid.chunk_tokens
        tokens, extras = self._tokens(end), self._extras_to(end)
        for rank, chain in enumerate(self._full):
            chain += chunk_keys(
                tokens,
                extras,
                grid.identities[rank],
                grid.chunk_tokens,
                grid.scheme,
                block_size=grid.block_size,
                with_partial=False,
                after=chain[-1] if chain else None,
            )

    def _partials(self, after: RankChunk | None, end: int) -> list[RankChunk]:
        grid = self._grid
        tokens, extras = self._tokens(end), self._extras_to(end)
        chains = [
            partial_keys(
                tokens,
                extras,
                grid.identities[rank],
                grid.chunk_tokens,
                grid.scheme,
                block_size=grid.block_size,
                after=after[rank] if after else None,
            )
            for rank in range(grid.world_size)
        ]
        return list(zip(*chains, strict=True))

    def _tokens(self, end: int) -> Sequence[int]:
        tokens: list[int] = self.request.all_token_ids[:end]
        return tokens

    def _extras_to(self, end: int) -> list[bytes]:
        """Extra keys of the blocks before `end`; extended as the request grows."""
        if not self._has_extras:
            return self._extras
        size = self._grid.block_size
        for block in range(len(self._extras), end // size):
            start = block * size
            keys, self._mm_index = generate_block_hash_extra_keys(self.request, start, start + size, self._mm_index)
            self._extras.append(extra_bytes([self._stable(key) for key in keys or ()]))
        return self._extras

    def _stable(self, key: object) -> object:
        """vLLM names an adapter by name and path; its weights are what KV depends on."""
        if not isinstance(key, tuple) or key[:1] != ("lora",):
            return key
        path = str(key[2])
        if self._adapter[0] != path:
            self._adapter = (path, adapter_digest(path))
        return ("lora", self._adapter[1])
