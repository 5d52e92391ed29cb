"""The store's part of a receive: which chunks fill which of a request's blocks, told to the ranks. EngineCore thread.

claimed chunks  |--c0--|--c1--|--c2--|-t|          (t: an incomplete last chunk)
wanted blocks         |--------------|             from the first block vLLM lacks
                  skip^   blocks of the receive, in prompt order
"""

import itertools
import logging

from pdxfer.connector.chunks import RankChunk
from pdxfer.connector.compat import Request
from pdxfer.connector.lookups import Lookups
from pdxfer.connector.member import Member
from pdxfer.connector.transfer import Receive
from pdxfer.wire.store_facts import Load, Loaded, Unload

log = logging.getLogger(__name__)

LOAD_GRACE_S = 1.0
"""Ranks end a load by its timeout; the scheduler half waits this much longer for them to say so."""


class Loads:
    """Loads under way in this engine."""

    def __init__(
        self,
        lookups: Lookups,
        member: Member,
        *,
        block_size: int,
        world_size: int,
        timeout_s: float,
        max_pending: int,
    ) -> None:
        self.lookups, self._member = lookups, member
        self._block_size, self._world_size, self.timeout_s = block_size, world_size, timeout_s
        self._max_pending = max_pending
        self._pending: dict[str, Receive] = {}
        self._ids = itertools.count(1)

    def get(self, load_id: str) -> Receive | None:
        """The receive that this load fills."""
        return self._pending.get(load_id)

    @property
    def is_full(self) -> bool:
        """So many load that further requests are better computed."""
        return len(self._pending) >= self._max_pending

    def stored_end(self, request: Request) -> int | None:
        """The tiers have the KV of so many of its leading tokens; None: not known yet, ask again."""
        if request.skip_reading_prefix_cache or self.is_full:
            return 0
        chunks = self.lookups.answer(request)
        if chunks is None:
            return None
        return chunks[-1][0].end if chunks else 0

    def num_blocks(self, chunks: list[RankChunk], first_block: int) -> int:
        """Blocks that these chunks fill from `first_block` of the prompt on."""
        return max(0, chunks[-1][0].end // self._block_size - first_block) if chunks else 0

    def start(self, receive: Receive, chunks: list[RankChunk]) -> None:
        """Tell the ranks to load `receive.stored` from these chunks, which begin at or before its first block."""
        assert receive.stored is not None
        size, fill = self._block_size, receive.stored
        first = receive.first_block + fill.at
        wanted = [chunk for chunk in chunks if first * size < chunk[0].end <= (first + fill.count) * size]
        receive.load_id = f"load-{next(self._ids)}"
        self._pending[receive.load_id] = receive
        for rank in range(self._world_size):
            self._member.tell_worker(
                rank,
                Load(
                    load_id=receive.load_id,
                    keys=[chunk[rank].key for chunk in wanted],
                    num_blocks=[chunk[rank].num_tokens // size for chunk in wanted],
                    skip_blocks=first - wanted[0][0].first_token // size,
                    block_ids=receive.block_ids[fill.at : fill.at + fill.count],
                    timeout_s=self.timeout_s,
                ),
            )

    def stop(self, receive: Receive) -> None:
        """Nothing more is wanted; the ranks answer Loaded when they write no more."""
        if receive.load_id in self._pending:
            self._member.tell_workers(Unload(load_id=receive.load_id))

    def rank_loaded(self, receive: Receive, fact: Loaded) -> bool:
        """One rank is done. True: it came up short, and what else is out has to be taken back."""
        short = receive.rank_loaded(fact.rank, fact.num_valid, fact.reason)
        if receive.stored is None or receive.stored.is_over(self._world_size):
            self._pending.pop(fact.load_id, None)
        return short
