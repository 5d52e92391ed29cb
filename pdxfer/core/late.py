"""A timer that runs while a client owes us the rest of a request. Event-loop thread only."""

import asyncio
from collections.abc import Callable


class Late:
    """Calls `cut_off` once if it is not stopped within `limit_s` of its start."""

    __slots__ = ("_cut_off", "_limit_s", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float, cut_off: Callable[[], object]) -> None:
        self._loop, self._limit_s, self._cut_off = loop, limit_s, cut_off
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Nothing if it runs: what drips does not win time."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._limit_s, self._fire)

    def stop(self) -> None:
        """It came in time, or the connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        self._cut_off()
