"""What goes into the store: chunks as they become complete, the last incomplete one, and what a preemption would lose.

Step 12 of the request's life (docs/design.md). A planned chunk's blocks are held by reference until every rank has
copied them (Saved). EngineCore thread only; never waits: what does not fit the bounds is tried again at the request's
next step, and counted as dropped at its end.
"""

import itertools
import logging
from dataclasses import dataclass, field

from pdxfer.connector.chunks import PromptChunks, RankChunk
from pdxfer.connector.compat import Request, SchedulerOutput
from pdxfer.connector.mirror import Mirror
from pdxfer.connector.references import References
from pdxfer.connector.requests import computed_before, tenant_of
from pdxfer.connector.save_policy import Nothing, Offer, SavePolicy
from pdxfer.node.plan import SavePlan
from pdxfer.wire.store_facts import Saved

log = logging.getLogger(__name__)

ENDED_WELL = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
"""Ends after which the last, incomplete chunk is worth keeping."""
POOL_SHARE = 4
"""Saves hold at most one in so many blocks of the engine's pool."""


@dataclass(slots=True)
class _Saving:
    """One request whose chunks are saved as they come."""

    chunks: PromptChunks
    num_offered: int = 0
    """Full chunks offered so far, from the start."""
    tail_end: int = 0
    """Tokens up to which an incomplete chunk was offered."""
    table: list[int] = field(default_factory=list)
    """Its blocks at its last step."""
    num_final: int = 0
    """Tokens whose KV is final after its last step, and whose ids are known."""


@dataclass(slots=True)
class _Pending:
    """One chunk that ranks are copying."""

    held: list[int]
    key: bytes
    ranks: set[int] = field(default_factory=set)
    dropped: bool = False
    """Some rank could not save it."""
    over: bool = False
    """Its request holds the blocks no more: they come back with us."""


