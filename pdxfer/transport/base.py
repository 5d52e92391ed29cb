"""The contract between the node and its channels.

An Endpoint is a node's end of one kind of channel: it listens, and opens Channels to peers. A Channel carries units
one way (sender → receiver) and small controls both ways. The receiving side calls the node's Sink.

    sender thread                                   endpoint's receive thread
    channel.write(unit)  ── header + bytes ──────▶  sink.claim(peer, header) → destination runs, or None: drop
    channel.poll()       ◀─ source reusable         ... bytes land in place ...
                                                    sink.arrived(peer, header)   digest verified by the sink
    channel.tell(control) ◀──── controls ────────▶  sink.control(peer, control)
                                                    sink.lost(peer, reason)      connection or process gone

Push channels (tcp, nixl, ucx, loopback) write into the peer's blocks; the pull channel (local) notifies and the peer
reads. Who executes the last hop decides how it is fenced: see Endpoint.fence.
"""

from collections.abc import Sequence
from typing import Annotated, Protocol, runtime_checkable

import msgspec

from pdxfer.kv.runs import Runs
from pdxfer.memory.region import Region
from pdxfer.wire.messages import BlockIds, Id, Text


class PeerId(msgspec.Struct, frozen=True, kw_only=True):
    """One node of another engine, in one life."""

    engine_id: Id
    incarnation: int
    rank: int


class UnitHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names one unit: blocks [first_block, first_block + num_blocks) of the prompt × layers, inside one chunk."""

    transfer_id: Id
    epoch: int
    first_block: int
    """Index in the prompt's block table (not a block id)."""
    num_blocks: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    first_layer: int
    num_layers: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
    digest: int
    """xxh3-64 over the bytes in canonical order; 0 = not taken (transport.integrity off or sampled out)."""
    source_blocks: BlockIds = []
    """Pull only: the sender's block ids, for the reader to compute source addresses."""
    frame_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)] = 0
    """Staged path: the payload is one codec frame of this length, for a staging slot; 0: the bytes themselves."""


class OutgoingUnit(msgspec.Struct, frozen=True, kw_only=True):
    """A unit to write: what it is, where its bytes lie here, where they go there."""

    header: UnitHeader
    source: Runs
    """Offsets in our region; of a frame: where it lies, counted from the region's base (only over STAGED kinds)."""
    source_blocks: list[int]
    """Our block ids of the unit, in prompt order."""
    target_blocks: list[int]
    """The peer's block ids of the unit, in prompt order (from the Grant)."""
    frame: tuple[bytes | memoryview, ...] = ()
    """Staged path: what `source` points to, held while it is written."""


class UnitResult(msgspec.Struct, frozen=True, kw_only=True):
    """A unit's source memory is no longer needed; `error` empty means it was written (for pull: read and verified)."""

    header: UnitHeader
    error: str = ""


# ---- controls, both ways -----------------------------------------------------------------------------------------


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """receiver → sender. Stop writing this epoch and answer Drained."""

    transfer_id: Id
    epoch: int
    reason: Text


class Drained(msgspec.Struct, frozen=True, kw_only=True, tag="drained"):
    """sender → receiver. No byte of this epoch will be written any more; ordered after its last unit."""

    transfer_id: Id
    epoch: int
    complete: bool
    """All units were written."""
    reason: Text = ""


class UnitFailed(msgspec.Struct, frozen=True, kw_only=True, tag="unit_failed"):
    """receiver → sender, or sender → receiver. This unit did not make it (digest, bounds, read error)."""

    header: UnitHeader
    reason: Text


class Credit(msgspec.Struct, frozen=True, kw_only=True, tag="credit"):
    """receiver → sender. So many more frames of this epoch may be sent, each into a staging slot of `slot_bytes`."""

    transfer_id: Id
    epoch: int
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    slot_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
    codec: Id = ""
    """Of the frame that was decoded last..."""
    decode_bytes_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """...and how fast it went here, in raw bytes; 0: nothing was."""
    codecs: Annotated[list[Id], msgspec.Meta(max_length=64)] = []
    """All that are decoded here; frames of another one would be refused."""
    tokens_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """How fast prompts are computed here; 0: not known."""


Control = Abort | Drained | UnitFailed | Credit


