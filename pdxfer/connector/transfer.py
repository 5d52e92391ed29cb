"""One state machine per transfer, in the scheduler half: pure, no I/O, no vllm. It alone decides what vLLM is told.

Receive (decode):

    WAITING ─started─▶ READY ─alloc─▶ GRANTED ─all ranks landed─▶ LANDED ─────────▶ REPORTED
       │ leg failed,      │ nothing       │ leg failed, deadline,                        ▲
       │ deadline         │ to load       │ rank fenced, request over                    │
       ▼                  ▼               ▼                                              │
     LOCAL              LOCAL         REVOKING ─all ranks quiet─▶ FENCED ─verdict seen───┘

A request that is over while its grant is out is reported at once (its blocks are quarantined by references) and the
machine runs on until all ranks are quiet.

Send (prefill): blocks are planned as they become final and held by references until every rank has settled.
"""

import enum
from dataclasses import dataclass, field


class ReceiveState(enum.Enum):
    """Where a receive is; see the picture above."""

    WAITING = "waiting for prefill to start"
    READY = "prefill has started"
    GRANTED = "blocks granted"
    LANDED = "all units landed"
    REVOKING = "grant taken back, ranks draining"
    FENCED = "nothing can land any more"
    REPORTED = "vLLM has been told"
    LOCAL = "computed here"


@dataclass(slots=True)
class Receive:
    """decode's side of one transfer."""

    request_id: str
    transfer_id: str
    num_tokens: int
    """Prompt tokens."""
    world_size: int
    deadline: float
    """Monotonic seconds; past it the prompt is computed here."""
    state: ReceiveState = ReceiveState.WAITING
    epoch: int = 1
    prefill_id: str = ""
    first_block: int = 0
    block_ids: list[int] = field(default_factory=list)
    """Blocks of the grant, in prompt order."""
    landed: set[int] = field(default_factory=set)
    """Ranks on which all units are in place."""
    fenced: dict[int, int] = field(default_factory=dict)
    """Rank → good blocks of the grant, for ranks where it was taken back."""
    scheduled: bool = False
    """The first forward after the load was scheduled (and stamped)."""
    abandoned: bool = False
    """The request is over: vLLM was told, our references quarantine the blocks until all ranks are quiet."""
    reason: str = ""
    num_units: int = 0
    num_bytes: int = 0
    channel: str = ""

    def started(self, prefill_id: str) -> None:
        """Prefill's first step was scheduled."""
        if self.state is ReceiveState.WAITING:
            self.prefill_id = prefill_id
            self.state = ReceiveState.READY

    def granted(self, first_block: int, block_ids: list[int]) -> None:
        """vLLM has allocated the destination; the Grant leaves."""
        assert self.state is ReceiveState.READY, self.state
        self.first_block, self.block_ids = first_block, block_ids
        self.state = ReceiveState.GRANTED

    def give_up(self, reason: str) -> bool:
        """Leg failed, deadline passed or nothing to load. True: a grant is out and has to be revoked."""
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
        if self.state in (ReceiveState.GRANTED, ReceiveState.REVOKING):
            self.landed.add(rank)
            self._settle()

    def rank_fenced(self, rank: int, num_valid: int, reason: str) -> bool:
        """The grant is over on this rank. True: the other ranks have to be told to revoke it."""
        if self.state not in (ReceiveState.GRANTED, ReceiveState.REVOKING):
            return False
        first = self.state is ReceiveState.GRANTED
        if first:
            self.reason = reason
            self.state = ReceiveState.REVOKING
        self.fenced[rank] = num_valid
        self._settle()
        return first and self.world_size > 1

    def _settle(self) -> None:
        if len(self.landed | self.fenced.keys()) == self.world_size:
            complete = self.num_valid == len(self.block_ids)
            self.state = ReceiveState.LANDED if complete else ReceiveState.FENCED

    def over(self) -> bool:
        """The request finished or was aborted. True: vLLM still waits for finished_recving and must get it now."""
        told = self.state in (ReceiveState.REPORTED, ReceiveState.LOCAL, ReceiveState.WAITING, ReceiveState.READY)
        if told:
            if self.state is not ReceiveState.REPORTED:
                self.state = ReceiveState.LOCAL
            return False
        self.abandoned = True
        return True

    @property
    def quiet(self) -> bool:
        """No byte of the grant can land: quarantined blocks may go back."""
        return self.state in (ReceiveState.LANDED, ReceiveState.FENCED, ReceiveState.REPORTED, ReceiveState.LOCAL)

    @property
    def num_valid(self) -> int:
        """Blocks of the grant, from its start, good on every rank."""
        return min([*self.fenced.values(), len(self.block_ids)])

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
