"""The half in EngineCore: vLLM's hooks, each a few lines over Receives (decode) and Sends (prefill).

Hooks run on the EngineCore thread, never block and touch only memory: messages from the router client's and the half
link's threads wait in the member's inbox, which every hook empties first.
"""

import logging
import queue
from dataclasses import dataclass
from types import NoneType

from pdxfer.connector.compat import BlockPool, KVCacheBlocks, KVConnectorOutput, Request, SchedulerOutput
from pdxfer.connector.member import EngineFacts, Member, RouterLost
from pdxfer.connector.receives import Receives
from pdxfer.connector.references import References
from pdxfer.connector.requests import transfer_params, unsupported
from pdxfer.connector.sends import Sends
from pdxfer.connector.settings import ConnectorSettings
from pdxfer.connector.spills import Spills
from pdxfer.connector.store_half import StoreHalf
from pdxfer.connector.transfer import Receive, Send
from pdxfer.core.clock import SYSTEM_CLOCK, Clock
from pdxfer.kv.chunks import identity_digest
from pdxfer.node.plan import SavePlan, SendPlan
from pdxfer.wire.halves import Computed, Fenced, Landed, Settled, ToScheduler, WorkerReady
from pdxfer.wire.messages import CancelGrant, Drain, FromRouter, Grant, LegFailed, Refused, Started
from pdxfer.wire.store_facts import Found, Held, Loaded, Saved, StoreCounts

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.005
"""Longest wait for news in a step that computes nothing. vLLM would spin through such steps at 1 kHz in two processes,
half a core that the prefill next door needs; news end the wait at once, a new request waits at most this long."""


@dataclass(slots=True)
class StepMeta:
    """What one step tells the workers."""

    plans: tuple[SendPlan, ...] = ()
    saves: tuple[SavePlan, ...] = ()
    invalid_blocks: tuple[int, ...] = ()
    """Blocks of failed receives; workers return them as load errors in this very step."""
    unsettled: bool = False
    """Workers must answer with metadata so that update_connector_output runs."""
    num_tokens: int = 0
    """Scheduled in it."""


