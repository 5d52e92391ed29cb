"""Every control-plane message, one class each: what it says, who sends it to whom.

Engines (a scheduler half and one worker half a rank), the proxy and the router speak these over ZMQ. Bounded, typed,
versioned; never pickle. Adding or changing a field bumps `version.PROTOCOL`. KV bytes never travel here.
One file, long as it is: the whole protocol is read in one go.

    S scheduler half   W worker half   P proxy   R router
"""

from typing import Annotated, Literal

import msgspec

from pdxfer.wire.base import BlockIds as BlockIds
from pdxfer.wire.base import Id as Id
from pdxfer.wire.base import Message as Message
from pdxfer.wire.base import Text as Text
from pdxfer.wire.manage import SetLogLevel, SetWire, StoreOp, StoreOpCancel, StoreOpUpdate

Role = Literal["prefill", "decode", "both"]
Leg = Literal["prefill", "decode"]
Stage = Literal["started", "prefilled", "granted", "landed", "scheduled"]
"""Points of a request's life that engines stamp; the proxy adds arrival, pairing and first token."""
Outcome = Literal["delivered", "failed", "aborted", "unused"]
MAX_RANKS = 1024
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can hold; constant for one incarnation."""

    num_blocks: int
    """KV blocks of its pool."""
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    """Tokens a block."""
    max_model_len: int
    """Longest prompt + output, in tokens."""


class ChannelAddress(msgspec.Struct, frozen=True, kw_only=True):
    """How a node can be reached by one kind of channel; `blob` belongs to that channel's file."""

    kind: Id
    blob: Annotated[bytes, msgspec.Meta(max_length=1 << 18)]


# ---- membership ------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """S → R. I am here. Sent on connect, and again when the router does not know us."""

    engine_id: Id
    incarnation: int
    role: Role
    url: Text
    """HTTP base of its API server, as the proxy reaches it."""
    model: Text
    served_names: Annotated[list[Text], msgspec.Meta(max_length=256)]
    """Names clients may ask for (aliases and LoRA names included)."""
    fingerprint: Annotated[dict[str, str], msgspec.Meta(max_length=64)]
    """KV layout and identity, field by field; two engines pair only if all fields are equal."""
    capacity: Capacity
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    """Worker halves that must join too."""
    free_blocks: int
    transfers: Annotated[list[Id], msgspec.Meta(max_length=1 << 14)] = []
    """Unsettled transfers, so that a restarted router rebuilds its leases."""


class StoreAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a node serves its local tiers to its peers (store/peer/)."""

    host: Text
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class WorkerHello(Message, frozen=True, tag="worker_hello"):
    """W → R. A rank is warm and listens."""

    engine_id: Id
    incarnation: int
    rank: Rank
    addresses: Annotated[list[ChannelAddress], msgspec.Meta(max_length=16)]
    """In the node's order of preference."""
    generation: int
    """Of its agents: grows when a fence replaced them."""
    store: StoreAddress | None = None
    """None: it serves no tier to others."""


