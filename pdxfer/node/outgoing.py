"""One transfer that leaves here as the sender keeps it: its prompt, its grant, what waits and what is done."""

from collections.abc import Callable
from dataclasses import dataclass, field

from pdxfer.node.plan import Area
from pdxfer.wire.messages import Grant

Ready = Callable[[], None] | None
"""Waits until the device has finished writing an area; None where it has."""


@dataclass(slots=True)
class Outgoing:
    """One transfer that leaves here."""

    transfer_id: str
    grant: Grant | None = None
    total_blocks: int = 0
    num_tokens: int = 0
    token_digest: bytes = b""
    codecs: tuple[str, ...] = ()
    """Allowed on the wire for its tenant."""
    waiting: list[tuple[Area, Ready]] = field(default_factory=list)
    """Final areas for which no grant is here yet."""
    deadline: float = float("inf")
    """By this host's monotonic clock."""
    num_cells_done: int = 0
    ending: str = ""
    """Why nothing more is sent; empty while sending."""

    @property
    def num_cells(self) -> int:
        """Blocks to send; cells are these times the layers."""
        return self.total_blocks - self.grant.first_block if self.grant else 0
