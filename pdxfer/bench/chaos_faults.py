"""The faults of a chaos run: which there are, a seeded order of them, and how one is done to a process group."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

PAUSE_S = (0.5, 4.0)
"""How long a stopped process stays stopped: below and above what members notice (1.5 s)."""
GAP_S = (0.3, 1.5)
"""Between the end of one fault's recovery and the next fault."""


class Kind(StrEnum):
    """What is done to a process."""

    kill = "kill -9"
    pause = "SIGSTOP"
    restart = "SIGTERM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, decided before the run."""

    kind: Kind
    target: str
    """Name of the process: router, p0, d1 ..."""
    gap_s: float
    """Wait before it."""
    pause_s: float = 0.0
    """SIGSTOP: until SIGCONT."""

    @property
    def ends_process(self) -> bool:
        """The process is started anew by the launcher."""
        return self.kind is not Kind.pause


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """One fault that was injected; times in event-loop seconds."""

    fault: Fault
    began: float
    ended: float
    """Killed, told to leave, or continued."""
    whole: float
    """Everything was up, joined and paired again."""

    @property
    def recovery_s(self) -> float:
        """From the end of the fault to the whole cluster."""
        return self.whole - self.ended

    def touches(self, began: float, ended: float) -> bool:
        """Whether the cluster was hurt, or not whole again, at any time between these two."""
        return began <= self.whole and self.began <= ended


def plan_faults(targets: Sequence[str], count: int, seed: int) -> Iterator[Fault]:
    """`count` faults. Every kind meets every target before any pair comes again."""
    source = random.Random(seed)
    deck: list[tuple[Kind, str]] = []
    for _ in range(count):
        if not deck:
            deck = [(kind, target) for kind in Kind for target in targets]
            source.shuffle(deck)
        kind, target = deck.pop()
        pause_s = source.uniform(*PAUSE_S) if kind is Kind.pause else 0.0
        yield Fault(kind=kind, target=target, gap_s=source.uniform(*GAP_S), pause_s=pause_s)


async def inject(fault: Fault, pid: int) -> None:
    """Do it to the process group that `pid` leads; SIGTERM to the leader alone, as the launcher does."""
    if fault.kind is Kind.kill:
        os.killpg(pid, signal.SIGKILL)
    elif fault.kind is Kind.restart:
        os.kill(pid, signal.SIGTERM)
    else:
        os.killpg(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.pause_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGCONT)
