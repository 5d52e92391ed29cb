"""The faults of a chaos run: which there are, a seeded order of them, and how one is done to a process group.

What is done to the link is in chaos_link.py, to the disk in chaos_disk.py.
"""

import asyncio
import os
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

PAUSE_S = (0.5, 4.0)
"""How long a stopped process stays stopped, a link cut: below and above what members notice (1.5 s)."""
GAP_S = (0.3, 1.5)
"""Between the end of one fault's recovery and the next fault."""
PROXY, ROUTER, STORE, LINK, DISK = "proxy", "router", "store", "link", "disk"
"""Targets that are no engine; engines are p0, p1 ... and d0, d1 ..."""


class Kind(StrEnum):
    """What is done to a process, to the link, or to the disk."""

    kill = "kill -9"
    pause = "SIGSTOP"
    restart = "SIGTERM"
    cut = "cut"
    cut_out = "cut one way, out,"
    """What the near side sends is lost."""
    cut_back = "cut one way, back,"
    """What the far side sends is lost."""
    slow = "throttled"
    full = "full"


_LINK = (Kind.cut, Kind.cut_out, Kind.cut_back, Kind.slow)
_PROCESS = (Kind.kill, Kind.pause, Kind.restart)
CUTS = _LINK[:3]


def kinds_of(target: str) -> tuple[Kind, ...]:
    """What can happen to it."""
    return {LINK: _LINK, DISK: (Kind.full,)}.get(target, _PROCESS)


def role_of(target: str) -> str:
    """Its name in the table."""
    return {"p": "prefill", "d": "decode"}[target[0]] if target[1:].isdigit() else target


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, decided before the run."""

    kind: Kind
    target: str
    """router, proxy, store, p0, d1 ..., link, disk."""
    gap_s: float
    """Wait before it."""
    pause_s: float = 0.0
    """Until it is undone, where it has an end: SIGCONT, the link whole again, room on the disk."""

    @property
    def ends_process(self) -> bool:
        """The process is started anew by the launcher."""
        return self.kind in (Kind.kill, Kind.restart)

    @property
    def ends_engine(self) -> bool:
        """An engine is started anew, which takes long."""
        return self.ends_process and self.target[1:].isdigit()

    def __str__(self) -> str:
        return f"{self.kind} {self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """One fault that was injected; times in event-loop seconds."""

    fault: Fault
    began: float
    ended: float
    """Killed, told to leave, continued, or undone."""
    whole: float
    """Everything was up, joined and paired again."""

    @property
    def recovery_s(self) -> float:
        """From the end of the fault to the whole cluster."""
        return self.whole - self.ended

    def touches(self, began: float, ended: float) -> bool:
        """Whether the cluster was hurt, or not whole again, at any time between these two."""
        return began <= self.whole and self.began <= ended


def may_meet(fault: Fault, down: str, engines: Sequence[str]) -> bool:
    """Whether this may come while the engine `down` starts again: one engine at a time, others of its role can serve
    meanwhile, and nothing takes the last decode engine."""
    if fault.ends_engine or fault.target == down or not any(e[0] == down[0] and e != down for e in engines):
        return False
    return down[0] == "p" or not (fault.target == LINK or role_of(fault.target) == role_of(down))


def plan_faults(
    targets: Sequence[str], count: int, seed: int, num_light: int = 1, only: Sequence[str] = ()
) -> Iterator[Fault]:
    """`count` faults. Every kind meets every target before any pair comes again; those that end no engine come
    `num_light` times meanwhile, if more than once then evenly between those that do. `only`: nothing but faults that
    have one of these texts in their name. Nothing at all if none has."""
    source = random.Random(seed)
    deck: list[tuple[Kind, str]] = []
    for _ in range(count):
        if not deck:
            deck = [(kind, target) for target in targets for kind in kinds_of(target)]
            deck = [pair for pair in deck if not only or any(text in " ".join(pair) for text in only)]
            deck += [pair for pair in deck if not _ends_engine(pair)] * (num_light - 1)
            source.shuffle(deck)
            if num_light > 1:
                deck = _spread([p for p in deck if _ends_engine(p)], [p for p in deck if not _ends_engine(p)])
            if not deck:
                return
        kind, target = deck.pop()
        pause_s = 0.0 if kind in (Kind.kill, Kind.restart) else source.uniform(*PAUSE_S)
        yield Fault(kind=kind, target=target, gap_s=source.uniform(*GAP_S), pause_s=pause_s)


def _ends_engine(pair: tuple[Kind, str]) -> bool:
    return Fault(kind=pair[0], target=pair[1], gap_s=0).ends_engine


def _spread(few: list[tuple[Kind, str]], many: list[tuple[Kind, str]]) -> list[tuple[Kind, str]]:
    """Both, an equal part of the many before each of the few; the last of the few is the very last."""
    found: list[tuple[Kind, str]] = []
    for number, pair in enumerate(few):
        found += [*many[number * len(many) // len(few) : (number + 1) * len(many) // len(few)], pair]
    return found or many


async def inject(fault: Fault, pid: int) -> None:
    """Do it to the process group that `pid` leads; SIGTERM to the leader alone, as the launcher does."""
    if fault.kind is Kind.kill:
        os.killpg(pid, signal.SIGKILL)
    elif fault.kind is Kind.restart:
        os.kill(pid, signal.SIGTERM)
    else:
        assert fault.kind is Kind.pause, fault
        os.killpg(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.pause_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGCONT)
