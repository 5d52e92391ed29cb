"""KV that comes to this engine's requests: from a prefill, from the store, or both; vLLM is told what became of it.

Steps 5, 10 and 13 of the request's life (docs/design.md): wait for prefill's start and the tiers' answer, grant blocks,
report. EngineCore thread only; decisions are transfer.Receive's.
"""

import logging

from pdxfer.connector.compat import KVCacheBlocks, KVConnectorOutput, Request, SchedulerOutput
from pdxfer.connector.loads import LOAD_GRACE_S, Loads
from pdxfer.connector.member import EngineFacts, Member
from pdxfer.connector.notices import Notices
from pdxfer.connector.recovery import Recovery
from pdxfer.connector.references import References
from pdxfer.connector.requests import prompt_digest
from pdxfer.connector.transfer import ROUTER_LOST_S, Receive, ReceiveState
from pdxfer.core.clock import Clock
from pdxfer.wire.halves import Fenced, Landed, Revoke
from pdxfer.wire.messages import LegFailed, Outcome, Started
from pdxfer.wire.store_facts import Loaded

log = logging.getLogger(__name__)


class Receives:
    """All transfers and loads that come to this engine."""

    def __init__(
        self,
        engine_id: str,
        facts: EngineFacts,
        member: Member,
        references: References,
        loads: Loads | None,
        clock: Clock,
        max_resumes: int = 1,
    ) -> None:
        """A transfer whose prefill fails goes on with another one at most `max_resumes` times."""
        self._engine_id, self._facts, self._member, self._references = engine_id, facts, member, references
        self._loads, self._clock = loads, clock
        self._notices = Notices(member, facts.block_size)
        self._by_request: dict[str, Receive] = {}
        self._by_transfer: dict[str, Receive] = {}
        self._verdicts: dict[str, frozenset[int]] = {}
        """Request id → invalid blocks given to the workers, not yet seen in a step's output."""
        self._told_over: set[str] = set()
        """Abandoned receives whose finished_recving was given."""
        self.counters: dict[str, float] = {}
        self._recovery = Recovery(
            member, self._notices, loads, clock, block_size=facts.block_size, max_resumes=max_resumes,
            unpair=self._unpair, count=self._count,
        )  # fmt: skip

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

    def matched_tokens(self, request: Request, num_computed: int) -> tuple[int | None, bool]:
        """Tokens that come from outside beyond `num_computed`: None asks again, (n, True) loads asynchronously."""
        receive = self._by_request.get(request.request_id)
        if receive is not None and receive.state is ReceiveState.WAITING:
            if self._clock.now() < receive.deadline:
                return None, False
            self.give_up(receive, "prefill did not start before the deadline")
        end = self._loads.stored_end(request) if self._loads is not None else 0
        if end is None:
            return None, False
        if receive is not None and receive.state is ReceiveState.READY:
            end = receive.num_tokens
            if end <= num_computed:
                self.give_up(receive, "nothing to load")
        return (end - num_computed, True) if end > num_computed else (0, False)

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        """vLLM has allocated the destination: fill it. Called again after the load, with 0."""
        receive = self._by_request.get(request.request_id)
        paired = receive is not None and receive.state is ReceiveState.READY
        if receive is not None and paired and not num_external:
            self.give_up(receive, "nothing to load")
        if not num_external:
            return
        if receive is None or not paired:
            receive = self._begin_load(request, receive)
        chunks = self._loads.lookups.claimed(request.request_id) if self._loads is not None else []
        end = receive.num_tokens if paired else chunks[-1][0].end
        size = self._facts.block_size
        first_block, total_blocks = (end - num_external) // size, -(-end // size)
        num_stored = min(self._loads.num_blocks(chunks, first_block), total_blocks - first_block) if self._loads else 0
        receive.granted(first_block, list(blocks.get_block_ids()[0][first_block:total_blocks]), num_stored)
        if self._loads is not None and num_stored:
            self._loads.start(receive, chunks)
        if receive.wire is not None:
            receive.token_digest = prompt_digest(request)
            self._notices.grant(receive, self._engine_id)
        elif paired:
            self._unpair(receive, "unused", "the store has all of it")

    def _begin_load(self, request: Request, before: Receive | None) -> Receive:
        """A receive without a transfer; what an earlier one of this request did is over."""
        if before is not None:
            assert before.state in (ReceiveState.REPORTED, ReceiveState.LOCAL), before.state
            self._forget(before)
        assert self._loads is not None
        receive = Receive(
            request_id=request.request_id,
            transfer_id="",
            num_tokens=request.num_tokens,
            world_size=self._facts.world_size,
            deadline=self._clock.now() + self._loads.timeout_s + LOAD_GRACE_S,
            state=ReceiveState.READY,
        )
        self._by_request[request.request_id] = receive
        return receive

    # ---- each step ---------------------------------------------------------------------------------------------------

    def take_verdicts(self, output: SchedulerOutput) -> tuple[int, ...]:
        """Blocks of receives that failed and are fenced: workers give them to vLLM as load errors in this step."""
        invalid: list[int] = []
        for receive in self._by_request.values():
            if receive.state is ReceiveState.REPORTED and not receive.scheduled:
                if receive.request_id in output.num_scheduled_tokens:
                    receive.scheduled = True
                    self._notices.stamp(receive, "scheduled")
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

    def started(self, receive: Receive, started: Started) -> None:
        """A prefill's first step was scheduled: the first one's, or of one that takes over."""
        if receive.resumed(started.prefill_id, started.epoch):
            self._count("resumed_transfers")
            log.info("%s: %s sends the rest", receive.name, started.prefill_id)
            self._notices.grant(receive, self._engine_id)
        elif started.epoch == receive.epoch:
            receive.started(started.prefill_id)

    def leg_failed(self, receive: Receive, failed: LegFailed) -> None:
        """A leg is over; a prefill that was given up already does not count."""
        if failed.leg == "decode" or failed.epoch == receive.epoch:
            leg = f"{failed.leg} leg failed: "  # a resume that is refused repeats why it was asked for
            self.give_up(receive, leg + failed.reason.removeprefix(leg))

    def rank_landed(self, receive: Receive, landed: Landed) -> None:
        """All units are in place on one rank."""
        if landed.epoch != receive.epoch:
            return
        receive.num_units += landed.num_units
        receive.num_bytes += landed.num_bytes
        receive.channel = landed.channel
        receive.rank_landed(landed.rank)
        if receive.state is ReceiveState.LANDED:
            self._notices.stamp(receive, "landed", landed.wall)
        self._recovery.recover(receive)

    def rank_fenced(self, receive: Receive, fenced: Fenced) -> None:
        """The grant is over on one rank; everything else that is out comes back too."""
        if fenced.epoch != receive.epoch:
            return
        receive.num_units += fenced.num_units
        receive.num_bytes += fenced.num_bytes
        if receive.rank_fenced(fenced.rank, fenced.num_valid, fenced.reason):
            self._revoke(receive, fenced.reason)
        self._recovery.recover(receive)

    def rank_loaded(self, loaded: Loaded) -> None:
        """One rank's part of a load is over."""
        receive = self._loads.get(loaded.load_id) if self._loads is not None else None
        if receive is None or self._loads is None:
            log.debug("ignored %s", loaded)
            return
        self._count("loaded_bytes", loaded.num_bytes)
        self._count("loaded_chunks", loaded.num_chunks)
        if self._loads.rank_loaded(receive, loaded):
            self._revoke(receive, loaded.reason)
        self._recovery.resume(receive)

    def give_up(self, receive: Receive, reason: str) -> None:
        """Compute here what is missing; what was granted is taken back first."""
        if receive.state is ReceiveState.RESUMING:
            log.info("%s: %s; it is not resumed", receive.name, reason)
            receive.give_up(reason)
            return
        if receive.state not in (ReceiveState.WAITING, ReceiveState.READY, ReceiveState.GRANTED):
            return
        self._count("fallbacks" if receive.transfer_id else "load_failures")
        log.info("%s: %s; what is missing is computed here", receive.name, reason)
        revoke = receive.give_up(reason)
        self._notices.cancel(receive, reason)
        if revoke:
            self._revoke(receive, reason)
        else:
            self._notices.ended(receive, "unused", reason)
            if self._loads is not None:
                self._loads.lookups.refresh(receive.request_id)

    def request_over(self, request: Request) -> bool:
        """The request has ended, before vLLM frees its blocks. False: it is none of ours."""
        receive = self._by_request.get(request.request_id)
        if receive is None:
            return False
        before = receive.state
        if not receive.over():
            if before in (ReceiveState.WAITING, ReceiveState.READY):
                self._notices.cancel(receive, "request over")
                self._notices.ended(receive, "aborted", "request over")
            self._forget(receive)
        elif before is ReceiveState.RESUMING:
            self._notices.cancel(receive, "request over")
        elif before in (ReceiveState.GRANTED, ReceiveState.REVOKING):
            self._references.quarantine(receive.request_id, receive.block_ids)
            self._notices.cancel(receive, "request over")
            if receive.give_up("request over"):
                self._revoke(receive, "request over")
        return True

    def router_lost(self, now: float) -> None:
        """A Started or a Grant may be lost with it. Whoever waits for the one computes; a granted transfer, which may
        have begun, gets ROUTER_LOST_S."""
        for receive in self._by_request.values():
            is_granted = receive.state is ReceiveState.GRANTED
            receive.deadline = min(receive.deadline, now + (ROUTER_LOST_S if is_granted else 0.0))
            receive.resume_by = min(receive.resume_by, now)

    def check_deadlines(self, now: float) -> None:
        """Grants that were not filled in time, prefills that did not take over in time."""
        for receive in list(self._by_request.values()):
            if receive.state is ReceiveState.RESUMING and now >= receive.resume_by:
                self.give_up(receive, "no other prefill has started in time")
            if receive.state is ReceiveState.GRANTED and now >= receive.deadline:
                self.give_up(receive, "deadline passed before all blocks were filled")

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _revoke(self, receive: Receive, reason: str) -> None:
        """Take back everything that is out."""
        if receive.wire is not None and receive.transfer_id:
            revoke = Revoke(transfer_id=receive.transfer_id, epoch=receive.epoch, reason=reason[:1000])
            self._member.tell_workers(revoke)
        if self._loads is not None:
            self._loads.stop(receive)

    def _unpair(self, receive: Receive, outcome: Outcome, reason: str) -> None:
        """The transfer is over; the receive goes on from the store alone."""
        self._notices.cancel(receive, reason)
        self._notices.ended(receive, outcome, reason)
        self._by_transfer.pop(receive.transfer_id, None)
        receive.transfer_id = ""

    def _delivered(self, receive: Receive) -> None:
        if receive.transfer_id:
            self._count("received_transfers")
            self._count("received_bytes", receive.num_bytes)
            self._count("received_units", receive.num_units)
        if receive.stored is not None:
            self._count("loaded_requests")
        self._notices.ended(receive, "delivered")

    def _recomputing(self, receive: Receive) -> None:
        self._count("failed_transfers" if receive.transfer_id else "load_failures")
        self._count("recomputed_blocks", len(receive.invalid_blocks))
        good, total = receive.num_valid, len(receive.block_ids)
        log.warning(
            "%s: %s; %d of %d blocks are good, the rest is computed here", receive.name, receive.reason, good, total
        )
        self._notices.cancel(receive, receive.reason)
        self._notices.ended(receive, "failed", receive.reason)

    def _close(self, receive: Receive) -> None:
        """An abandoned receive is quiet: its quarantined blocks go back."""
        self._references.release(receive.request_id)
        self._notices.ended(receive, "aborted", receive.reason or "request over")
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
