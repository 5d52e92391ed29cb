"""What the API says of operations: what was asked, how far each worker is, and what it really did."""

from dataclasses import dataclass, field
from typing import Any, Literal

from pdxfer.wire.manage import StoreVerb

State = Literal["running", "done", "partial", "failed", "cancelled"]
PartState = Literal["running", "done", "failed", "cancelled", "lost", "expired"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One worker's share of an operation."""

    engine_id: str
    rank: int
    state: PartState
    """lost: the engine left or fell silent. expired: nothing was heard by the deadline."""
    done: int = 0
    total: int = 0
    """0: not known yet."""
    result: dict[str, Any] | None = None
    """What the verb found or changed, as verified on that worker's store."""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation."""

    id: str
    verb: StoreVerb
    state: State
    """done: on every worker. partial: on some; `parts` says on which not and why. failed: on none."""
    done: int
    total: int
    created: float
    """Seconds since the epoch."""
    ended: float | None = None
    parts: list[Part] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Nothing changes any more."""
        return self.state != "running"

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        """`engine/rank` → result, of the workers that are done."""
        return {f"{part.engine_id}/{part.rank}": part.result for part in self.parts if part.result is not None}

    @property
    def errors(self) -> dict[str, str]:
        """`engine/rank` → why not."""
        return {f"{part.engine_id}/{part.rank}": part.error or part.state for part in self.parts if part.error}