class Saves:
    """All saves of this engine."""

    def __init__(
        self,
        references: References,
        mirror: Mirror,
        policy: SavePolicy,
        *,
        block_size: int,
        chunk_tokens: int,
        world_size: int,
        max_pending: int,
        max_blocks: int,
        save_decoded: bool,
    ) -> None:
        self._references, self._mirror, self._policy = references, mirror, policy
        self._block_size, self._chunk_tokens, self._world_size = block_size, chunk_tokens, world_size
        self._max_pending, self._max_blocks, self._save_decoded = max_pending, max_blocks, save_decoded
        self._requests: dict[str, _Saving] = {}
        self._pending: dict[int, _Pending] = {}
        self._keys: set[bytes] = set()
        """Of pending chunks."""
        self._num_held = 0
        self._late: list[SavePlan] = []
        """Planned outside a step; they go with the next one."""
        self._spilled: dict[int, bool | None] = {}
        """Saves that must not be dropped → whether a tier has them; None: under way."""
        self._ids = itertools.count(1)
        self.counters: dict[str, float] = {}

    def begin(self, chunks: PromptChunks) -> None:
        """A request has arrived."""
        self._requests[chunks.request.request_id] = _Saving(chunks)

    def forget_requests(self) -> None:
        """Save nothing more of the requests that run now."""
        self._requests.clear()

    # ---- each step ---------------------------------------------------------------------------------------------------

    def plan(self, output: SchedulerOutput) -> tuple[SavePlan, ...]:
        """Chunks that become complete in this step, and those of earlier ones whose time has come."""
        plans, self._late = self._late, []
        for request_id in output.preempted_req_ids or ():
            plans += self._preempted(request_id)
        computed = computed_before(output)
        for request_id, count in output.num_scheduled_tokens.items():
            saving = self._requests.get(request_id)
            if saving is not None:
                plans += self._step(saving, computed[request_id] + count, output)
        plans += [plan for offer in self._policy.due() for plan in self._plan(offer, over=True)]
        return tuple(plans)

    def _step(self, saving: _Saving, end: int, output: SchedulerOutput) -> list[SavePlan]:
        """One request's part of a step that ends with `end` tokens computed."""
        request = saving.chunks.request
        saving.num_final = min(end, request.num_tokens, *(() if self._save_decoded else (request.num_prompt_tokens,)))
        at_prompt_end = end >= request.num_prompt_tokens > saving.tail_end
        if saving.num_final // self._chunk_tokens <= saving.num_offered and not at_prompt_end:
            return []
        state = output.kv_connector_block_state
        table = state.get_block_ids(request.request_id) if state is not None else None
        if table is None:
            return []
        saving.table = table[0]
        plans = self._full(saving)
        if at_prompt_end:
            saving.tail_end = request.num_prompt_tokens
            plans += self._tail(saving, request.num_prompt_tokens)
        return plans

    def _full(self, saving: _Saving, over: bool = False, force: bool = False) -> list[SavePlan]:
        """Complete chunks that were not offered yet, as far as there is room."""
        plans: list[SavePlan] = []
        for chunk in saving.chunks.full(saving.num_final)[saving.num_offered :]:
            if not self._has_room:
                break
            plans += self._offer(saving, chunk, over, force)
            saving.num_offered += 1
        return plans

    def _tail(self, saving: _Saving, end: int, over: bool = False, force: bool = False) -> list[SavePlan]:
        """The whole blocks of the incomplete chunk that ends with `end` tokens."""
        chunk = saving.chunks.tail(end)
        return self._offer(saving, chunk, over, force) if chunk is not None and self._has_room else []

    def _offer(self, saving: _Saving, chunk: RankChunk, over: bool, force: bool) -> list[SavePlan]:
        first, last = chunk[0].first_token // self._block_size, chunk[0].end // self._block_size
        block_ids = tuple(saving.table[first:last])
        offer: Offer = (chunk, block_ids, tenant_of(saving.chunks.request))
        if self._is_there(chunk) or len(block_ids) < last - first or not (force or self._policy.wants(offer)):
            return []
        return self._plan(offer, over)

    def _plan(self, offer: Offer, over: bool) -> list[SavePlan]:
        if self._is_there(offer[0]) or not self._has_room:
            return []
        return [self._hold(offer, over, reserved=False)]

    def _hold(self, offer: Offer, over: bool, reserved: bool) -> SavePlan:
        chunk, block_ids, tenant = offer
        plan = SavePlan(
            save_id=next(self._ids),
            keys=tuple(key.key for key in chunk),
            block_ids=block_ids,
            first_token=chunk[0].first_token,
            num_tokens=chunk[0].num_tokens,
            tenant=tenant,
            reserved=reserved,
        )
        self._references.take(block_ids)
        self._pending[plan.save_id] = _Pending(held=list(block_ids), key=chunk[0].key, over=over)
        self._keys.add(chunk[0].key)
        self._num_held += len(block_ids)
        return plan

    def spill(self, chunks: list[RankChunk], table: list[int], tenant: str = "") -> list[int]:
        """Save these chunks of an ended request, whose references hold `table`, whatever policy and bounds say; ids of
        the saves. Also those that some tier of ours has: others may not read from it."""
        plans: list[SavePlan] = []
        for chunk in chunks:
            first, last = chunk[0].first_token // self._block_size, chunk[0].end // self._block_size
            plans.append(self._hold((chunk, tuple(table[first:last]), tenant), over=True, reserved=True))
        self._late += plans
        self._spilled.update({plan.save_id: None for plan in plans})
        return [plan.save_id for plan in plans]

    def spilled(self, save_ids: list[int]) -> bool | None:
        """Whether a tier has each of these; None: not all are over."""
        ends = [self._spilled.get(save_id, False) for save_id in save_ids]
        if None in ends:
            return None
        self.forget_spill(save_ids)
        return all(ends)

    def forget_spill(self, save_ids: list[int]) -> None:
        """Nobody asks any more what became of these."""
        for save_id in save_ids:
            self._spilled.pop(save_id, None)

    def _is_there(self, chunk: RankChunk) -> bool:
        return chunk[0].key in self._keys or self._mirror.has(chunk)

    @property
    def _has_room(self) -> bool:
        return len(self._pending) < self._max_pending and self._num_held < self._max_blocks

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _preempted(self, request_id: str) -> list[SavePlan]:
        """Its blocks were freed in this step: those not handed out again still hold its KV, and are saved, whatever
        the policy: it will ask for them."""
        saving = self._requests.get(request_id)
        if saving is None or isinstance(self._policy, Nothing):
            return []
        kept = list(itertools.takewhile(lambda block_id: self._references.kept([block_id]), saving.table))
        saving.num_final, saving.num_offered = min(saving.num_final, len(kept) * self._block_size), 0
        plans = self._full(saving, over=True, force=True)
        plans += self._tail(saving, saving.num_final, over=True, force=True)
        saving.num_offered, saving.tail_end, saving.table, saving.num_final = 0, 0, [], 0
        return plans

    def request_over(self, request: Request, table: list[int]) -> None:
        """Before vLLM frees the request's blocks; `table` is clipped to computed tokens."""
        saving = self._requests.pop(request.request_id, None)
        if saving is None:
            return
        if request.status.name in ENDED_WELL:
            saving.table = table
            limit = request.num_tokens - 1 if self._save_decoded else request.num_prompt_tokens
            saving.num_final = min(request.num_computed_tokens, limit)
            self._late += self._full(saving, over=True)
            if saving.num_final > saving.tail_end:
                self._late += self._tail(saving, saving.num_final, over=True)
            # More were offered than are final now where the last token stays out, or was preempted as it ended.
            self._count("dropped_saves", max(0, saving.num_final // self._chunk_tokens - saving.num_offered))
        mine = set(table)
        for pending in self._pending.values():
            pending.over = pending.over or not mine.isdisjoint(pending.held)

    def rank_saved(self, fact: Saved) -> None:
        """One rank has copied, or dropped, these chunks."""
        self._count("saved_bytes", fact.num_bytes)
        self._count("saved_chunks", len(fact.save_ids) - fact.num_dropped)
        self._count("dropped_saves", fact.num_dropped)
        for save_id in fact.save_ids:
            pending = self._pending.get(save_id)
            if pending is None:
                continue
            pending.ranks.add(fact.rank)
            pending.dropped = pending.dropped or bool(fact.num_dropped)
            if len(pending.ranks) == self._world_size:
                del self._pending[save_id]
                self._keys.discard(pending.key)
                self._num_held -= len(pending.held)
                self._references.give_back(pending.held)
                if save_id in self._spilled:
                    self._spilled[save_id] = not pending.dropped

    def _count(self, name: str, value: float) -> None:
        if value:
            self.counters[name] = self.counters.get(name, 0) + value

    # ---- seen from outside -------------------------------------------------------------------------------------------

    @property
    def must_step(self) -> bool:
        """Something waits for a step to go out with, or holds blocks that only a hook can return."""
        return bool(self._late or self._pending)

    @property
    def holds_blocks(self) -> bool:
        """Blocks of requests that are over come back soon: worth waiting for instead of preempting."""
        return any(pending.over for pending in self._pending.values())
