"""One state machine per transfer, in the scheduler half: pure, no I/O, no vllm. It alone decides what vLLM is told.

Receive (decode):

    WAITING ─started─▶ READY ─alloc─▶ GRANTED ─all fills whole──▶ LANDED ─────────▶ REPORTED
       │ leg failed,      │ nothing     ▲ │ leg failed, deadline, rank fenced,           ▲
       │ deadline         │ to load     │ │ chunk missing, request over                  │
       ▼                  ▼             │ ▼                                              │
     LOCAL              LOCAL           │ REVOKING ─all ranks quiet─▶ FENCED ─verdict seen┘
                                        ├──────── refill from the store ──┤ ▲
                                        └─started── RESUMING ◀── resume ──┘ │ no other prefill, deadline,
                                                       └────────────────────┘ request over

Each resume is an epoch of its own: another prefill sends what is missing. What landed stays.

Two sources may fill one receive: the store its first blocks, the wire the others. A load without a transfer begins in
READY.

A request that is over while its grant is out is reported at once (its blocks are quarantined by references) and the
machine runs on until all ranks are quiet.

Send (prefill): blocks are planned as they become final and held by references until every rank has settled.
"""

import enum
from dataclasses import dataclass, field

ROUTER_LOST_S = 10.0
"""A transfer may take this long after the router was lost: its Grant may be lost too, or it is under way."""


class ReceiveState(enum.Enum):
    """Where a receive is; see the picture above."""

    WAITING = "waiting for prefill to start"
    READY = "prefill has started"
    GRANTED = "blocks granted"
    LANDED = "all units landed"
    REVOKING = "grant taken back, ranks draining"
    FENCED = "nothing can land any more"
    RESUMING = "waiting for another prefill to start"
    REPORTED = "vLLM has been told"
    LOCAL = "computed here"


@dataclass(slots=True)
class Fill:
    """One source's part of a receive: blocks [at, at + count) of its blocks."""

    at: int
    count: int
    whole: set[int] = field(default_factory=set)
    """Ranks on which all of it is in place."""
    stopped: dict[int, int] = field(default_factory=dict)
    """Rank → good blocks, from its start, where it ended early."""

    def is_over(self, world_size: int) -> bool:
        """Every rank has said that nothing of it will be written any more."""
        return len(self.whole | self.stopped.keys()) == world_size

    @property
    def num_valid(self) -> int:
        """Blocks, from its start, good on every rank that has answered."""
        return min([*self.stopped.values(), self.count])


