"""prefill's transfers in the scheduler half: plan blocks as they become final, hold them, let them go.

Step 4, 7 and 11 of the request's life (docs/design.md). EngineCore thread only.
"""

import logging
from collections.abc import Iterable

from pdxfer.connector.compat import Request, SchedulerOutput
from pdxfer.connector.member import EngineFacts, Member
from pdxfer.connector.references import References
from pdxfer.connector.requests import computed_before, prompt_digest, tenant_of, written_blocks
from pdxfer.connector.transfer import ROUTER_LOST_S, Send
from pdxfer.node.plan import SendPlan
from pdxfer.wire.halves import Forget
from pdxfer.wire.messages import Started

log = logging.getLogger(__name__)

WHOLE = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
"""Ends of a prefill request after which its KV is right: one token was sampled, EOS or not."""


class Sends:
    """All transfers that leave this engine."""

    def __init__(self, facts: EngineFacts, member: Member, references: References) -> None:
        self._facts, self._member, self._references = facts, member, references
        self._by_request: dict[str, Send] = {}
        self._by_transfer: dict[str, Send] = {}
        self.num_sent = 0
        self.num_unsent = 0

    def begin(self, request: Request, transfer_id: str, deadline: float) -> None:
        """A prefill leg has arrived."""
        send = Send(
            request_id=request.request_id,
            transfer_id=transfer_id,
            num_tokens=request.num_prompt_tokens,
            total_blocks=-(-request.num_prompt_tokens // self._facts.block_size),
            token_digest=prompt_digest(request),
            world_size=self._facts.world_size,
            deadline=deadline,
            tenant=tenant_of(request),
        )
        self._by_request[request.request_id] = self._by_transfer[transfer_id] = send

    def get(self, transfer_id: str) -> Send | None:
        """The transfer with this id."""
        return self._by_transfer.get(transfer_id)

    def plans(self, output: SchedulerOutput) -> Iterable[SendPlan]:
        """Blocks that become final in this step, over all requests of ours in it."""
        sends = [self._by_request[r] for r in output.num_scheduled_tokens if r in self._by_request]
        if not sends:
            return
        assert output.kv_connector_block_state is not None
        computed = computed_before(output)
        for send in sends:
            table = output.kv_connector_block_state.get_block_ids(send.request_id)
            if table is not None and not send.ending and not send.request_over:
                yield from self._plan(send, table[0], computed[send.request_id], output)

    def _plan(self, send: Send, table: list[int], begin: int, output: SchedulerOutput) -> Iterable[SendPlan]:
        if not send.started:
            send.started = True
            self._member.tell_router(Started(transfer_id=send.transfer_id, num_tokens=send.num_tokens))
            self._member.stamp(send.transfer_id, "started")
        last = send.plan_to(begin + output.num_scheduled_tokens[send.request_id], self._facts.block_size)
        if last <= send.num_planned:
            return
        blocks = tuple(table[send.num_planned : last])
        self._references.take(blocks)
        send.held.extend(blocks)
        yield SendPlan(
            transfer_id=send.transfer_id,
            first_block=send.num_planned,
            block_ids=blocks,
            num_ready=self._num_ready(send, begin, blocks, output),
            total_blocks=send.total_blocks,
            num_tokens=send.num_tokens,
            token_digest=send.token_digest,
            tenant=send.tenant,
            deadline=send.deadline,
        )
        send.num_planned = last

    def _num_ready(self, send: Send, begin: int, blocks: tuple[int, ...], output: SchedulerOutput) -> int:
        """Leading blocks of the plan that were final before this step: prefix hits that no request writes in it."""
        hits = begin // self._facts.block_size - send.num_planned
        if hits <= 0 or not self._facts.plans_ready_hits:
            return 0
        written = written_blocks(output, self._facts.block_size)
        return next((i for i, block in enumerate(blocks[:hits]) if block in written), hits)

    # ---- ends --------------------------------------------------------------------------------------------------------

    def request_over(self, request: Request) -> Send | None:
        """The prefill request has ended. None: it is none of ours."""
        send = self._by_request.get(request.request_id)
        if send is None:
            return None
        send.request_over = True
        if send.num_planned == send.total_blocks and request.status.name in WHOLE:
            self.computed(send, None)
        else:
            self.end(send, f"prefill ended early: {request.status.name}")
        self._settle(send)
        return send

    def computed(self, send: Send, wall: float | None) -> None:
        """The whole prompt is computed: at `wall` by a worker's clock, or now."""
        if not send.computed:
            send.computed = True
            self._member.stamp(send.transfer_id, "prefilled", wall)

    def end(self, send: Send, reason: str) -> None:
        """Send nothing more and tell decode not to wait."""
        if not send.ending:
            self._member.leg_failed(send.transfer_id, "prefill", reason)
            self.cancel(send, reason)

    def cancel(self, send: Send, reason: str) -> None:
        """Send nothing more; decode knows. References return when every rank has settled."""
        if not send.ending:
            send.ending = reason or "cancelled"
            self._member.tell_workers(Forget(transfer_id=send.transfer_id, reason=send.ending[:1000]))

    def rank_settled(self, send: Send, rank: int, delivered: bool, reason: str) -> None:
        """This rank reads nothing of it any more."""
        send.rank_settled(rank, delivered)
        if not delivered:
            self.end(send, reason or "not delivered")
        self._settle(send)

    def _settle(self, send: Send) -> None:
        if not (send.is_settled and send.request_over):
            return
        if send.delivered:
            self.num_sent += 1
        else:
            self.num_unsent += 1
        self._references.give_back(send.held)
        self._by_request.pop(send.request_id, None)
        self._by_transfer.pop(send.transfer_id, None)

    def router_lost(self, now: float) -> None:
        """A Grant may be lost with it, or the word of a decode that computes by itself: neither is waited for long."""
        for send in self._by_request.values():
            send.deadline = min(send.deadline, now + ROUTER_LOST_S)

    def check_deadlines(self, now: float) -> None:
        """Prefills that are over and whose grant did not come, or whose units could not be written in time."""
        for send in list(self._by_request.values()):
            if send.request_over and now >= send.deadline:
                self.end(send, "no grant, or not all written, before the deadline")

    # ---- seen from outside -------------------------------------------------------------------------------------------

    @property
    def unsettled(self) -> bool:
        """Some send is not over."""
        return bool(self._by_request)

    @property
    def must_step(self) -> bool:
        """Requests are over but their blocks are not back."""
        return any(send.request_over for send in self._by_request.values())

    @property
    def holds_blocks(self) -> bool:
        """Blocks of requests that are over come back soon, by themselves: worth waiting for instead of preempting.

        Blocks of a prompt that is still being computed do not count: it may need the very step that would be put off.
        """
        return any(s.request_over and s.held and (s.granted or s.ending) for s in self._by_request.values())
