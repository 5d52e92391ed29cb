"""A clock that stands still until a test moves it."""


class FakeClock:
    """Implements core.clock.Clock. Both clocks advance together, but for `shift_wall`."""

    def __init__(self, now: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        self._now, self._wall = now, wall

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._wall

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        assert seconds >= 0, seconds
        self._now += seconds
        self._wall += seconds

    def shift_wall(self, seconds: float) -> None:
        """Somebody sets the time of day, so much later or (negative) earlier."""
        self._wall += seconds
