"""One grant of ours as the receiver keeps it: what has landed, who writes, and how its end stands. No locks, no I/O."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdxfer.node.staging_ring import Key
from pdxfer.transport.base import PeerId, UnitHeader
from pdxfer.wire.halves import Expect

Connections = frozenset[tuple[str, object]]
"""Of peers to us: kind and token; see Endpoint.connections."""


@dataclass(slots=True)
class Incoming:
    """One grant of ours."""

    expect: Expect
    landed: npt.NDArray[np.bool_]
    """Shape [blocks of the grant, layers]."""
    claimed_cells: npt.NDArray[np.bool_]
    """Same shape: claimed once, so no unit is written twice."""
    connections: Connections
    """Of its writer when it was given out. All of it comes over one of them: the sender takes the channel that is open
    when the Grant arrives, and keeps it."""
    peer: PeerId | None = None
    """Who writes; known with the first claim."""
    channel: str = ""
    """Kind of channel it comes over; known with the first claim."""
    claims: int = 0
    """Writes under way here (channels whose last hop is ours)."""
    num_frames: int = 0
    """Of the claims, those of frames: their bytes come into a slot, and the staging's fence keeps them there."""
    num_units: int = 0
    num_bytes: int = 0
    revoked: str = ""
    """Why; empty while units are welcome."""
    drain_by: float = 0.0
    """After this the peer's channels are fenced."""
    told: bool = False
    """Abort has gone out wherever the peer is connected; only then can the grant count as quiet."""
    pushed: bool = False
    """The peer has a channel over which it writes by itself (nixl): quiet only when it has stopped."""
    peer_stopped: bool = False
    """The peer has said that it writes no more, or cannot any more."""
    all_sent: bool = False
    """The peer says that every unit has left; what is not here once its frames are decoded is missing."""

    @property
    def key(self) -> Key:
        """What it goes by."""
        return self.expect.transfer_id, self.expect.epoch

    def cells(self, header: UnitHeader) -> npt.NDArray[np.bool_]:
        """The part of `landed` that a unit covers; a view."""
        return self.landed[self._area(header)]

    def claimed(self, header: UnitHeader) -> npt.NDArray[np.bool_]:
        """The same part of `claimed_cells`."""
        return self.claimed_cells[self._area(header)]

    def _area(self, header: UnitHeader) -> tuple[slice, slice]:
        at = header.first_block - self.expect.first_block
        layers = slice(header.first_layer, header.first_layer + header.num_layers)
        return slice(at, at + header.num_blocks), layers

    def can_come(self, now: Connections) -> bool:
        """Whether what is missing may still come over one of the connections that its peer has `now`: of its channel's
        kind, if that is known, and a later one only if there was none when it was given out."""
        before, now = self._of_its_kind(self.connections), self._of_its_kind(now)
        return bool(before & now if before else now)

    def _of_its_kind(self, connections: Connections) -> Connections:
        return frozenset((kind, one) for kind, one in connections if self.channel in ("", kind))

    @property
    def num_valid(self) -> int:
        """Blocks of the grant, from its start, that are good in all layers."""
        whole = self.landed.all(axis=1)
        return int(whole.size if whole.all() else whole.argmin())
