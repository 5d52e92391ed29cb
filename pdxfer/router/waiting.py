"""Requests that wait for decode capacity: bounded, fair by tenant (round robin), then by age.

A request that fits may overtake one that does not, and none waits for those of another model. Each overtaking is
counted at the oldest request; RouterState keeps an engine free for it once there were too many, so a big request waits
but never starves.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pdxfer.wire.messages import Pair

_LOOK_AHEAD = 8
"""Requests of one tenant for one model that are tried per turn."""
_MAX_MISSES = 32
"""Requests for a model tried in vain before `place` gives it up until capacity changes again."""

Key = tuple[bytes, str]
"""Proxy connection and request id."""


@dataclass(slots=True, kw_only=True)
class Waiting:
    """One Pair that has no answer yet."""

    proxy: bytes
    pair: Pair
    since: float
    deadline: float
    bypasses: int = 0
    """Requests placed while this one was the oldest."""

    @property
    def key(self) -> Key:
        return (self.proxy, self.pair.request_id)


class WaitingQueue:
    """The queue. It decides the order; whether something fits is the caller's `try_place`."""

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len
        self._by_age: OrderedDict[Key, Waiting] = OrderedDict()
        self._tenants: OrderedDict[str, OrderedDict[Key, Waiting]] = OrderedDict()
        self._models: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._by_age)

    def __contains__(self, key: Key) -> bool:
        return key in self._by_age

    def get(self, key: Key) -> Waiting | None:
        """The request if it waits."""
        return self._by_age.get(key)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(list(self._by_age.values()))

    @property
    def oldest(self) -> Waiting | None:
        """Whoever waits longest."""
        return next(iter(self._by_age.values()), None)

    def add(self, waiting: Waiting) -> Waiting | None:
        """Queue one. If full, returns who must go: the newest of the tenant with most, or `waiting` itself."""
        crowded_out = None
        if len(self._by_age) >= self.max_len:
            crowded = max(self._tenants.values(), key=len)
            if len(crowded) <= 1 + len(self._tenants.get(waiting.pair.tenant, ())):
                return waiting
            crowded_out = next(reversed(crowded.values()))
            self.remove(crowded_out)
        self._by_age[waiting.key] = waiting
        self._tenants.setdefault(waiting.pair.tenant, OrderedDict())[waiting.key] = waiting
        self._models[waiting.pair.model] += 1
        return crowded_out

    def remove(self, waiting: Waiting) -> None:
        """Take one out."""
        del self._by_age[waiting.key]
        mine = self._tenants[waiting.pair.tenant]
        del mine[waiting.key]
        if not mine:
            del self._tenants[waiting.pair.tenant]
        self._models[waiting.pair.model] -= 1
        if not self._models[waiting.pair.model]:
            del self._models[waiting.pair.model]

    def expired(self, now: float) -> list[Waiting]:
        """Those whose deadline has passed; the caller removes and answers them."""
        return [waiting for waiting in self._by_age.values() if waiting.deadline <= now]

    def place(self, try_place: Callable[[Waiting], bool]) -> None:
        """Offer capacity in fair order. `try_place` answers the request and returns True, or returns False."""
        misses: Counter[str] = Counter()
        idle_turns = 0
        while self._tenants and idle_turns < len(self._tenants):
            tenant = next(iter(self._tenants))
            self._tenants.move_to_end(tenant)
            idle_turns += 1
            for waiting in self._candidates(tenant, misses):
                if try_place(waiting):
                    self._note_bypass(waiting)
                    self.remove(waiting)
                    idle_turns = 0
                    break
                misses[waiting.pair.model] += 1

    def _candidates(self, tenant: str, misses: Counter[str]) -> list[Waiting]:
        """A tenant's oldest requests for each model that was not tried in vain too often."""
        found: list[Waiting] = []
        num_found: Counter[str] = Counter()
        full = {model for model in self._models if misses[model] >= _MAX_MISSES}
        for waiting in self._tenants[tenant].values():
            if len(full) == len(self._models):
                break
            model = waiting.pair.model
            if model not in full:
                found.append(waiting)
                num_found[model] += 1
                if num_found[model] == _LOOK_AHEAD:
                    full.add(model)
        return found

    def note_overtaken(self) -> None:
        """A request was placed without queueing."""
        if self.oldest is not None:
            self.oldest.bypasses += 1

    def _note_bypass(self, placed: Waiting) -> None:
        oldest = self.oldest
        if oldest is not None and oldest is not placed:
            oldest.bypasses += 1
