"""The half in EngineCore: answers vLLM's scheduler, grants and plans, holds block references, tells vLLM what became of
a transfer.

Hooks run on the EngineCore thread, never block and touch only memory: messages from the router client's and the half
link's threads are put into an inbox that every hook empties first. Who decides is the machine in transfer.py; this
file carries its decisions out.
"""

import logging
import queue
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pdxfer.connector.compat import BlockPool, KVCacheBlocks, KVConnectorOutput, Request, SchedulerOutput
from pdxfer.connector.identity import digest_prompt
from pdxfer.connector.settings import ConnectorSettings
from pdxfer.connector.transfer import Receive, ReceiveState, Send
from pdxfer.core.clock import SYSTEM_CLOCK, Clock
from pdxfer.core.ids import new_incarnation
from pdxfer.node.plan import SendPlan
from pdxfer.router.client import MemberClient
from pdxfer.wire.halves import (
    Expect,
    Fenced,
    Forget,
    Landed,
    Listening,
    Revoke,
    SchedulerEnd,
    Settled,
    ToScheduler,
    Welcome,
    WorkerReady,
)
from pdxfer.wire.messages import (
    CancelGrant,
    Capacity,
    Drain,
    Ended,
    FromRouter,
    Grant,
    Heartbeat,
    Hello,
    Leg,
    LegFailed,
    Message,
    Outcome,
    Refused,
    Stage,
    Stamp,
    Started,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the scheduler half knows of its engine, read once from vLLM's config."""

    model: str
    served_names: list[str]
    num_blocks: int
    block_size: int
    max_model_len: int
    world_size: int
    plans_ready_hits: bool
    """Prefix hits may be sent before their step: True where no step overlaps another (no async scheduling)."""


@dataclass(slots=True)
class StepMeta:
    """What one step tells the workers (becomes KVConnectorMetadata)."""

    plans: tuple[SendPlan, ...] = ()
    invalid_blocks: tuple[int, ...] = ()
    """Verdicts: blocks of failed receives; workers return them as load errors in this very step."""
    unsettled: bool = False
    """Workers must answer with metadata so that update_connector_output runs."""


@dataclass(slots=True)
class Counters:
    """Since the last step; becomes KVConnectorStats."""

    values: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: float = 1) -> None:
        self.values[name] = self.values.get(name, 0) + value

    def take(self) -> dict[str, float]:
        values, self.values = self.values, {}
        return values


