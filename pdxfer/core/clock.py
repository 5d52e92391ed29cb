"""The only place that reads the clock. Everything that waits or stamps takes a Clock, so tests use FakeClock."""

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks: `now` never goes back (deadlines), `wall` is comparable between processes (stamps)."""

    def now(self) -> float:
        """Monotonic seconds."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


SYSTEM_CLOCK: Clock = SystemClock()