@dataclass(slots=True)
class Receive:
    """KV that comes to one request's blocks: over the wire from a prefill, from the store, or both."""

    request_id: str
    transfer_id: str
    """The router's; empty where there is no transfer, or none any more."""
    num_tokens: int
    """Tokens whose KV was asked for: the prompt, or all so far after a preemption."""
    world_size: int
    deadline: float
    """Monotonic seconds; past it the prompt is computed here."""
    state: ReceiveState = ReceiveState.WAITING
    epoch: int = 1
    """Of the attempt under way; facts and messages of another one are not ours."""
    prefill_id: str = ""
    """Empty: no wire is involved."""
    load_id: str = ""
    """Names what is loaded from the store; a new one each time."""
    first_block: int = 0
    block_ids: list[int] = field(default_factory=list)
    """Blocks to be filled, in prompt order."""
    num_good: int = 0
    """Of them, from the start, in place before the current fills began."""
    wire_from: int = 0
    """Of them, the first that any prefill was to send."""
    token_digest: bytes = b""
    """Of the prompt, for another Grant."""
    stored: Fill | None = None
    wire: Fill | None = None
    """Follows `stored` where both are there."""
    refilled: bool = False
    """What the wire did not bring was asked of the store; once."""
    resume_by: float = 0.0
    """While RESUMING: the other prefill has started by then, or what is missing is computed here."""
    scheduled: bool = False
    """The first forward after the load was scheduled (and stamped)."""
    abandoned: bool = False
    """The request is over: vLLM was told, our references quarantine the blocks until all ranks are quiet."""
    reason: str = ""
    num_units: int = 0
    num_bytes: int = 0
    channel: str = ""

    @property
    def name(self) -> str:
        """For log lines."""
        return self.transfer_id or f"{self.load_id or 'load'} of {self.request_id}"

    def started(self, prefill_id: str) -> None:
        """Prefill's first step was scheduled."""
        if self.state is ReceiveState.WAITING:
            self.prefill_id = prefill_id
            self.state = ReceiveState.READY

    def granted(self, first_block: int, block_ids: list[int], num_stored: int = 0) -> None:
        """vLLM has allocated the destination: the store fills the first `num_stored` blocks, the wire the others."""
        assert self.state is ReceiveState.READY, self.state
        self.first_block, self.block_ids = first_block, block_ids
        self.wire_from = num_stored
        self.stored = Fill(0, num_stored) if num_stored else None
        self.wire = Fill(num_stored, len(block_ids) - num_stored) if num_stored < len(block_ids) else None
        self.state = ReceiveState.GRANTED

    def refill(self, num_blocks: int) -> None:
        """Fenced: the store may fill `num_blocks` of what is missing, before vLLM is told of the rest."""
        assert self.state is ReceiveState.FENCED and not self.refilled, self.state
        self.num_good, self.wire, self.refilled = self.num_valid, None, True
        self.stored = Fill(self.num_good, num_blocks)
        self.state = ReceiveState.GRANTED

    @property
    def is_resumable(self) -> bool:
        """Fenced because the wire failed: another prefill could send what is missing."""
        if self.state is not ReceiveState.FENCED or self.abandoned or self.wire is None or not self.transfer_id:
            return False
        return self.stored is None or self.stored.num_valid == self.stored.count

    def resume(self, resume_by: float) -> None:
        """Ask for another prefill, which sends what is missing under the next epoch."""
        assert self.is_resumable, self.state
        self.num_good, self.stored, self.wire, self.prefill_id = self.num_valid, None, None, ""
        self.epoch, self.resume_by = self.epoch + 1, resume_by
        self.state = ReceiveState.RESUMING

    def resumed(self, prefill_id: str, epoch: int) -> bool:
        """The other prefill has started. False: this is not about the attempt we wait for."""
        if self.state is not ReceiveState.RESUMING or epoch != self.epoch:
            return False
        self.prefill_id = prefill_id
        self.wire = Fill(self.num_good, len(self.block_ids) - self.num_good)
        self.state = ReceiveState.GRANTED
        return True

    def give_up(self, reason: str) -> bool:
        """Leg failed, deadline passed or nothing to load. True: a grant is out and has to be revoked."""
        if self.state is ReceiveState.RESUMING:
            self.reason = reason
            self.state = ReceiveState.FENCED
            return False
        if self.state in (ReceiveState.WAITING, ReceiveState.READY):
            self.reason = reason
            self.state = ReceiveState.LOCAL
            return False
        if self.state is ReceiveState.GRANTED:
            self.reason = reason
            self.state = ReceiveState.REVOKING
            return True
        return False

    def rank_landed(self, rank: int) -> None:
        """All units of the grant are in place on this rank."""
        if self._is_filling and self.wire is not None:
            self.wire.whole.add(rank)
            self._settle()

    def rank_fenced(self, rank: int, num_valid: int, reason: str) -> bool:
        """The grant is over on this rank. True: everything else that is out has to be taken back."""
        return self._is_filling and self.wire is not None and self._stopped(self.wire, rank, num_valid, reason)

    def rank_loaded(self, rank: int, num_valid: int, reason: str) -> bool:
        """The store's part is over on this rank. True: everything else that is out has to be taken back."""
        if not self._is_filling or self.stored is None:
            return False
        if num_valid < self.stored.count:
            return self._stopped(self.stored, rank, num_valid, reason)
        self.stored.whole.add(rank)
        self._settle()
        return False

    @property
    def _is_filling(self) -> bool:
        return self.state in (ReceiveState.GRANTED, ReceiveState.REVOKING)

    def _stopped(self, fill: Fill, rank: int, num_valid: int, reason: str) -> bool:
        first = self.state is ReceiveState.GRANTED
        if first:
            self.reason = reason
            self.state = ReceiveState.REVOKING
        fill.stopped[rank] = num_valid
        self._settle()
        return first and self.state is ReceiveState.REVOKING

    def _settle(self) -> None:
        if all(fill.is_over(self.world_size) for fill in self._fills):
            complete = self.num_valid == len(self.block_ids)
            self.state = ReceiveState.LANDED if complete else ReceiveState.FENCED

    @property
    def _fills(self) -> list[Fill]:
        return [fill for fill in (self.stored, self.wire) if fill is not None]

    def over(self) -> bool:
        """The request finished or was aborted. True: vLLM still waits for finished_recving and must get it now."""
        told = self.state in (ReceiveState.REPORTED, ReceiveState.LOCAL, ReceiveState.WAITING, ReceiveState.READY)
        if told:
            if self.state is not ReceiveState.REPORTED:
                self.state = ReceiveState.LOCAL
            return False
        if self.state is ReceiveState.RESUMING:
            self.state = ReceiveState.FENCED
        self.abandoned = True
        return True

    @property
    def quiet(self) -> bool:
        """No byte of the grant can land: quarantined blocks may go back."""
        return self.state in (ReceiveState.LANDED, ReceiveState.FENCED, ReceiveState.REPORTED, ReceiveState.LOCAL)

    @property
    def num_valid(self) -> int:
        """Blocks of the grant, from its start, good on every rank."""
        good = self.num_good
        for fill in self._fills:
            good = fill.at + fill.num_valid
            if fill.num_valid < fill.count:
                break
        return good

    @property
    def invalid_blocks(self) -> list[int]:
        """Blocks vLLM has to compute itself."""
        return self.block_ids[self.num_valid :]


@dataclass(slots=True)
class Send:
    """prefill's side of one transfer."""

    request_id: str
    transfer_id: str
    num_tokens: int
    total_blocks: int
    token_digest: bytes
    world_size: int
    deadline: float
    tenant: str = ""
    num_planned: int = 0
    """Blocks planned so far, from the start of the prompt."""
    held: list[int] = field(default_factory=list)
    """Our references: block ids that go back when all ranks have settled."""
    started: bool = False
    granted: bool = False
    """Decode wants it: its blocks come back by themselves once the prompt is computed."""
    computed: bool = False
    """The end of prefill was stamped."""
    settled: set[int] = field(default_factory=set)
    """Ranks that read nothing of it any more."""
    delivered: bool = True
    request_over: bool = False
    ending: str = ""
    """Why workers were told to forget it."""

    def plan_to(self, end_tokens: int, block_size: int) -> int:
        """Blocks that are final once `end_tokens` tokens are computed (the partial last one only at the end)."""
        return self.total_blocks if end_tokens >= self.num_tokens else end_tokens // block_size

    def rank_settled(self, rank: int, delivered: bool) -> None:
        """This rank reads nothing of it any more."""
        self.settled.add(rank)
        self.delivered = self.delivered and delivered

    @property
    def is_settled(self) -> bool:
        """All ranks are done: references go back."""
        return len(self.settled) == self.world_size
