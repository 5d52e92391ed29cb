"""Where the parts of the router state put their actions and counts during one `handle`."""

from collections import Counter
from typing import Literal

from pdxfer.router.events import Action, Happened, Log, Send
from pdxfer.router.members import Link
from pdxfer.wire.messages import FromRouter

CountName = Literal["answers", "refused", "ended"]
"""answers: pairing, local, busy. refused: messages by reason. ended: leases by outcome."""


class Outbox:
    """Collects actions; counts since start."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[CountName, str]] = Counter()
        self.num_tokens = 0
        """Prompt tokens that came over the wire, as decode engines reported them."""
        self.num_bytes = 0
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

    def count(self, name: CountName, value: str) -> None:
        """One more."""
        self.counts[(name, value)] += 1
