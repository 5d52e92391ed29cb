"""What the sender and its lanes say to each other: jobs one way, reports the other. Values only."""

from collections.abc import Callable
from dataclasses import dataclass

from pdxfer.node.plan import Area


@dataclass(slots=True)
class Job:
    """Areas of one transfer for one peer that wait for the lane; layers may grow until it is taken."""

    transfer_id: str
    epoch: int
    incarnation: int
    """Of the engine that granted: its next life must not get these bytes."""
    generation: int
    """That the grant names: a channel with a larger one is too young for it."""
    area: Area
    target_blocks: tuple[int, ...]
    ready: Callable[[], None] | None
    """Waits until the device has finished writing the area (CUDA event); None on CPU."""
    codecs: tuple[str, ...] = ()
    """Which may be used on the wire for this prompt's tenant."""
    num_cells: int = 0
    """(block, layer) cells of the whole transfer."""
    num_tokens: int = 0
    """Of the grant."""
    deadline: float = float("inf")
    """Of the transfer, by this host's monotonic clock."""


@dataclass(frozen=True, slots=True)
class AreaDone:
    """These cells were written; their source is free."""

    transfer_id: str
    epoch: int
    num_cells: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class UnitLost:
    """One unit could not be delivered although the channel lives (digest, bounds, read error), or is not worth it."""

    transfer_id: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class LaneIdle:
    """Nothing of this transfer is posted or queued here any more (answer to `drop`)."""

    transfer_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class LaneFailed:
    """The channel these transfers used died; nothing of ours leaves over it any more."""

    transfers: frozenset[tuple[str, int]]
    """(transfer, epoch)"""
    reason: str


Report = AreaDone | UnitLost | LaneIdle | LaneFailed
