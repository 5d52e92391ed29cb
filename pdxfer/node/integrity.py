"""Looks now and then whether the store's tiers add up: arenas without gaps, indexes that agree, no reference lost.

For `health` (the heartbeat's `problems`). Runs on the store's loop, between its other work. What is wrong twice in a
row is told: a look may fall between two steps of another thread.
"""

import logging
from collections.abc import Callable

from pdxfer.core.clock import Clock
from pdxfer.store.runtime import StoreThread
from pdxfer.store.tiered import TieredStore

log = logging.getLogger(__name__)

EVERY_S = 30.0


class Integrity:
    """Of one rank's store. `problems` from the router client's thread."""

    def __init__(self, thread: StoreThread, clock: Clock, every_s: float = EVERY_S) -> None:
        self._thread, self._clock, self._every_s = thread, clock, every_s
        self._next = 0.0
        self._last: set[str] = set()
        self._told: list[str] = []

    def problems(self) -> list[str]:
        """Of the last looks; begins another one when it is time."""
        if self._clock.now() >= self._next:
            self._next = self._clock.now() + self._every_s
            self._thread.call_soon(self._look)
        return list(self._told)

    def _look(self, store: TieredStore) -> None:
        found: dict[str, str] = {}
        for slot in store.slots:
            check: Callable[[], None] | None = getattr(slot.tier, "check", None)
            if check is None:
                continue
            try:
                check()
            except AssertionError as error:
                found[slot.name] = f"tier {slot.name} does not add up: {error}"
        confirmed = [problem for name, problem in found.items() if name in self._last]
        if confirmed and not self._told:
            log.error("%s: please report this; restart the engine before it spreads", "; ".join(confirmed))
        self._last, self._told = set(found), confirmed
