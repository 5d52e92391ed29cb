"""decode's transfers in the scheduler half: wait for prefill's start, grant blocks, tell vLLM what became of them.

Step 5 and 10 of the request's life (docs/design.md). EngineCore thread only; decisions are transfer.Receive's.
"""

import logging

from pdxfer.connector.compat import KVCacheBlocks, KVConnectorOutput, Request, SchedulerOutput
from pdxfer.connector.member import EngineFacts, Member
from pdxfer.connector.references import References
from pdxfer.connector.requests import prompt_digest
from pdxfer.connector.transfer import Receive, ReceiveState
from pdxfer.wire.halves import Expect, Fenced, Landed, Revoke
from pdxfer.wire.messages import CancelGrant, Ended, Grant, Outcome

log = logging.getLogger(__name__)


class Receives:
    """All transfers that come to this engine."""

    def __init__(self, engine_id: str, facts: EngineFacts, member: Member, references: References) -> None:
        self._engine_id, self._facts, self._member, self._references = engine_id, facts, member, references
        self._by_request: dict[str, Receive] = {}
        self._by_transfer: dict[str, Receive] = {}
        self._verdicts: dict[str, frozenset[int]] = {}
        """Request id → invalid blocks given to the workers, not yet seen in a step's output."""
        self._told_over: set[str] = set()
        """Abandoned receives whose finished_recving was given."""
        self.counters: dict[str, float] = {}

    def begin(self, request: Request, transfer_id: str, deadline: float) -> None:
        """A decode leg has arrived."""
        receive = Receive(
            request_id=request.request_id,
            transfer_id=transfer_id,
            num_tokens=request.num_prompt_tokens,
            world_size=self._facts.world_size,
            deadline=deadline,
        )
        self._by_request[request.request_id] = self._by_transfer[transfer_id] = receive

    def get(self, transfer_id: str) -> Receive | None:
        """The transfer with this id."""
        return self._by_transfer.get(transfer_id)

    # ---- asked by vLLM -----------------------------------------------------------------------------------------------

    def matched_tokens(self, request: Request, num_computed: int, now: float) -> tuple[int | None, bool]:
        """Tokens that come over the wire beyond `num_computed`: None asks again, (n, True) loads asynchronously."""
        receive = self._by_request.get(request.request_id)
        if receive is None:
            return 0, False
        if receive.state is ReceiveState.WAITING:
            if now < receive.deadline:
                return None, False
            self.give_up(receive, "prefill did not start before the deadline")
        if receive.state is not ReceiveState.READY:
            return 0, False
        missing = receive.num_tokens - num_computed
        if missing <= 0:
            self.give_up(receive, "nothing to load")
            return 0, False
        return missing, True

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        """vLLM has allocated the destination: grant it. Called again after the load, with 0."""
        receive = self._by_request.get(request.request_id)
        if receive is None or receive.state is not ReceiveState.READY:
            return
        if not num_external:
            self.give_up(receive, "nothing to load")
            return
        size = self._facts.block_size
        first_block = (receive.num_tokens - num_external) // size
        total_blocks = -(-receive.num_tokens // size)
        receive.granted(first_block, list(blocks.get_block_ids()[0][first_block:total_blocks]))
        self._grant(receive, prompt_digest(request))

    def _grant(self, receive: Receive, token_digest: bytes) -> None:
        self._member.tell_workers(
            Expect(
                transfer_id=receive.transfer_id,
                epoch=receive.epoch,
                prefill_id=receive.prefill_id,
                first_block=receive.first_block,
                block_ids=receive.block_ids,
            )
        )
        self._member.tell_router(
            Grant(
                transfer_id=receive.transfer_id,
                epoch=receive.epoch,
                decode_id=self._engine_id,
                decode_incarnation=self._member.incarnation,
                first_block=receive.first_block,
                block_ids=receive.block_ids,
                num_tokens=receive.num_tokens,
                token_digest=token_digest,
            )
        )
        self._member.stamp(receive.transfer_id, "granted")

    # ---- each step ---------------------------------------------------------------------------------------------------

    def take_verdicts(self, output: SchedulerOutput) -> tuple[int, ...]:
        """Blocks of receives that failed and are fenced: workers give them to vLLM as load errors in this step."""
        invalid: list[int] = []
        for receive in self._by_request.values():
            if receive.state is ReceiveState.REPORTED and not receive.scheduled:
                if receive.request_id in output.num_scheduled_tokens:
                    receive.scheduled = True
                    self._member.stamp(receive.transfer_id, "scheduled")
            elif receive.state is ReceiveState.FENCED and not receive.abandoned:
                if receive.request_id not in self._verdicts:
                    self._verdicts[receive.request_id] = frozenset(receive.invalid_blocks)
                    invalid.extend(receive.invalid_blocks)
        return tuple(invalid)

    def report(self, output: KVConnectorOutput) -> None:
        """Add finished receives to a step's output, each exactly once, failures only with their verdict."""
        finished = set(output.finished_recving or ())
        for receive in list(self._by_request.values()):
            if receive.abandoned:
                verdict = self._verdicts.get(receive.request_id)
                if verdict is not None and not verdict <= output.invalid_block_ids:
                    continue  # its blocks must not be reused before the step that names them as invalid
                self._verdicts.pop(receive.request_id, None)
                if receive.request_id not in self._told_over:
                    self._told_over.add(receive.request_id)
                    finished.add(receive.request_id)
                if receive.quiet:
                    self._close(receive)
            elif receive.state is ReceiveState.LANDED:
                receive.state = ReceiveState.REPORTED
                finished.add(receive.request_id)
                self._delivered(receive)
            elif receive.state is ReceiveState.FENCED:
                verdict = self._verdicts.get(receive.request_id)
                if verdict is not None and verdict <= output.invalid_block_ids:
                    receive.state = ReceiveState.REPORTED
                    finished.add(receive.request_id)
                    self._recomputing(receive)
        output.finished_recving = finished or None

    # ---- events ------------------------------------------------------------------------------------------------------

    def rank_landed(self, receive: Receive, landed: Landed) -> None:
        """All units are in place on one rank."""
        receive.num_units += landed.num_units
        receive.num_bytes += landed.num_bytes
        receive.channel = landed.channel
        receive.rank_landed(landed.rank)
        if receive.state is ReceiveState.LANDED:
            self._member.stamp(landed.transfer_id, "landed", landed.wall)

    def rank_fenced(self, receive: Receive, fenced: Fenced) -> None:
        """The grant is over on one rank; the others give it back too."""
        if receive.rank_fenced(fenced.rank, fenced.num_valid, fenced.reason):
            self._revoke(receive, fenced.reason)

    def give_up(self, receive: Receive, reason: str) -> None:
        """Compute here what is missing; what was granted is taken back first."""
        if receive.state not in (ReceiveState.WAITING, ReceiveState.READY, ReceiveState.GRANTED):
            return
        self._count("fallbacks")
        log.info("%s: %s; what is missing is computed here", receive.transfer_id, reason)
        revoke = receive.give_up(reason)
        self._cancel(receive, reason)
        if revoke:
            self._revoke(receive, reason)
        else:
            self._ended(receive, "unused", reason)

    def request_over(self, request: Request) -> bool:
        """The request has ended, before vLLM frees its blocks. False: it is none of ours."""
        receive = self._by_request.get(request.request_id)
        if receive is None:
            return False
        before = receive.state
        if not receive.over():
            if before in (ReceiveState.WAITING, ReceiveState.READY):
                self._cancel(receive, "request over")
                self._ended(receive, "aborted", "request over")
            self._forget(receive)
        elif before in (ReceiveState.GRANTED, ReceiveState.REVOKING):
            self._references.quarantine(receive.transfer_id, receive.block_ids)
            self._cancel(receive, "request over")
            if receive.give_up("request over"):
                self._revoke(receive, "request over")
        return True

    def check_deadlines(self, now: float) -> None:
        """Grants that were not filled in time."""
        for receive in list(self._by_request.values()):
            if receive.state is ReceiveState.GRANTED and now >= receive.deadline:
                self.give_up(receive, "deadline passed before all units had landed")

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _revoke(self, receive: Receive, reason: str) -> None:
        revoke = Revoke(transfer_id=receive.transfer_id, epoch=receive.epoch, reason=reason[:1000])
        self._member.tell_workers(revoke)

    def _cancel(self, receive: Receive, reason: str) -> None:
        self._member.tell_router(CancelGrant(transfer_id=receive.transfer_id, reason=reason[:1000]))

    def _delivered(self, receive: Receive) -> None:
        self._count("received_transfers")
        self._count("received_bytes", receive.num_bytes)
        self._count("received_units", receive.num_units)
        self._ended(receive, "delivered")

    def _recomputing(self, receive: Receive) -> None:
        self._count("failed_transfers")
        self._count("recomputed_blocks", len(receive.invalid_blocks))
        landed, total = receive.num_valid, len(receive.block_ids)
        log.warning(
            "%s: %s; %d of %d blocks landed, the rest is computed here",
            receive.transfer_id, receive.reason, landed, total,
        )  # fmt: skip
        self._cancel(receive, receive.reason)
        self._ended(receive, "failed", receive.reason)

    def _ended(self, receive: Receive, outcome: Outcome, reason: str = "") -> None:
        tokens = receive.num_tokens - receive.first_block * self._facts.block_size
        self._member.tell_router(
            Ended(
                transfer_id=receive.transfer_id,
                outcome=outcome,
                num_tokens=tokens if outcome == "delivered" else 0,
                num_bytes=receive.num_bytes,
                num_units=receive.num_units,
                channel=receive.channel,
                reason=reason[:1000],
            )
        )

    def _close(self, receive: Receive) -> None:
        """An abandoned receive is quiet: its quarantined blocks go back."""
        self._references.release(receive.transfer_id)
        self._ended(receive, "aborted", receive.reason or "request over")
        self._told_over.discard(receive.request_id)
        self._forget(receive)

    def _forget(self, receive: Receive) -> None:
        self._by_request.pop(receive.request_id, None)
        self._by_transfer.pop(receive.transfer_id, None)
        self._verdicts.pop(receive.request_id, None)

    def _count(self, name: str, value: float = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + value

    @property
    def unsettled(self) -> bool:
        """Some receive waits for facts from outside: every step must come back to `report`."""
        return any(
            r.abandoned or r.state not in (ReceiveState.REPORTED, ReceiveState.LOCAL) for r in self._by_request.values()
        )
