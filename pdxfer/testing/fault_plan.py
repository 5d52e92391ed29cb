"""What goes wrong in one simulated schedule, decided by its seed alone: fates of messages and writes, and accidents.

Used by the explorer's world (sim_world.py). Rates differ from seed to seed: some schedules are calm, some are hopeless.
"""

import enum
import random
from collections import Counter
from dataclasses import dataclass

ACCIDENTS = ("crash", "hang", "partition", "cut", "abort")
RATES = (0.0, 0.0, 0.02, 0.1, 0.3)
QUICK_S, SLOW_S = 0.02, 1.5
MAX_STEPS = 250
"""An accident happens before one of the first so many events."""


class Fate(enum.Enum):
    """What becomes of one message or write; it may be several."""

    LOST = "lost"
    CORRUPT = "corrupt"
    DUPLICATED = "duplicated"
    DELAYED = "delayed"


@dataclass(frozen=True, slots=True)
class Accident:
    """Before event number `step`, something happens to a party."""

    step: int
    kind: str
    victim: int
    """Taken modulo the number of parties it can happen to."""
    seconds: float
    """How long it lasts."""


class FaultPlan:
    """The faults of one seed. Once `calm`, nothing goes wrong any more."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._rates = {fate: rng.choice(RATES) for fate in Fate}
        self.accidents = sorted(
            (
                Accident(rng.randrange(MAX_STEPS), rng.choice(ACCIDENTS), rng.randrange(12), rng.uniform(0.05, 2.5))
                for _ in range(rng.choice((0, 1, 1, 2, 3, 5)))
            ),
            key=lambda accident: accident.step,
        )
        self.calm = False
        self.counts: Counter[str] = Counter()
        """Faults injected, by name."""

    def fates(self) -> set[Fate]:
        """Of the next message or write."""
        if self.calm:
            return set()
        fates = {fate for fate, rate in self._rates.items() if rate and self._rng.random() < rate}
        for fate in fates:
            self.counts[fate.value] += 1
        return fates

    def delay(self, fates: set[Fate]) -> float:
        """Seconds on the way. Quick ones differ too, which reorders what was sent together."""
        return self._rng.uniform(0.0005, SLOW_S if Fate.DELAYED in fates else QUICK_S)
