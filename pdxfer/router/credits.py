"""Credit: how many blocks a decode engine can still promise. One object an engine, no clock, no I/O.

    credit = free blocks of its last report − blocks of pairings that this report cannot yet include, never below 0

A pairing's blocks are *reserved* until a report includes them. The engine allocates at its Grant (or never), and
reports what the scheduler last knew; so a reservation is *settled* with the time from which reports include it, and
the first report at or after that time drops it. A pairing that ends before any Grant is released at once: its blocks
were never taken.
"""

REPORT_LAG_S = 0.1
"""A report may be this much older than the messages sent before it: the scheduler publishes once a step."""


class Credit:
    """Blocks of one decode engine in one life."""

    def __init__(self, free_blocks: int) -> None:
        self._free = max(0, free_blocks)
        self.limit: int | None = None
        """An operator's bound on what may be promised; None: the engine's own figure alone."""
        self._reserved: dict[str, int] = {}
        self._settled: dict[str, float] = {}
        self._sum = 0

    @property
    def available(self) -> int:
        """Blocks a new pairing may take."""
        free = self._free if self.limit is None else min(self._free, self.limit)
        return max(0, free - self._sum)

    @property
    def reserved(self) -> int:
        """Blocks promised and not yet in a report."""
        return self._sum

    def report(self, free_blocks: int, now: float) -> None:
        """The engine's own figure arrived."""
        self._free = max(0, free_blocks)
        for key in [key for key, since in self._settled.items() if since <= now]:
            self.release(key)

    def reserve(self, key: str, num_blocks: int) -> None:
        """A pairing was made."""
        assert key not in self._reserved, f"{key} holds a reservation already"
        self._reserved[key] = num_blocks
        self._sum += num_blocks

    def settle(self, key: str, since: float) -> None:
        """Reports from `since` on include this pairing's blocks (or that they are free again)."""
        if key in self._reserved:
            self._settled.setdefault(key, since)

    def release(self, key: str) -> None:
        """The pairing takes no blocks. Unknown keys are ignored: a report may have dropped them."""
        self._sum -= self._reserved.pop(key, 0)
        self._settled.pop(key, None)

    def check(self) -> None:
        """Integrity, for tests."""
        assert self._sum == sum(self._reserved.values()) and self._sum >= 0
        assert self._settled.keys() <= self._reserved.keys()
