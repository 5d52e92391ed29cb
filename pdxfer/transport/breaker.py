"""When a kind of channel to one peer may be tried again: pure arithmetic on the caller's clock."""

import random

FIRST_S = 0.2
LONGEST_S = 10.0
STEADY_S = 10.0
"""A channel that lived this long was good: its end starts a new count."""


class Breaker:
    """Counts failures in a row; each one doubles the pause, with jitter so that peers do not retry in step."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.num_failures = 0
        self.open_until = 0.0
        self.reason = ""

    def allows(self, now: float) -> bool:
        """Whether an attempt may be made."""
        return now >= self.open_until

    def refused(self, now: float, reason: str) -> None:
        """An attempt to connect failed."""
        self.num_failures += 1
        self._pause(now, reason)

    def broke(self, now: float, lived_s: float, reason: str) -> None:
        """A working channel died. After a steady life the same kind is tried again at once, before any other."""
        self.num_failures = 1 if lived_s >= STEADY_S else self.num_failures + 1
        if self.num_failures == 1:
            self.open_until, self.reason = now, reason
        else:
            self._pause(now, reason)

    def reset(self) -> None:
        """The peer's address changed: what failed before says nothing now."""
        self.num_failures, self.open_until, self.reason = 0, 0.0, ""

    def _pause(self, now: float, reason: str) -> None:
        longest = min(LONGEST_S, FIRST_S * 2.0 ** min(self.num_failures - 1, 16))
        self.open_until = now + longest * self._rng.uniform(0.5, 1.0)
        self.reason = reason
