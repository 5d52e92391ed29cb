"""Which value goes first: eviction policies as small state machines over keys. No clock, no I/O, one thread.

A tier tells what was added, used and removed, and asks `evict` for a victim, naming keys that must stay for now
(leased). Calls are O(1) amortised (lfu: O(log ranks)), plus the blocked keys met. Checked against slow references.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from pdxfer.config.store import Eviction

Blocked = Callable[[bytes], bool]


class Policy(Protocol):
    """Order of eviction over the keys it was told of."""

    def added(self, key: bytes, num_bytes: int) -> None:
        """A value came (its key is not known at this time)."""
        ...

    def used(self, key: bytes) -> None:
        """It was read. Unknown keys are ignored."""
        ...

    def removed(self, key: bytes) -> None:
        """It went for another reason than eviction, or is pinned. Unknown keys are ignored."""
        ...

    def evict(self, blocked: Blocked) -> bytes | None:
        """Forget and return the value that goes next, passing over blocked ones; None: all are."""
        ...

    def __len__(self) -> int: ...


class Lru:
    """Least recently used first."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def added(self, key: bytes, num_bytes: int) -> None:
        self._order[key] = None

    def used(self, key: bytes) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    def removed(self, key: bytes) -> None:
        self._order.pop(key, None)

    def evict(self, blocked: Blocked) -> bytes | None:
        victim = next((key for key in self._order if not blocked(key)), None)
        if victim is not None:
            del self._order[victim]
        return victim


class Oldest(Lru):
    """First stored goes first, used or not: the policy `ttl` (values expire in the order they came)."""

    def used(self, key: bytes) -> None:
        return


class Lfu:
    """Least frequently used first, least recently among equals, with dynamic aging: a value's rank is its uses plus the
    rank of the last victim when it was last used, so what was popular long ago does not stay for ever."""

    def __init__(self) -> None:
        self._uses: dict[bytes, int] = {}
        self._ranks: dict[bytes, int] = {}
        self._keys: dict[int, OrderedDict[bytes, None]] = {}
        self._heap: list[int] = []
        """Ranks in `_keys`, and some that are gone."""
        self._age = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def added(self, key: bytes, num_bytes: int) -> None:
        self._uses[key] = 1
        self._place(key, self._age + 1)

    def used(self, key: bytes) -> None:
        if key in self._ranks:
            self._leave(key)
            self._uses[key] += 1
            self._place(key, self._age + self._uses[key])

    def removed(self, key: bytes) -> None:
        if key in self._ranks:
            self._leave(key)
            del self._uses[key]

    def evict(self, blocked: Blocked) -> bytes | None:
        passed: list[int] = []
        victim: bytes | None = None
        while self._heap and victim is None:
            rank = heapq.heappop(self._heap)
            if keys := self._keys.get(rank):
                passed.append(rank)
                victim = next((key for key in keys if not blocked(key)), None)
        for rank in passed:
            heapq.heappush(self._heap, rank)
        if victim is not None:
            self._age = max(self._age, self._ranks[victim])
            self.removed(victim)
        return victim

    def _place(self, key: bytes, rank: int) -> None:
        self._ranks[key] = rank
        if rank not in self._keys:
            self._keys[rank] = OrderedDict()
            heapq.heappush(self._heap, rank)
        self._keys[rank][key] = None

    def _leave(self, key: bytes) -> None:
        rank = self._ranks.pop(key)
        keys = self._keys[rank]
        del keys[key]
        if not keys:
            del self._keys[rank]


class S3Fifo:
    """Three queues (Yang et al., SOSP 2023): new values pass through `small`, a tenth of the bytes; what is used twice
    there, or comes again while its key is still a ghost, lives in `main`, where used values get further rounds."""

    SMALL_FRACTION = 0.1
    MOST_USES = 3

    def __init__(self) -> None:
        self._small: OrderedDict[bytes, int] = OrderedDict()
        self._main: OrderedDict[bytes, int] = OrderedDict()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._uses: dict[bytes, int] = {}
        self._small_bytes = 0
        self._main_bytes = 0

    def __len__(self) -> int:
        return len(self._uses)

    def added(self, key: bytes, num_bytes: int) -> None:
        self._uses[key] = 0
        if key in self._ghosts:
            del self._ghosts[key]
            self._enter_main(key, num_bytes)
        else:
            self._small[key] = num_bytes
            self._small_bytes += num_bytes

    def used(self, key: bytes) -> None:
        if key in self._uses:
            self._uses[key] = min(self._uses[key] + 1, self.MOST_USES)

    def removed(self, key: bytes) -> None:
        if key in self._uses:
            del self._uses[key]
            self._small_bytes -= self._small.pop(key, 0)
            self._main_bytes -= self._main.pop(key, 0)

    def evict(self, blocked: Blocked) -> bytes | None:
        passed: list[tuple[OrderedDict[bytes, int], bytes, int]] = []
        victim = self._next_victim(blocked, passed)
        for queue, key, num_bytes in reversed(passed):
            queue[key] = num_bytes
            queue.move_to_end(key, last=False)
        return victim

    def _next_victim(self, blocked: Blocked, passed: list[tuple[OrderedDict[bytes, int], bytes, int]]) -> bytes | None:
        """Turns the queues until a value falls out. Blocked ones are set aside in `passed`, to go back in front."""
        while self._small or self._main:
            total = self._small_bytes + self._main_bytes
            from_small = bool(self._small) and (not self._main or self._small_bytes >= self.SMALL_FRACTION * total)
            queue = self._small if from_small else self._main
            key, num_bytes = queue.popitem(last=False)
            if blocked(key):
                passed.append((queue, key, num_bytes))
            elif from_small and self._uses[key] > 1:
                self._small_bytes -= num_bytes
                self._uses[key] = 0
                self._enter_main(key, num_bytes)
            elif not from_small and self._uses[key] > 0:
                self._uses[key] -= 1
                self._main[key] = num_bytes
            else:
                self._forget(key, num_bytes, from_small)
                return key
        return None

    def _enter_main(self, key: bytes, num_bytes: int) -> None:
        self._main[key] = num_bytes
        self._main_bytes += num_bytes

    def _forget(self, key: bytes, num_bytes: int, from_small: bool) -> None:
        del self._uses[key]
        if not from_small:
            self._main_bytes -= num_bytes
            return
        self._small_bytes -= num_bytes
        self._ghosts[key] = None
        while len(self._ghosts) > max(1, len(self._uses)):
            self._ghosts.popitem(last=False)


_POLICIES: dict[Eviction, Callable[[], Policy]] = {"lru": Lru, "lfu": Lfu, "s3fifo": S3Fifo, "ttl": Oldest}


def new_policy(name: Eviction) -> Policy:
    """A policy that knows no keys yet."""
    return _POLICIES[name]()
