"""Small decisions of the tiered store, as plain data in, plain data out: when to leave a failing tier alone, and which
keys were seen before. Used by slot.py, writing.py, disk_local.py and shared_link.py; no I/O, no clock of their own, one
thread.
"""

from collections import OrderedDict
from enum import StrEnum

OPEN_AFTER = 3
"""Failures in a row after which a tier is not asked any more."""
PATIENCE_S = 0.05
"""A call that was given less than this and did not make it says nothing about the tier."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 4.0
"""Pauses double up to here, so a server that is back is found within 5 s."""


class BreakerState(StrEnum):
    """Whether a tier may be asked."""

    CLOSED = "closed"
    """Yes."""
    OPEN = "open"
    """No, it failed repeatedly."""
    PROBING = "probing"
    """One call is out to see whether it is back."""


class Breaker:
    """Counts one tier's failures in a row. `allows` before each call, then `succeeded` or `failed`."""

    def __init__(self) -> None:
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._until = 0.0
        self.state = BreakerState.CLOSED
        self.times_opened = 0

    def would_allow(self, now: float) -> bool:
        """What `allows` would say; changes nothing."""
        return self.state is BreakerState.CLOSED or now >= self._until

    def allows(self, now: float) -> bool:
        """Whether to call now. In the open state, one call per pause goes through as the probe."""
        if self.state is BreakerState.CLOSED:
            return True
        if now < self._until:
            return False
        self.state = BreakerState.PROBING
        self._until = now + self._pause_s
        return True

    def succeeded(self) -> None:
        """The medium answered (a miss is an answer)."""
        self._failures, self._pause_s = 0, FIRST_PAUSE_S
        self.state = BreakerState.CLOSED

    def failed(self, now: float) -> None:
        """It did not, or too late."""
        self._failures += 1
        if self.state is BreakerState.CLOSED:
            if self._failures >= OPEN_AFTER:
                self.state, self._until = BreakerState.OPEN, now + self._pause_s
                self.times_opened += 1
        elif self.state is BreakerState.PROBING:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self.state, self._until = BreakerState.OPEN, now + self._pause_s


class SecondSight:
    """Remembers the last `capacity` keys it was asked about: KV that is offered once is seldom asked for again."""

    def __init__(self, capacity: int = 65536) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def admits(self, key: bytes) -> bool:
        """Whether this key was seen before; it is now."""
        seen = key in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > self._capacity:
            self._seen.popitem(last=False)
        return seen
