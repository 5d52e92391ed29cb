"""Where the parts of the router state put their actions and counts during one `handle`."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from pdxfer.router.events import Action, Happened, Log, Observed, Send
from pdxfer.router.members import Link
from pdxfer.wire.manage import StoreOpUpdate
from pdxfer.wire.messages import FromRouter, Served

CountName = Literal["answers", "refused", "ended"]
"""answers: pairing, local, busy. refused: messages by reason. ended: leases by outcome."""


_MAX_FLOWS = 16384


@dataclass(slots=True)
class Flow:
    """Transfers from one engine to another."""

    num_live: int = 0
    num_ended: int = 0
    num_failed: int = 0
    num_bytes: int = 0


class Outbox:
    """Collects actions; counts since start."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[CountName, str]] = Counter()
        self.num_tokens = 0
        """Prompt tokens that came over the wire, as decode engines reported them."""
        self.num_bytes = 0
        self.num_grants = 0
        self.flows: dict[tuple[str, str], Flow] = {}
        """By (prefill, decode), since start."""
        self._actions: list[Action] = []

    def take(self) -> list[Action]:
        """Actions since the last call."""
        actions, self._actions = self._actions, []
        return actions

    def send(self, message: FromRouter, *routes: bytes) -> None:
        """To these connections."""
        self._actions.append(Send(routes, message))

    def send_link(self, link: Link | None, message: FromRouter) -> None:
        """To a member's connection, if it has one."""
        if link is not None:
            self._actions.append(Send((link.route,), message))

    def log(self, level: Literal["info", "warning"], text: str) -> None:
        """A line for the operator."""
        self._actions.append(Log(level, text))

    def happened(self, kind: str, **detail: str) -> None:
        """An entry for the controller's list of events."""
        self._actions.append(Happened(kind, detail))

    def observed(self, engine_id: str, report: Served | StoreOpUpdate) -> None:
        """A report for the controller."""
        self._actions.append(Observed(engine_id, report))

    def flow(self, prefill: str, decode: str) -> Flow:
        """What moved between two engines; bounded, the oldest pair goes first."""
        flow = self.flows.get((prefill, decode))
        if flow is None:
            flow = self.flows[(prefill, decode)] = Flow()
            if len(self.flows) > _MAX_FLOWS:
                del self.flows[next(iter(self.flows))]
        return flow

    def count(self, name: CountName, value: str) -> None:
        """One more."""
        self.counts[(name, value)] += 1