class TierReport(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of a member's store now; counters since its open (see store.base.TierStats)."""

    kind: Id
    used_bytes: int = 0
    capacity_bytes: int = 0
    """0: the tier does not know."""
    num_values: int = 0
    pinned_bytes: int = 0
    leases: int = 0
    hits: int = 0
    misses: int = 0
    puts: int = 0
    evictions: int = 0
    failures: int = 0
    reachable: bool = True


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """S, W → R each 0.5 s."""

    incarnation: int
    wall: float
    """Sender's clock, for the offset between hosts."""
    free_blocks: int = -1
    """Blocks a new request may take, by vLLM's own rule; -1 from workers."""
    num_running: int = 0
    num_waiting: int = 0
    lag_s: float = 0.0
    """How late this heartbeat left: its thread was held up."""
    log_level: Id = ""
    """Of pdxfer's loggers in this half's process."""
    tiers: Annotated[list[TierReport], msgspec.Meta(max_length=16)] = []
    wire: Id = ""
    """Of workers: `on` or `off` where codecs on the wire are configured, as the live switch stands."""
    counts: Annotated[dict[Id, int], msgspec.Meta(max_length=64)] = {}
    """Totals of this half since its start, by name (see metrics.catalog, process node)."""
    problems: Annotated[list[Text], msgspec.Meta(max_length=8)] = []
    """What is wrong with this half now: an allocator that does not add up, a tier that is away."""


class HeartbeatAck(Message, frozen=True, tag="heartbeat_ack"):
    """R → S, W, P. `known` False: say Hello again."""

    known: bool
    wall: float


class Goodbye(Message, frozen=True, tag="goodbye"):
    """S, P → R. Leaving on purpose: no new pairings, leases end."""

    reason: Text


class PeerNode(msgspec.Struct, frozen=True, kw_only=True):
    """One worker half as seen by the others."""

    engine_id: Id
    incarnation: int
    rank: Rank
    role: Role
    addresses: list[ChannelAddress]
    generation: int


class StoreNode(msgspec.Struct, frozen=True, kw_only=True):
    """One worker half whose tiers others may read."""

    engine_id: Id
    incarnation: int
    rank: Rank
    address: StoreAddress


class Peers(Message, frozen=True, tag="peers"):
    """R → W. All nodes of your rank that you may exchange KV with; replaces the previous list."""

    nodes: list[PeerNode]
    secret: Annotated[bytes, msgspec.Meta(max_length=64)]
    """Minted by the router; nodes prove to each other that they know it before a byte of KV moves."""
    stores: list[StoreNode] = []
    """Nodes of your rank and fingerprint, you included, whatever their roles, that serve their tiers."""


class PeerReady(Message, frozen=True, tag="peer_ready"):
    """W → R. Channel to that peer is open and probed (`kind`), or is not (`kind` empty, `reason` says why)."""

    engine_id: Id
    incarnation: int
    kind: Id
    reason: Text = ""


# ---- pairing ---------------------------------------------------------------------------------------------------


class ProxyHello(Message, frozen=True, tag="proxy_hello"):
    """P → R. A proxy wants pairings and timeline stamps."""

    proxy_id: Id


class EngineRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where one leg goes."""

    engine_id: Id
    url: Text


MAX_AVOIDED = 4


class Pair(Message, frozen=True, tag="pair"):
    """P → R. Find me a pair for one request."""

    request_id: Id
    num_tokens: int
    """Estimate of prompt tokens."""
    deadline_s: float
    """Seconds from now within which an answer is useful."""
    model: Text = ""
    tenant: Id = ""
    local_only: bool = False
    """Ask for a decode engine alone (lists, n > 1, embeddings ...)."""
    avoid: Annotated[list[Id], msgspec.Meta(max_length=MAX_AVOIDED)] = []
    """Engines that have failed this request: taken only if there is no other."""
    traceparent: Id = ""
    """W3C trace context of the request; empty: not traced."""


class Pairing(Message, frozen=True, tag="pairing"):
    """R → P. Drive both legs at once under this transfer id."""

    request_id: Id
    transfer_id: Id
    prefill: EngineRef
    decode: EngineRef
    lease_s: float
    """Seconds until the decode capacity held for it is given up."""


SHORT_PROMPT = "short prompt"
ONE_BLOCK = "prompt of one block"
PREFILL_TOO_SMALL = "no prefill engine can hold the prompt"
"""Reasons of a Local that concern the prompt alone: a pair for another one was there."""


class Local(Message, frozen=True, tag="local"):
    """R → P. Send the request to this decode engine alone."""

    request_id: Id
    decode: EngineRef
    reason: Text


class Busy(Message, frozen=True, tag="busy"):
    """R → P. Nothing can take it now."""

    request_id: Id
    retry_after_s: float
    reason: Text


class Release(Message, frozen=True, tag="release"):
    """P → R. The request is over for the proxy (done, client gone, or never started): end the pairing."""

    transfer_id: Id
    """Or, of a Pair that has no answer yet, its request_id: nobody waits for one any more."""
    reason: Text


# ---- one transfer ----------------------------------------------------------------------------------------------


class Started(Message, frozen=True, tag="started"):
    """prefill S → R → decode S. First scheduled step of the prompt: time to grant."""

    transfer_id: Id
    num_tokens: int
    prefill_id: Id = ""
    """Filled in by the router: whose nodes will write."""
    epoch: int = 1
    """Filled in by the router: the attempt this prefill belongs to."""


class Grant(Message, frozen=True, tag="grant"):
    """decode S → R → prefill W of each rank, and prefill S. Permission to fill these blocks."""

    transfer_id: Id
    epoch: int
    decode_id: Id
    """Engine that owns the blocks."""
    decode_incarnation: int
    first_block: int
    """Index, in the prompt's block table, of block_ids[0]: what decode has already is not sent."""
    block_ids: BlockIds
    """Decode's block ids, in prompt order."""
    num_tokens: int
    """Prompt length decode sees; must equal prefill's."""
    token_digest: Annotated[bytes, msgspec.Meta(max_length=64)]
    """blake3 over the prompt's identity (token ids and extra keys); must equal prefill's."""
    generations: Annotated[list[int], msgspec.Meta(max_length=1024)] = []
    """By rank: grants that decode had taken back before this one. A channel that was opened after more of them may
    not serve it: blocks of a grant that was taken back meanwhile belong to somebody else (transport.Channel)."""


class CancelGrant(Message, frozen=True, tag="cancel_grant"):
    """decode S → R → prefill S, W. Nothing (more) is wanted for this transfer."""

    transfer_id: Id
    reason: Text
    epoch: int = 1
    """The router drops one of an attempt that is over."""


class LegFailed(Message, frozen=True, tag="leg_failed"):
    """P or S → R → the other leg's S. That leg is over without having delivered; do not wait for it."""

    transfer_id: Id
    leg: Leg
    reason: Text
    epoch: int = 1
    """Of a prefill leg: the attempt it belonged to; one that is over is ignored. The router knows an engine's."""


class Resume(Message, frozen=True, tag="resume"):
    """decode S → R. Prefill is lost in mid-transfer and nothing of its epoch can land any more: find another one, which
    sends from the first missing block on. Answered by its Started, or by LegFailed of this epoch."""

    transfer_id: Id
    epoch: int
    """Of the attempt that is asked for: one more than the last."""
    first_missing: int
    """Index in the prompt's block table."""
    num_missing_tokens: int
    reason: Text
    """Why the last attempt ended."""


class Redispatch(Message, frozen=True, tag="redispatch"):
    """R → P. The prefill leg of this transfer is to be sent again, to this engine; the last one is over."""

    transfer_id: Id
    epoch: int
    prefill: EngineRef
    first_missing: int
    reason: Text


class Stamp(Message, frozen=True, tag="stamp"):
    """S → R → P. A stage was reached at `wall` (sender's clock; the router shifts it to the proxy's)."""

    transfer_id: Id
    stage: Stage
    wall: float


class Ended(Message, frozen=True, tag="ended"):
    """decode S → R (→ P). The receive side is settled: credits and lease return."""

    transfer_id: Id
    outcome: Outcome
    num_tokens: int
    """Prompt tokens that came over the wire."""
    num_bytes: int
    num_units: int
    channel: Id
    reason: Text = ""


class Served(Message, frozen=True, tag="served"):
    """P → R. One request is over: what the status page and the timelines by id show of it. Walls are the proxy's."""

    request_id: Id
    endpoint: Id
    mode: Id
    """pair, local or none."""
    outcome: Id
    arrival: float
    end: float
    first_byte: float | None = None
    transfer_id: Id = ""
    prefill: Id = ""
    decode: Id = ""
    reason: Text = ""
    """Why it was local, or what became of the transfer."""
    stamps: Annotated[dict[Id, float], msgspec.Meta(max_length=8)] = {}
    """By Stage, in the proxy's clock, too."""
    num_bytes: int = 0
    num_tokens: int = 0
    channel: Id = ""


class Drain(Message, frozen=True, tag="drain"):
    """R → S. Take no new work (`on` True) or take it again."""

    on: bool


class Refused(Message, frozen=True, tag="refused"):
    """R → anyone. Your Hello was refused; `reason` names the field and both values."""

    reason: Text


FromMember = (
    Hello
    | WorkerHello
    | Heartbeat
    | Goodbye
    | PeerReady
    | ProxyHello
    | Pair
    | Release
    | Started
    | Grant
    | CancelGrant
    | LegFailed
    | Resume
    | Stamp
    | Ended
    | Served
    | StoreOpUpdate
)
"""What the router accepts."""
FromRouter = (
    HeartbeatAck
    | Peers
    | Pairing
    | Local
    | Busy
    | Started
    | Grant
    | CancelGrant
    | LegFailed
    | Redispatch
    | Stamp
    | Ended
    | Drain
    | Refused
    | StoreOp
    | StoreOpCancel
    | SetLogLevel
    | SetWire
)
"""What members accept."""
