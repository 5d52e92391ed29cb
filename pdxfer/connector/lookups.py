"""What the tiers have of each waiting request: answered from the mirror at once, from slow tiers within a deadline.

EngineCore thread only; never waits. A request that nothing is known of costs its chunk keys and as many set look-ups.
"""

import itertools
from dataclasses import dataclass, field

from pdxfer.connector.chunks import Grid, PromptChunks, RankChunk
from pdxfer.connector.compat import Request
from pdxfer.connector.member import Member
from pdxfer.connector.mirror import Mirror
from pdxfer.core.clock import Clock
from pdxfer.wire.store_facts import Find, Found, Prefetch

MAX_LOADS = 3
"""Loads of one request between preemptions: a key that is said to be there and is not must not loop for ever."""


@dataclass(slots=True)
class Lookup:
    """One request's state."""

    chunks: PromptChunks
    find_id: str = ""
    """Names the question to slow tiers; empty: none is out."""
    find_from: int = 0
    """Chunks before this one were in the mirror when slow tiers were asked for the others."""
    asked: list[RankChunk] = field(default_factory=list)
    """What slow tiers were asked for."""
    found: dict[int, int] = field(default_factory=dict)
    """Rank → leading chunks of `asked` it has."""
    deadline: float = 0.0
    claimed: list[RankChunk] = field(default_factory=list)
    """The last answer given to vLLM."""
    num_loads: int = 0
    num_preemptions: int = 0
    fetch_id: str = ""
    prefetching: bool = False