class SchedulerHalf:
    """Receives, sends and the store of one engine, as EngineCore sees them."""

    def __init__(self, settings: ConnectorSettings, facts: EngineFacts, clock: Clock = SYSTEM_CLOCK) -> None:
        self._settings, self._facts, self._clock = settings, facts, clock
        self._member = Member(settings, facts, clock)
        self._references = References()
        self._store: StoreHalf | None = None
        if settings.store.enabled:
            chunk = settings.chunk_tokens
            self._store = StoreHalf(settings.store, chunk, facts, self._member, self._references, clock)
        loads = self._store.loads if self._store is not None else None
        self._receives = Receives(
            settings.engine_id, facts, self._member, self._references, loads, clock, settings.max_resumes
        )
        self._sends = Sends(facts, self._member, self._references)
        self._spills: Spills | None = None
        if self._store is not None and self._store.spills:
            self._spills = Spills(self._sends, self._store.saves, settings.spill_after_s)
        self._early: dict[str, Started | LegFailed | CancelGrant] = {}
        """Messages about transfers whose request has not arrived yet (bounded)."""

    def bind(self, pool: BlockPool) -> None:
        """vLLM's block pool exists."""
        self._references.bind(pool)

    def close(self) -> None:
        """Leave the router and the half link."""
        self._member.close()

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """A request has arrived: begin its transfer, if it has one, and look it up in the store."""
        self._drain_inbox()
        self._member.presence.arrived(request.request_id)
        if self._store is not None:
            self._store.on_new_request(request)
        params = transfer_params(request, self._settings.role)
        if params is None:
            return
        transfer_id = params.transfer_id
        if self._sends.get(transfer_id) or self._receives.get(transfer_id):
            log.warning("%s is named by a second request; %s is computed here", transfer_id, request.request_id)
            return
        if reason := unsupported(request):
            log.info("%s is not moved: %s", transfer_id, reason)
            self._member.leg_failed(transfer_id, params.leg, reason)
            return
        self._member.leg_begins(transfer_id, params.traceparent)
        deadline = self._clock.now() + min(params.deadline_s, self._settings.max_deadline_s)
        if params.leg == "prefill":
            self._sends.begin(request, transfer_id, deadline)
        else:
            self._receives.begin(request, transfer_id, deadline)
        if early := self._early.pop(transfer_id, None):
            self._apply(early)
        if not self._member.is_connected:  # paired by a router that was lost before this request came
            self._apply(RouterLost())

    def matched_tokens(self, request: Request, num_computed: int) -> tuple[int | None, bool]:
        """How much of this prompt will come over the wire or from the store."""
        self._drain_inbox()
        return self._receives.matched_tokens(request, num_computed)

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        """Destination blocks exist."""
        self._receives.allocated(request, blocks, num_external)

    def build_meta(self, output: SchedulerOutput) -> StepMeta:
        """What this step tells the workers."""
        if not output.num_scheduled_tokens and self._awaits_news:
            self._await_news()
        self._drain_inbox()
        self._member.presence.stepped(output.num_scheduled_tokens)
        now = self._clock.now()
        self._receives.check_deadlines(now)
        self._sends.check_deadlines(now)
        if self._spills is not None:
            self._spills.check(now)
        plans, verdicts = tuple(self._sends.plans(output)), self._receives.take_verdicts(output)
        saves: tuple[SavePlan, ...] = ()
        if self._store is not None:
            saves = self._store.saves.plan(output)
            self._store.lookups.step_over()
        unsettled = self._sends.unsettled or self._receives.unsettled
        return StepMeta(plans, saves, verdicts, unsettled, num_tokens=sum(output.num_scheduled_tokens.values()))

    def update(self, output: KVConnectorOutput) -> None:
        """After a step: tell vLLM which receives are finished."""
        self._drain_inbox()
        self._receives.report(output)

    def finished(self, request: Request, block_ids: list[int]) -> None:
        """The request is over: called exactly once, before vLLM frees its blocks."""
        self._drain_inbox()
        self._member.presence.left(request.request_id)
        chunks = self._store.chunks(request) if self._store is not None else None
        if self._store is not None:
            self._store.request_over(request, block_ids)
        send = self._sends.request_over(request)
        if send is None:
            self._receives.request_over(request)
            if params := transfer_params(request, self._settings.role):
                self._member.decode_over(params.transfer_id)
        elif self._spills is not None and chunks is not None:
            self._spills.request_over(send, chunks, self._clock.now())

    def reset(self) -> None:
        """Nothing stored so far may be loaded again."""
        if self._store is not None:
            self._store.reset()

    @property
    def must_step(self) -> bool:
        """Keep an idle engine stepping: references are out that only a hook can return."""
        self._drain_inbox()
        saving = self._store is not None and self._store.saves.must_step
        return saving or self._sends.must_step or bool(self._references.num_quarantined)

    @property
    def references_out(self) -> bool:
        """Blocks will come back without preempting anybody."""
        saving = self._store is not None and self._store.saves.holds_blocks
        return saving or self._sends.holds_blocks or bool(self._references.num_quarantined)

    @property
    def _awaits_news(self) -> bool:
        """Something outside is under way whose end lets the engine go on."""
        store = self._store
        storing = store is not None and (store.lookups.waiting or store.saves.must_step)
        return storing or self._receives.unsettled or self._sends.must_step

    def take_counters(self) -> dict[str, float]:
        """What was counted since the last call."""
        counters, self._receives.counters = self._receives.counters, {}
        sent, unsent = self._sends.num_sent, self._sends.num_unsent
        self._sends.num_sent = self._sends.num_unsent = 0
        if self._store is not None:
            counters |= self._store.take_counters()
        if self._spills is not None and self._spills.num_spilled:
            counters["spilled_prompts"], self._spills.num_spilled = self._spills.num_spilled, 0
        counters |= {k: v for k, v in (("sent_transfers", sent), ("unsent_transfers", unsent)) if v}
        self._member.totals.update({name: int(value) for name, value in counters.items()})
        return counters

    # ---- inbox -------------------------------------------------------------------------------------------------------

    def _await_news(self) -> None:
        try:
            self._apply(self._member.inbox.get(timeout=IDLE_WAIT_S))
        except queue.Empty:
            return

    def _drain_inbox(self) -> None:
        inbox = self._member.inbox
        while not inbox.empty():
            self._apply(inbox.get())
        self._member.free_blocks = self._references.free_blocks(self._facts.num_blocks)

    def _apply(self, message: FromRouter | ToScheduler | RouterLost) -> None:
        match message:
            case RouterLost():
                self._receives.router_lost(self._clock.now())
                self._sends.router_lost(self._clock.now())
            case Loaded():
                self._receives.rank_loaded(message)
            case Found() | Saved() | Held() | StoreCounts():
                if self._store is not None:
                    self._store.apply(message)
            case WorkerReady():
                if self._store is not None:
                    self._store.grid.identities[message.rank] = identity_digest(message.identity)
            case _:
                self._apply_transfer(message)

    def _apply_transfer(self, message: FromRouter | ToScheduler) -> None:
        transfer_id = getattr(message, "transfer_id", "")
        match message, self._receives.get(transfer_id) or self._sends.get(transfer_id):
            case Landed(), Receive() as receive:
                self._receives.rank_landed(receive, message)
            case Fenced(), Receive() as receive:
                self._receives.rank_fenced(receive, message)
            case Started(), Receive() as receive:
                self._receives.started(receive, message)
            case LegFailed(), Receive() as receive:
                self._receives.leg_failed(receive, message)
            case Computed(), Send() as send:
                self._sends.computed(send, message.wall)
            case Settled(), Send() as send:
                self._sends.rank_settled(send, message.rank, message.delivered, message.reason)
            case ((LegFailed() | CancelGrant()), Send() as send):
                self._sends.cancel(send, message.reason)
            case Grant(), None:
                self._member.leg_failed(transfer_id, "prefill", "prefill has forgotten this transfer")
            case Grant(), Send() as send:
                send.granted = True
            case ((Started() | LegFailed() | CancelGrant()), None):
                self._remember(message)
            case Refused(), _:
                log.error("the router refuses this engine: %s", message.reason)
            case Drain(), _:
                log.info("router: %s", "no new work" if message.on else "taking work again")
            case _:
                log.debug("ignored %s", message)

    def _remember(self, message: Started | LegFailed | CancelGrant) -> None:
        """An end outlives a start."""
        if isinstance(self._early.get(message.transfer_id), Started | NoneType):
            self._early[message.transfer_id] = message
        while len(self._early) > self._settings.max_early:
            self._early.pop(next(iter(self._early)))