class Sink(Protocol):
    """What the receiving node does with arrivals. Called on the endpoint's threads; never blocks for long."""

    @property
    def generation(self) -> int:
        """Grants taken back so far. An endpoint that does not write here reads it after it has let a peer in, and tells
        the peer (Channel.generation): over that channel only younger grants may be filled."""
        ...

    def claim(self, peer: PeerId, header: UnitHeader) -> Runs | None:
        """Destination runs in our region, claimed for one write until `arrived` or `failed`; None: not wanted, discard.
        Of a frame: its staging slot, counted from the region's base.

        May wait (bounded, about a second) for a grant that is known to the scheduler half but not here yet.
        """
        ...

    def arrived(self, peer: PeerId, header: UnitHeader) -> bool:
        """Bytes are in place: verify, count, release the claim. False: digest mismatch (reported by the sink)."""
        ...

    def failed(self, peer: PeerId, header: UnitHeader, reason: str) -> None:
        """The bytes did not come (connection lost in mid-unit, read error): release the claim."""
        ...

    def control(self, peer: PeerId, control: Control) -> None:
        """A control message from the peer, in order with its units."""
        ...

    def lost(self, peer: PeerId, reason: str) -> None:
        """A connection of this peer is gone (`Endpoint.connections` no longer names it); no byte can come over it."""
        ...


class Channel(Protocol):
    """Our connection to one peer node, for sending. Used by that peer's sender thread only; `close` by anyone."""

    kind: str
    peer: PeerId
    generation: int
    """The receiver's Sink.generation when it let us in; 0 where the receiver executes the last hop. Constant."""

    @property
    def dead(self) -> str:
        """Why nothing can be sent any more; empty while the channel is open. Any thread, never blocks."""
        ...

    def write(self, unit: OutgoingUnit) -> None:
        """Start moving a unit; may block for back-pressure, bounded. Raises ChannelError: the channel is dead."""
        ...

    def poll(self, timeout_s: float) -> Sequence[UnitResult]:
        """Units whose source memory is free again since the last call; waits at most `timeout_s` for the first.

        Raises ChannelError when the channel died; all units not reported are then failed and their source is free
        (tcp, local after disconnect) or stays quarantined until `close` returns (nixl).
        """
        ...

    def tell(self, control: Control) -> None:
        """Send a control, ordered after the units written before. Raises ChannelError."""
        ...

    def probe(self, timeout_s: float) -> None:
        """Move a small message there and back. Raises ChannelError if it does not return in time."""
        ...

    def close(self) -> None:
        """Give the connection up; idempotent. After it returns no byte of ours leaves over it any more."""
        ...


@runtime_checkable
class MeasuredChannel(Protocol):
    """A channel that knows what the network has taken: lets the adaptive wire measure the link."""

    def pending(self) -> tuple[int, int] | None:
        """(bytes written so far, of which the peer's host has not confirmed so many); None: the system does not say."""
        ...


class Endpoint(Protocol):
    """One node's end of one kind of channel. Made by a factory `(config, me, region, sink) -> Endpoint`."""

    kind: str
    writes_here: bool
    """The receiving side executes the last hop (tcp, local): where no claim is held, nothing lands. False for nixl."""

    def address(self) -> bytes:
        """What peers need to connect; goes into WorkerHello. Changes when `generation` grows."""
        ...

    @property
    def generation(self) -> int:
        """Number of the current agent; a fence that destroys the agent increases it."""
        ...

    def admit(self, peers: Sequence[PeerId], secret: bytes) -> None:
        """Who may connect from now on, and the secret they must prove to know; cuts off everybody else."""
        ...

    def accepts(self, address: bytes) -> str:
        """Empty if a channel to this peer address can work from here, else the reason (other host, no ptrace, ...)."""
        ...

    def connect(self, peer: PeerId, address: bytes, timeout_s: float) -> Channel:
        """Open a channel to a peer. Raises ChannelError with what to check."""
        ...

    def connections(self, peer: PeerId) -> frozenset[object]:
        """Those of that peer to this endpoint, over which it could write. Tokens: equal while it is the same one."""
        ...

    def tell(self, peer: PeerId, control: Control) -> None:
        """Receiver → sender control, on the connection the peer opened. Raises ChannelError when it is gone."""
        ...

    def fence(self, peer: PeerId) -> None:
        """After it returns no byte that this peer has posted or begun can land in our region. May cut the peer off."""
        ...

    def attend(self, active: bool) -> None:
        """Hint: grants are out (poll often) or none are (park; an idle pair costs < 2 % of a core)."""
        ...

    def close(self) -> None:
        """Stop listening and close all channels; idempotent. Fences everything."""
        ...


class EndpointFactory(Protocol):
    """How the node makes an endpoint; registered per kind in transport/pool.py and by entry point pdxfer.channels."""

    def __call__(self, options: "EndpointOptions", me: PeerId, region: Region, sink: Sink) -> Endpoint: ...


class EndpointOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that endpoints need, from config sections `network` and `transport`."""

    bind: str = "127.0.0.1"
    """Address to listen on."""
    advertise: str = "127.0.0.1"
    """Address peers connect to."""
    ports: tuple[int, int] = (0, 0)
    """Inclusive range to listen in; (0, 0) lets the OS choose."""
    connect_timeout_s: float = 5.0
    write_timeout_s: float = 10.0
    """A peer that takes no byte for this long is dead."""
    max_fence_groups: int = 8