class Lookups:
    """All requests that may load."""

    def __init__(
        self, grid: Grid, mirror: Mirror, member: Member, clock: Clock, *, slow_tiers: bool, timeout_s: float
    ) -> None:
        self._grid, self._mirror, self._member, self._clock = grid, mirror, member, clock
        self._slow_tiers, self._timeout_s = slow_tiers, timeout_s
        self._lookups: dict[str, Lookup] = {}
        self._by_find: dict[str, Lookup] = {}
        self._fresh: set[str] = set()
        """Requests that vLLM has not asked for yet."""
        self._ids = itertools.count(1)

    def begin(self, request: Request) -> PromptChunks | None:
        """A request has arrived: ask for what the mirror does not know. None: ranks are not ready."""
        if not self._grid.is_ready:
            return None
        lookup = Lookup(PromptChunks(request, self._grid))
        self._lookups[request.request_id] = lookup
        self._fresh.add(request.request_id)
        self._ask(lookup)
        return lookup.chunks

    def clear(self) -> None:
        """Forget all requests."""
        for request_id in list(self._lookups):
            self.over(request_id)

    def chunks(self, request_id: str) -> PromptChunks | None:
        """Its chunk keys."""
        lookup = self._lookups.get(request_id)
        return lookup.chunks if lookup is not None else None

    def over(self, request_id: str) -> None:
        """The request has ended."""
        lookup = self._lookups.pop(request_id, None)
        self._fresh.discard(request_id)
        if lookup is not None:
            self._by_find.pop(lookup.find_id, None)
            self._prefetch(lookup, [])

    def refresh(self, request_id: str) -> None:
        """Others may have stored some of it since it arrived: ask slow tiers again."""
        lookup = self._lookups.get(request_id)
        if lookup is not None:
            self._ask(lookup)

    def found(self, fact: Found) -> None:
        """A rank's answer."""
        lookup = self._by_find.get(fact.find_id)
        if lookup is not None:
            lookup.found[fact.rank] = fact.num_keys

    def answer(self, request: Request) -> list[RankChunk] | None:
        """The leading chunks that all ranks have of this request now; None: not known yet, ask again."""
        lookup = self._lookups.get(request.request_id)
        if lookup is None:
            return []
        self._fresh.discard(request.request_id)
        if request.num_preemptions > lookup.num_preemptions:
            lookup.num_preemptions, lookup.num_loads = request.num_preemptions, 0
            self._ask(lookup)
        if lookup.num_loads >= MAX_LOADS:
            return []
        if self._is_open(lookup):
            return None
        lookup.claimed = self._near(lookup)
        if len(lookup.claimed) < lookup.find_from + self._num_found(lookup):
            lookup.claimed = lookup.chunks.full(request.num_tokens)[: lookup.find_from] + lookup.asked
            lookup.claimed = lookup.claimed[: lookup.find_from + self._num_found(lookup)]
        return lookup.claimed

    def claimed(self, request_id: str) -> list[RankChunk]:
        """The answer vLLM acts on; a load of it begins."""
        lookup = self._lookups.get(request_id)
        if lookup is None:
            return []
        lookup.num_loads += 1
        self._prefetch(lookup, [])
        return lookup.claimed

    def step_over(self) -> None:
        """A step was scheduled: requests that it had no place for wait, and ranks bring their chunks into memory."""
        for request_id in self._fresh:
            lookup = self._lookups[request_id]
            self._prefetch(lookup, self._near(lookup))
        self._fresh.clear()

    def after(self, request_id: str, num_tokens: int) -> list[RankChunk]:
        """Chunks that may be there beyond `num_tokens` tokens, whether slow tiers were asked for them or not."""
        lookup = self._lookups.get(request_id)
        if lookup is None:
            return []
        every = lookup.chunks.full(lookup.chunks.request.num_prompt_tokens)
        known = every if self._slow_tiers else self._near(lookup)
        return [chunk for chunk in known if chunk[0].end > num_tokens]

    @property
    def waiting(self) -> bool:
        """Some answer is still to come."""
        return any(self._is_open(lookup) for lookup in self._by_find.values())

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _near(self, lookup: Lookup) -> list[RankChunk]:
        """Leading chunks in the mirror, an incomplete last one included."""
        every = lookup.chunks.full(lookup.chunks.request.num_tokens)
        near = list(itertools.takewhile(self._mirror.has, every))
        tails = lookup.chunks.tails(near[-1] if near else None)
        return near + list(itertools.islice(filter(self._mirror.has, tails), 1))

    def _ask(self, lookup: Lookup) -> None:
        """Slow tiers, for what is not near."""
        self._by_find.pop(lookup.find_id, None)
        lookup.found, lookup.asked, lookup.find_from, lookup.find_id = {}, [], 0, ""
        if not self._slow_tiers:
            return
        request = lookup.chunks.request
        near = list(itertools.takewhile(self._mirror.has, lookup.chunks.full(request.num_tokens)))
        asked = lookup.chunks.full(request.num_tokens)[len(near) :]
        tail = lookup.chunks.tail(request.num_tokens)
        asked += [tail] if tail is not None else []
        if not asked:
            return
        lookup.find_id, lookup.find_from, lookup.asked = f"find-{next(self._ids)}", len(near), asked
        lookup.deadline = self._clock.now() + self._timeout_s
        self._by_find[lookup.find_id] = lookup
        for rank in range(self._grid.world_size):
            keys = [chunk[rank].key for chunk in asked]
            self._member.tell_worker(rank, Find(find_id=lookup.find_id, keys=keys, timeout_s=self._timeout_s))

    def _prefetch(self, lookup: Lookup, near: list[RankChunk]) -> None:
        """Let ranks bring these chunks into memory; an empty list cancels."""
        if not near and not lookup.prefetching:
            return
        lookup.fetch_id = lookup.fetch_id or f"fetch-{next(self._ids)}"
        for rank in range(self._grid.world_size):
            keys = [chunk[rank].key for chunk in near]
            self._member.tell_worker(rank, Prefetch(find_id=lookup.fetch_id, keys=keys, on=bool(near)))
        lookup.prefetching = bool(near)

    def _is_open(self, lookup: Lookup) -> bool:
        return (
            bool(lookup.find_id) and len(lookup.found) < self._grid.world_size and self._clock.now() < lookup.deadline
        )

    def _num_found(self, lookup: Lookup) -> int:
        """Leading chunks of `asked` on all ranks; 0 when some rank did not answer in time."""
        complete = len(lookup.found) == self._grid.world_size
        return min(lookup.found.values()) if complete and lookup.asked else 0
