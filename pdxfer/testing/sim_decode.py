"""The simulated decode engine: connector.transfer.Receive decides; here are its blocks and what vLLM would be told.

Follows connector.receives: grant, report, recompute what is missing, quarantine what an aborted request leaves.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from pdxfer.connector.transfer import Receive, ReceiveState
from pdxfer.testing.sim_engine import BLOCK, STEP_S, SimEngine
from pdxfer.testing.sim_receiver import SimReceiver
from pdxfer.testing.sim_world import World
from pdxfer.wire.halves import Fenced, Generation, Landed
from pdxfer.wire.messages import CancelGrant, Ended, FromRouter, Grant, LegFailed, Outcome, Resume, Started

RECEIVE_S = 2.0
MAX_RESUMES, RESUME_SHARE = 1, 0.5
"""As connector/recovery.py has them."""
Reply = Callable[[bool], None]


@dataclass(eq=False, slots=True)
class Job:
    """One decode leg."""

    request_id: str
    owner: str
    """Of its blocks: the transfer, or the leg if there is none."""
    num_tokens: int
    reply: Reply
    receive: Receive | None
    blocks: list[int] = field(default_factory=list)
    ends_at: float = 0.0
    """Decoding until then; 0: not yet."""


class SimDecode(SimEngine):
    """Receives or computes prompts, then decodes."""

    def __init__(self, world: World, name: str) -> None:
        self.jobs: dict[str, Job] = {}
        self.early: dict[str, Started | LegFailed] = {}
        self.num_resumed = 0
        """Transfers that another prefill took over."""
        super().__init__(world, name, "decode")

    def _begin(self) -> None:
        super()._begin()
        self.generation = 0
        self.receiver = SimReceiver(self, self._report)

    def leg(self, request_id: str, leg_id: str, transfer_id: str, num_tokens: int, reply: Reply) -> None:
        """A decode leg arrived over HTTP."""
        receive = None
        if transfer_id:
            receive = Receive(request_id, transfer_id, num_tokens, 1, self.world.now + RECEIVE_S)
        self.jobs[leg_id] = Job(request_id, transfer_id or leg_id, num_tokens, reply, receive)
        early = self.early.pop(transfer_id, None)
        if early is not None:
            self._apply(early)
        self.world.at(self.world.rng.uniform(0, STEP_S), self, self.step, leg_id)

    def crash(self, seconds: float) -> None:
        super().crash(seconds)
        for job in self.jobs.values():
            job.reply(False)
        self.jobs.clear()
        self.early.clear()

    # ---- steps -----------------------------------------------------------------------------------------------

    def step(self, leg_id: str) -> None:
        """An engine step with this request in it."""
        job = self.jobs.get(leg_id)
        if job is None:
            return
        if job.ends_at:
            if self.world.now >= job.ends_at:
                self._finish(leg_id, job)
                return
        elif job.receive is None or job.receive.state is ReceiveState.LOCAL:
            job.blocks = self.take(-(-job.num_tokens // BLOCK), job.owner)
            if job.blocks:
                self._run(job, 0)
        elif self._step_receive(leg_id, job, job.receive):
            return
        self.world.at(STEP_S, self, self.step, leg_id)

    def _step_receive(self, leg_id: str, job: Job, receive: Receive) -> bool:
        """True: the job is over."""
        state, late = receive.state, self.world.now >= receive.deadline
        if receive.abandoned:
            if receive.quiet:
                self._ended(receive, "aborted")
                self._forget(leg_id, job)
            return receive.quiet
        if state is ReceiveState.READY and not late:
            job.blocks = self.take(-(-job.num_tokens // BLOCK), job.owner)
            if job.blocks:
                receive.granted(0, list(job.blocks))
                self._grant(receive)
        elif state is ReceiveState.FENCED and self._resume(job, receive):
            return False
        elif state is ReceiveState.RESUMING and self.world.now >= receive.resume_by:
            receive.give_up("no other prefill has started in time")
        elif state in (ReceiveState.WAITING, ReceiveState.READY, ReceiveState.GRANTED) and late:
            self._give_up(receive, "deadline")
        elif state in (ReceiveState.LANDED, ReceiveState.FENCED):
            num_valid = receive.num_valid
            if state is ReceiveState.FENCED:
                self._cancel(receive, receive.reason)
            self._ended(receive, "delivered" if state is ReceiveState.LANDED else "failed")
            receive.state = ReceiveState.REPORTED
            self._run(job, num_valid)
        return False

    def _resume(self, job: Job, receive: Receive) -> bool:
        """Ask for another prefill if that may help."""
        left_s = receive.deadline - self.world.now
        if not receive.is_resumable or receive.epoch > MAX_RESUMES or left_s <= 0:
            return False
        self._cancel(receive, receive.reason)
        receive.resume(self.world.now + RESUME_SHARE * left_s)
        self.send(
            Resume(
                transfer_id=receive.transfer_id, epoch=receive.epoch, first_missing=receive.num_good,
                num_missing_tokens=receive.num_tokens - receive.num_good * BLOCK, reason=receive.reason,
            )
        )  # fmt: skip
        return True

    def _grant(self, receive: Receive) -> None:
        assert receive.wire is not None
        key = (receive.transfer_id, receive.epoch)
        first_block, blocks = receive.wire.at, receive.block_ids[receive.wire.at :]
        self.writable |= dict.fromkeys(receive.block_ids, 0) | dict.fromkeys(blocks, receive.epoch)
        channel = self.channels[receive.prefill_id]
        self.world.in_order((self, "worker"), self, self.receiver.expect, key, channel, blocks)
        self.send(
            Grant(
                transfer_id=key[0], epoch=key[1], decode_id=self.name, decode_incarnation=self.life,
                first_block=first_block, block_ids=blocks, num_tokens=receive.num_tokens, token_digest=b"d",
                generations=[self.generation],
            )
        )  # fmt: skip

    def _run(self, job: Job, num_valid: int) -> None:
        """Compute what is missing; from now on its KV is read."""
        self.writable |= dict.fromkeys(job.blocks, 0)
        for index in range(num_valid, len(job.blocks)):
            self.memory[job.blocks[index]] = (job.request_id, index)
        self._look(job)
        job.ends_at = self.world.now + self.world.rng.uniform(0.01, 0.5)

    def _look(self, job: Job) -> None:
        for index, block in enumerate(job.blocks):
            if self.memory.get(block) != (job.request_id, index):
                self.world.violated(f"{job.owner} reads {self.memory.get(block)} as block {index} of {job.request_id}")

    def _finish(self, leg_id: str, job: Job) -> None:
        self._look(job)
        job.reply(True)
        self._forget(leg_id, job)

    def _forget(self, leg_id: str, job: Job) -> None:
        self.give(job.blocks)
        del self.jobs[leg_id]

    # ---- events ----------------------------------------------------------------------------------------------

    def abort(self, leg_id: str) -> None:
        """The HTTP connection of this leg closed."""
        job = self.jobs.get(leg_id)
        if job is None:
            return
        receive = job.receive
        before = receive.state if receive is not None else None
        if receive is None or not receive.over():
            if receive is not None and before in (ReceiveState.WAITING, ReceiveState.READY):
                self._cancel(receive, "request over")
                self._ended(receive, "aborted")
            self._forget(leg_id, job)
        elif before in (ReceiveState.GRANTED, ReceiveState.REVOKING, ReceiveState.RESUMING):
            self._cancel(receive, "request over")
            if receive.give_up("request over"):
                self._revoke(receive)

    def on_message(self, route: bytes, message: FromRouter) -> None:
        if isinstance(message, Started | LegFailed) and not self._apply(message):
            before = self.early.get(message.transfer_id)
            if not isinstance(before, LegFailed):
                self.early[message.transfer_id] = message

    def _apply(self, message: Started | LegFailed) -> bool:
        receive = self._find(message.transfer_id)
        if receive is None:
            return False
        if isinstance(message, Started):
            if receive.resumed(message.prefill_id, message.epoch):
                self.num_resumed += 1
                self._grant(receive)
            elif message.epoch == receive.epoch:
                receive.started(message.prefill_id)
        elif message.leg == "decode" or message.epoch == receive.epoch:
            self._give_up(receive, message.reason)
        return True

    def _report(self, fact: Landed | Fenced | Generation) -> None:
        self.world.in_order((self, "sched"), self, self._on_fact, fact)

    def _on_fact(self, fact: Landed | Fenced | Generation) -> None:
        if isinstance(fact, Generation):
            self.generation = fact.number
            return
        receive = self._find(fact.transfer_id)
        if receive is None or fact.epoch != receive.epoch:
            return
        if isinstance(fact, Landed):
            receive.rank_landed(0)
        elif receive.rank_fenced(0, fact.num_valid, fact.reason):
            self._revoke(receive)

    def drained(self, transfer_id: str, epoch: int) -> None:
        """A notice of prefill, on the channel."""
        self.receiver.drained(transfer_id, epoch)

    # ---- parts -----------------------------------------------------------------------------------------------

    def _find(self, transfer_id: str) -> Receive | None:
        jobs = (job.receive for job in self.jobs.values() if job.receive is not None)
        return next((receive for receive in jobs if receive.transfer_id == transfer_id), None)

    def _give_up(self, receive: Receive, reason: str) -> None:
        if receive.state is ReceiveState.RESUMING:
            receive.give_up(reason)
        if receive.state not in (ReceiveState.WAITING, ReceiveState.READY, ReceiveState.GRANTED):
            return
        revoke = receive.give_up(reason)
        self._cancel(receive, reason)
        if revoke:
            self._revoke(receive)
        else:
            self._ended(receive, "unused")

    def _revoke(self, receive: Receive) -> None:
        key = (receive.transfer_id, receive.epoch)
        self.world.in_order((self, "worker"), self, self.receiver.revoke, key, receive.reason)

    def _cancel(self, receive: Receive, reason: str) -> None:
        self.send(CancelGrant(transfer_id=receive.transfer_id, reason=reason, epoch=receive.epoch))

    def _ended(self, receive: Receive, outcome: Outcome) -> None:
        self.send(
            Ended(
                transfer_id=receive.transfer_id, outcome=outcome, num_tokens=0, num_bytes=0, num_units=0, channel="nixl"
            )
        )  # fmt: skip