class SchedulerHalf:
    """Receives and sends of one engine, as EngineCore sees them."""

    def __init__(self, settings: ConnectorSettings, facts: EngineFacts, clock: Clock = SYSTEM_CLOCK) -> None:
        self._settings, self._facts, self._clock = settings, facts, clock
        self.incarnation = new_incarnation()
        self.counters = Counters()
        self._inbox: queue.SimpleQueue[FromRouter | ToScheduler] = queue.SimpleQueue()
        self._receives: dict[str, Receive] = {}
        """By request id."""
        self._sends: dict[str, Send] = {}
        self._by_transfer: dict[str, Receive | Send] = {}
        self._early: dict[str, FromRouter] = {}
        """Started / LegFailed that came before their request (bounded)."""
        self._quarantine: dict[str, list[int]] = {}
        """Transfer id → blocks we hold by reference although their request is over."""
        self._verdicts: dict[str, tuple[int, ...]] = {}
        """Request id → invalid blocks that were posted to the workers and are not confirmed yet."""
        self._reported_over: set[str] = set()
        """Abandoned receives whose finished_recving was given."""
        self._pool: BlockPool | None = None
        self._fingerprints: dict[int, dict[str, str]] = {}
        self._router: MemberClient | None = None
        self._halves = SchedulerEnd(settings.halves_path, facts.world_size, self._inbox_fact)
        self._halves.broadcast(Welcome(incarnation=self.incarnation))

    def bind(self, pool: BlockPool) -> None:
        """vLLM's block pool: where our references live."""
        self._pool = pool

    def close(self) -> None:
        """Leave the router and the half link."""
        if self._router is not None:
            self._router.close()
        self._halves.close()

    # ---- decode hooks ------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """A request has arrived: begin the machine of its transfer, if it has one."""
        self._drain_inbox()
        params = _params_of(request)
        if params is None:
            return
        transfer_id = params["transfer_id"]
        leg: Leg = params.get("leg") or ("prefill" if self._settings.role == "prefill" else "decode")
        deadline = self._clock.now() + min(float(params.get("deadline_s", 60.0)), self._settings.max_deadline_s)
        if transfer_id in self._by_transfer:
            log.warning("transfer %s is named by two requests; %s is computed here", transfer_id, request.request_id)
            return
        if reason := _unsupported(request):
            self._leg_failed(transfer_id, leg, reason)
            return
        if leg == "prefill":
            send = Send(
                request_id=request.request_id,
                transfer_id=transfer_id,
                num_tokens=request.num_prompt_tokens,
                total_blocks=-(-request.num_prompt_tokens // self._facts.block_size),
                token_digest=_digest(request),
                world_size=self._facts.world_size,
                deadline=deadline,
            )
            self._sends[request.request_id] = self._by_transfer[transfer_id] = send
            return
        receive = Receive(
            request_id=request.request_id,
            transfer_id=transfer_id,
            num_tokens=request.num_prompt_tokens,
            world_size=self._facts.world_size,
            deadline=deadline,
        )
        self._receives[request.request_id] = self._by_transfer[transfer_id] = receive
        if early := self._early.pop(transfer_id, None):
            self._apply(early)

    def matched_tokens(self, request: Request, num_computed: int) -> tuple[int | None, bool]:
        """Tokens that will come over the wire beyond `num_computed`: None asks again, (n, True) loads asynchronously."""
        self._drain_inbox()
        receive = self._receives.get(request.request_id)
        if receive is None:
            return 0, False
        if receive.state is ReceiveState.WAITING:
            if self._clock.now() < receive.deadline:
                return None, False
            self._give_up(receive, "prefill did not start before the deadline")
        if receive.state is not ReceiveState.READY:
            return 0, False
        missing = receive.num_tokens - num_computed
        if missing <= 0 or request.skip_reading_prefix_cache:
            self._give_up(receive, "nothing to load")
            return 0, False
        return missing, True

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        """Destination blocks exist: grant them."""
        receive = self._receives.get(request.request_id)
        if receive is None or receive.state is not ReceiveState.READY:
            return
        if not num_external:
            self._give_up(receive, "nothing to load")
            return
        table = blocks.get_block_ids()[0]
        size = self._facts.block_size
        first_block = (receive.num_tokens - num_external) // size
        total_blocks = -(-receive.num_tokens // size)
        receive.granted(first_block, list(table[first_block:total_blocks]))
        self._halves.broadcast(
            Expect(
                transfer_id=receive.transfer_id,
                epoch=receive.epoch,
                prefill_id=receive.prefill_id,
                first_block=first_block,
                block_ids=receive.block_ids,
            )
        )
        self._send(
            Grant(
                transfer_id=receive.transfer_id,
                epoch=receive.epoch,
                decode_id=self._settings.engine_id,
                decode_incarnation=self.incarnation,
                first_block=first_block,
                block_ids=receive.block_ids,
                num_tokens=receive.num_tokens,
                token_digest=_digest(request),
            )
        )
        self._stamp(receive.transfer_id, "granted")

    # ---- both: one step ----------------------------------------------------------------------------------------------

    def build_meta(self, output: SchedulerOutput) -> StepMeta:
        """What this step tells the workers."""
        self._drain_inbox()
        self._check_deadlines()
        meta = StepMeta(plans=tuple(self._plans(output)))
        for receive in self._receives.values():
            scheduled = output.num_scheduled_tokens.get(receive.request_id)
            if scheduled and receive.state is ReceiveState.REPORTED and not receive.scheduled:
                self._stamp(receive.transfer_id, "scheduled")
                receive.scheduled = True
            if receive.state is ReceiveState.FENCED and not receive.abandoned and receive.request_id not in self._verdicts:
                self._verdicts[receive.request_id] = tuple(receive.invalid_blocks)
                meta.invalid_blocks += tuple(receive.invalid_blocks)
        meta.unsettled = self.unsettled
        return meta

    @property
    def unsettled(self) -> bool:
        """Some transfer is not at its end: every step must come back to update()."""
        waiting = (ReceiveState.REPORTED, ReceiveState.LOCAL)
        return bool(self._sends or self._quarantine) or any(r.state not in waiting for r in self._receives.values())

    @property
    def must_step(self) -> bool:
        """Keep an idle engine stepping: references are out that only a hook can return."""
        self._drain_inbox()
        return bool(self._quarantine) or any(s.request_over for s in self._sends.values())

    @property
    def references_out(self) -> bool:
        """Blocks will come back without preempting anybody."""
        return bool(self._quarantine) or any(s.held for s in self._sends.values())

    def update(self, output: KVConnectorOutput) -> None:
        """After a step: tell vLLM which receives are finished, each exactly once."""
        self._drain_inbox()
        finished = set(output.finished_recving or ())
        for receive in list(self._receives.values()):
            if receive.abandoned:
                if receive.request_id not in self._reported_over:
                    self._reported_over.add(receive.request_id)
                    finished.add(receive.request_id)
                if receive.quiet:
                    self._close_receive(receive, "aborted")
            elif receive.state is ReceiveState.LANDED:
                finished.add(receive.request_id)
                receive.state = ReceiveState.REPORTED
                self._ended(receive, "delivered")
            elif receive.state is ReceiveState.FENCED:
                invalid = self._verdicts.get(receive.request_id)
                if invalid is not None and set(invalid) <= output.invalid_block_ids:
                    del self._verdicts[receive.request_id]
                    finished.add(receive.request_id)
                    receive.state = ReceiveState.REPORTED
                    self._recomputing(receive)
        output.finished_recving = finished or None

    def finished(self, request: Request) -> dict[str, Any] | None:
        """The request is over (done, aborted, failed): called exactly once, before vLLM frees its blocks."""
        self._drain_inbox()
        if (send := self._sends.get(request.request_id)) is not None:
            self._send_over(send, request)
            return None
        receive = self._receives.get(request.request_id)
        if receive is None:
            return None
        before = receive.state
        grant_out = before in (ReceiveState.GRANTED, ReceiveState.REVOKING)
        if not receive.over():
            if before in (ReceiveState.WAITING, ReceiveState.READY):
                self._cancel(receive, "request over")
                self._ended(receive, "aborted", "request over")
            self._forget_receive(receive)
            return None
        if grant_out:
            self._hold(receive.transfer_id, receive.block_ids)
            self._cancel(receive, "request over")
            self._halves.broadcast(Revoke(transfer_id=receive.transfer_id, epoch=receive.epoch, reason="request over"))
        return None

    # ---- decode inside -----------------------------------------------------------------------------------------------

    def _give_up(self, receive: Receive, reason: str) -> None:
        """Compute here; what was granted is taken back first."""
        log.info("%s: %s; %s", receive.transfer_id, reason, "the rest is computed here")
        self.counters.add("fallbacks")
        if receive.give_up(reason):
            self._halves.broadcast(Revoke(transfer_id=receive.transfer_id, epoch=receive.epoch, reason=reason))
        self._cancel(receive, reason)
        if receive.state is ReceiveState.LOCAL:
            self._ended(receive, "unused", reason)

    def _cancel(self, receive: Receive, reason: str) -> None:
        self._send(CancelGrant(transfer_id=receive.transfer_id, reason=reason[:1000]))

    def _recomputing(self, receive: Receive) -> None:
        self.counters.add("failed_transfers")
        self.counters.add("recomputed_blocks", len(receive.invalid_blocks))
        log.warning(
            "%s: %s; %d of %d blocks landed, the rest is computed here",
            receive.transfer_id, receive.reason, receive.num_valid, len(receive.block_ids),
        )
        self._cancel(receive, receive.reason)
        self._ended(receive, "failed", receive.reason)

    def _ended(self, receive: Receive, outcome: Outcome, reason: str = "") -> None:
        delivered = outcome == "delivered"
        if delivered:
            self.counters.add("received_transfers")
            self.counters.add("received_bytes", receive.num_bytes)
            self.counters.add("received_units", receive.num_units)
        self._send(
            Ended(
                transfer_id=receive.transfer_id,
                outcome=outcome,
                num_tokens=receive.num_tokens - receive.first_block * self._facts.block_size if delivered else 0,
                num_bytes=receive.num_bytes,
                num_units=receive.num_units,
                channel=receive.channel,
                reason=reason[:1000],
            )
        )

    def _close_receive(self, receive: Receive, outcome: Outcome) -> None:
        """An abandoned receive is quiet: its quarantined blocks go back."""
        self._return_blocks(self._quarantine.pop(receive.transfer_id, []))
        self._ended(receive, outcome, receive.reason or "request over")
        self._reported_over.discard(receive.request_id)
        self._forget_receive(receive)

    def _forget_receive(self, receive: Receive) -> None:
        self._receives.pop(receive.request_id, None)
        self._by_transfer.pop(receive.transfer_id, None)
        self._verdicts.pop(receive.request_id, None)

    # ---- prefill inside ----------------------------------------------------------------------------------------------

    def _plans(self, output: SchedulerOutput) -> Iterable[SendPlan]:
        scheduled = [self._sends[r] for r in output.num_scheduled_tokens if r in self._sends]
        if not scheduled:
            return
        assert output.kv_connector_block_state is not None
        for send in scheduled:
            table = output.kv_connector_block_state.get_block_ids(send.request_id)
            if table is not None and not send.ending and not send.request_over:
                yield from self._plan(send, table[0], output)

    def _plan(self, send: Send, table: list[int], output: SchedulerOutput) -> Iterable[SendPlan]:
        begin = _computed_before(output)[send.request_id]
        end = begin + output.num_scheduled_tokens[send.request_id]
        if not send.started:
            send.started = True
            self._send(Started(transfer_id=send.transfer_id, num_tokens=send.num_tokens))
            self._stamp(send.transfer_id, "started")
        last = send.plan_to(end, self._facts.block_size)
        if last <= send.num_planned:
            return
        blocks = tuple(table[send.num_planned : last])
        self._take(blocks)
        send.held.extend(blocks)
        yield SendPlan(
            transfer_id=send.transfer_id,
            first_block=send.num_planned,
            block_ids=blocks,
            num_ready=self._num_ready(send, begin, blocks, output),
            total_blocks=send.total_blocks,
            num_tokens=send.num_tokens,
            token_digest=send.token_digest,
        )
        send.num_planned = last

    def _num_ready(self, send: Send, begin: int, blocks: tuple[int, ...], output: SchedulerOutput) -> int:
        """Leading blocks of the plan that were final before this step: prefix hits that no step is writing now."""
        hits = begin // self._facts.block_size - send.num_planned
        if hits <= 0 or not self._facts.plans_ready_hits:
            return 0
        written = self._written(output)
        return next((i for i, block in enumerate(blocks[:hits]) if block in written), hits)

    def _written(self, output: SchedulerOutput) -> set[int]:
        """Blocks that this step writes, over all requests."""
        size, state = self._facts.block_size, output.kv_connector_block_state
        assert state is not None
        written: set[int] = set()
        for request_id, begin in _computed_before(output).items():
            table = state.get_block_ids(request_id)
            if table is not None:
                end = begin + output.num_scheduled_tokens.get(request_id, 0)
                written.update(table[0][begin // size : -(-end // size)])
        return written

    def _send_over(self, send: Send, request: Request) -> None:
        send.request_over = True
        whole = send.num_planned == send.total_blocks
        if whole and request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"):
            self._stamp(send.transfer_id, "prefilled")
            self._settle_send(send)
            return
        self._end_send(send, f"prefill ended early: {request.status.name}")

    def _end_send(self, send: Send, reason: str) -> None:
        """Nothing more is sent; decode is told, references return when the workers have settled."""
        if send.ending:
            return
        send.ending = reason
        self._leg_failed(send.transfer_id, "prefill", reason)
        self._halves.broadcast(Forget(transfer_id=send.transfer_id, reason=reason[:1000]))
        self._settle_send(send)

    def _settle_send(self, send: Send) -> None:
        if not (send.is_settled and send.request_over):
            return
        self.counters.add("sent_transfers" if send.delivered else "unsent_transfers")
        self._return_blocks(send.held)
        self._sends.pop(send.request_id, None)
        self._by_transfer.pop(send.transfer_id, None)

    # ---- inbox -------------------------------------------------------------------------------------------------------

    def _inbox_fact(self, fact: ToScheduler) -> None:
        """Half link's thread."""
        if isinstance(fact, WorkerReady):
            self._worker_ready(fact)
        elif isinstance(fact, Listening):
            log.info("rank %d listens: %s", fact.rank, ", ".join(a.kind for a in fact.addresses))
        else:
            self._inbox.put(fact)

    def _drain_inbox(self) -> None:
        while not self._inbox.empty():
            self._apply(self._inbox.get())

    def _apply(self, message: FromRouter | ToScheduler) -> None:
        transfer = self._by_transfer.get(getattr(message, "transfer_id", ""))
        match message, transfer:
            case Landed(), Receive():
                self._landed(message, transfer)
            case Fenced(), Receive():
                if transfer.rank_fenced(message.rank, message.num_valid, message.reason):
                    revoke = Revoke(transfer_id=message.transfer_id, epoch=message.epoch, reason=message.reason)
                    self._halves.broadcast(revoke)
            case Settled(), Send():
                transfer.rank_settled(message.rank, message.delivered)
                if not message.delivered and not transfer.ending:
                    self._end_send(transfer, message.reason or "not delivered")
                self._settle_send(transfer)
            case Started(), Receive():
                transfer.started(message.prefill_id)
            case LegFailed(), Receive():
                self._give_up(transfer, f"{message.leg} leg failed: {message.reason}")
            case (LegFailed() | CancelGrant()), Send():
                self._cancelled(transfer, message.reason)
            case Grant(), None:
                self._leg_failed(message.transfer_id, "prefill", "prefill has forgotten this transfer")
            case (Started() | LegFailed()), None:
                self._remember(message)
            case Refused(), _:
                log.error("the router refuses this engine: %s", message.reason)
            case Drain(), _:
                log.info("router: %s", "no new work" if message.on else "taking work again")
            case _:
                log.debug("ignored %s", message)

    def _landed(self, landed: Landed, receive: Receive) -> None:
        receive.num_units += landed.num_units
        receive.num_bytes += landed.num_bytes
        receive.channel = landed.channel
        receive.rank_landed(landed.rank)
        if receive.state is ReceiveState.LANDED:
            self._send(Stamp(transfer_id=landed.transfer_id, stage="landed", wall=landed.wall))

    def _cancelled(self, send: Send, reason: str) -> None:
        """Decode wants nothing (more): stop quietly, nobody waits for us."""
        if not send.ending:
            send.ending = reason or "cancelled"
            self._halves.broadcast(Forget(transfer_id=send.transfer_id, reason=send.ending[:1000]))

    def _remember(self, message: Started | LegFailed) -> None:
        known = self._early.get(message.transfer_id)
        if not isinstance(known, LegFailed):
            self._early[message.transfer_id] = message
        while len(self._early) > self._settings.max_early:
            self._early.pop(next(iter(self._early)))

    def _check_deadlines(self) -> None:
        now = self._clock.now()
        for receive in [r for r in self._receives.values() if now >= r.deadline]:
            if receive.state is ReceiveState.GRANTED:
                self._give_up(receive, "deadline passed before all units had landed")
        for send in [s for s in self._sends.values() if now >= s.deadline and s.request_over and not s.ending]:
            self._end_send(send, "no grant, or not written, before the deadline")

    # ---- membership --------------------------------------------------------------------------------------------------

    def _worker_ready(self, ready: WorkerReady) -> None:
        """Half link's thread: join the router when all ranks are there."""
        self._fingerprints[ready.rank] = ready.fingerprint
        if len(self._fingerprints) < self._facts.world_size or self._router is not None or not self._settings.router:
            return
        self._router = MemberClient(
            endpoint=self._settings.router,
            identity=f"{self._settings.engine_id}/sched",
            security=self._settings.security,
            hello=self._hello,
            beat=self._beat,
            on_message=self._inbox.put,
            on_link=self._on_link,
        )

    def _hello(self) -> list[Message]:
        return [
            Hello(
                engine_id=self._settings.engine_id,
                incarnation=self.incarnation,
                role=self._settings.role,
                url=self._settings.url,
                model=self._facts.model,
                served_names=self._facts.served_names,
                fingerprint=self._fingerprints[0],
                capacity=Capacity(
                    num_blocks=self._facts.num_blocks,
                    block_size=self._facts.block_size,
                    max_model_len=self._facts.max_model_len,
                ),
                world_size=self._facts.world_size,
                free_blocks=self._free_blocks(),
            )
        ]

    def _beat(self) -> Heartbeat:
        return Heartbeat(incarnation=self.incarnation, wall=self._clock.wall(), free_blocks=self._free_blocks())

    def _on_link(self, up: bool) -> None:
        log.log(logging.INFO if up else logging.WARNING, "router %s %s", self._settings.router, "reached" if up else "lost")

    def _free_blocks(self) -> int:
        return self._pool.get_num_free_blocks() if self._pool is not None else self._facts.num_blocks

    def _send(self, message: Message) -> None:
        if self._router is not None and not self._router.send(message):
            log.warning("router client's queue is full: %s dropped", type(message).__name__)

    def _stamp(self, transfer_id: str, stage: Stage) -> None:
        self._send(Stamp(transfer_id=transfer_id, stage=stage, wall=self._clock.wall()))

    def _leg_failed(self, transfer_id: str, leg: Leg, reason: str) -> None:
        self._send(LegFailed(transfer_id=transfer_id, leg=leg, reason=reason[:1000]))

    # ---- references --------------------------------------------------------------------------------------------------

    def _take(self, block_ids: Iterable[int]) -> None:
        assert self._pool is not None
        self._pool.touch([self._pool.blocks[i] for i in block_ids])

    def _hold(self, transfer_id: str, block_ids: list[int]) -> None:
        """Quarantine: these blocks stay out of the pool until nothing can land in them."""
        self._take(block_ids)
        self._quarantine.setdefault(transfer_id, []).extend(block_ids)

    def _return_blocks(self, block_ids: list[int]) -> None:
        assert self._pool is not None
        self._pool.free_blocks([self._pool.blocks[i] for i in reversed(block_ids)])
        block_ids.clear()


def _params_of(request: Request) -> dict[str, Any] | None:
    """Our part of kv_transfer_params, or None. Anything malformed is ignored: only the router mints transfer ids."""
    params = request.kv_transfer_params
    ours = params.get("pdxfer") if isinstance(params, dict) else None
    if not isinstance(ours, dict) or not isinstance(ours.get("transfer_id"), str):
        return None
    return ours


def _computed_before(output: SchedulerOutput) -> dict[str, int]:
    """Request id → tokens computed before this step, for every scheduled request."""
    cached = output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed.update((r.req_id, r.num_computed_tokens) for r in output.scheduled_new_reqs)
    return computed


def _unsupported(request: Request) -> str:
    """Why this request's KV cannot be moved; empty if it can."""
    if request.prompt_token_ids is None:
        return "prompts given as embeddings are computed by decode"
    if request.skip_reading_prefix_cache:
        return "prompt_logprobs need the whole prompt computed by decode"
    return ""


def _digest(request: Request) -> bytes:
    """Identity of a prompt: token ids, LoRA, salt, multimodal contents."""
    extra = [f"salt={request.cache_salt or ''}"]
    if request.lora_request is not None:
        extra.append(f"lora={request.lora_request.lora_name}")
    extra.extend(f"mm={f.identifier}@{f.mm_position.offset}+{f.mm_position.length}" for f in request.mm_features or ())
    return digest_prompt(request.prompt_token_ids or [], extra)
