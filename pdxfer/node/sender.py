"""Joins what prefill has ready with what decode has granted, and feeds the lanes.

Called from three sides, which only put events into a queue: the compute thread (steps, layers), the router client
(grants), the scheduler half (forget). One sender thread owns all state; lanes report back into the same queue.

    plan(step) ─┐
    layer_done ─┼─▶ sender thread: ready areas × grant → chunk pieces ─▶ lane(peer) ─▶ channel.write
    grant ──────┘                          ▲ AreaDone, LaneFailed ...      │
                                           └──────────────────────────────┘
    all cells done → Drained to the peer, Settled to the scheduler half → blocks go back
"""

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from pdxfer.core.cpus import unpin_current_thread
from pdxfer.node.jobs import AreaDone, Job, LaneFailed, LaneIdle, Report, UnitLost
from pdxfer.node.lane import Lane
from pdxfer.node.outgoing import Outgoing, Ready
from pdxfer.node.plan import Area, SendPlan
from pdxfer.transport.base import Credit, Drained, UnitFailed
from pdxfer.wire.messages import Grant

log = logging.getLogger(__name__)

MAX_REMEMBERED = 4096
"""Grants without a plan and ended transfers that are remembered."""


@dataclass(frozen=True, slots=True)
class _Step:
    plans: tuple[SendPlan, ...]


@dataclass(frozen=True, slots=True)
class _Layers:
    first_layer: int
    num_layers: int
    ready: Ready


@dataclass(frozen=True, slots=True)
class _Forget:
    transfer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Abort:
    engine_id: str
    transfer_id: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Peers:
    engine_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Heard:
    engine_id: str
    news: Credit | UnitFailed


_Event = _Heard | _Peers | _Step | _Layers | _Forget | _Abort | Grant | Report


def no_codecs(tenant: str) -> tuple[str, ...]:
    """Everything is sent as it is."""
    return ()


class Sender:
    """Everything a prefill rank sends, over all peers."""

    def __init__(
        self,
        num_layers: int,
        chunk_blocks: int,
        open_lane: Callable[[str, Callable[[Report], None]], Lane],
        on_settled: Callable[[str, bool, str], None],
        rank: int = 0,
        codecs_of: Callable[[str], tuple[str, ...]] = no_codecs,
    ) -> None:
        """`codecs_of`: what may be used on the wire for a tenant's KV."""
        self._rank = rank
        self._num_layers, self._chunk_blocks = num_layers, chunk_blocks
        self._open_lane, self._on_settled, self._codecs_of = open_lane, on_settled, codecs_of
        self._events: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        self._transfers: OrderedDict[str, Outgoing] = OrderedDict()
        self._ended: OrderedDict[str, tuple[bool, str]] = OrderedDict()
        """Transfer → (delivered, reason): whoever asks again gets the same answer."""
        self._lanes: dict[str, Lane] = {}
        self._step: tuple[SendPlan, ...] = ()
        self._thread = threading.Thread(target=self._run, name="pdxfer-sender", daemon=True)
        self._thread.start()

    # ---- called by others; cheap, never block --------------------------------------------------------------------

    def begin_step(self, plans: tuple[SendPlan, ...]) -> None:
        """The step that makes these blocks final begins (compute thread, before the forward)."""
        self._events.put(_Step(plans))

    def layers_done(self, first_layer: int, num_layers: int, ready: Ready = None) -> None:
        """These layers of the current step's plans are final (compute thread); `ready` waits for the device."""
        self._events.put(_Layers(first_layer, num_layers, ready))

    def grant(self, grant: Grant) -> None:
        """Decode permits (router client's thread)."""
        self._events.put(grant)

    def forget(self, transfer_id: str, reason: str) -> None:
        """Stop sending this transfer; on_settled follows when nothing of it is read any more."""
        self._events.put(_Forget(transfer_id, reason))

    def abort(self, engine_id: str, transfer_id: str, epoch: int, reason: str) -> None:
        """The receiver takes its grant back: stop, and answer Drained even if all was sent long ago."""
        self._events.put(_Abort(engine_id, transfer_id, epoch, reason))

    def hear(self, engine_id: str, news: Credit | UnitFailed) -> None:
        """A peer has staging slots for frames, or has refused one (its channel's thread)."""
        self._events.put(_Heard(engine_id, news))

    def keep_lanes(self, engine_ids: frozenset[str]) -> None:
        """Close the lanes of engines that are no peers any more (router client's thread)."""
        self._events.put(_Peers(engine_ids))

    def close(self) -> None:
        """Stop all lanes and the thread."""
        self._events.put(None)
        self._thread.join(timeout=2.0)
        for lane in self._lanes.values():
            lane.close()

    # ---- the sender thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        unpin_current_thread()
        while (event := self._events.get()) is not None:
            try:
                self._handle(event)
            except Exception:
                # A bug must not cost the engine its only sending thread; the transfer ends by its deadline.
                log.exception("sender: %s failed: please report this", type(event).__name__)

    def _handle(self, event: _Event) -> None:
        match event:
            case _Step():
                self._begin(event.plans)
            case _Layers():
                self._layers(event)
            case Grant():
                self._granted(event)
            case _Forget():
                self._end(event.transfer_id, event.reason)
            case _Abort():
                self._aborted(event)
            case AreaDone():
                self._area_done(event)
            case UnitLost():
                self._end(event.transfer_id, event.reason)
            case LaneIdle():
                self._idle(event)
            case LaneFailed():
                self._lane_failed(event)
            case _Heard():
                self._lane(event.engine_id).hear(event.news)
            case _Peers():
                for engine_id in self._lanes.keys() - event.engine_ids:
                    self._close_lane(engine_id)

    def _begin(self, plans: tuple[SendPlan, ...]) -> None:
        self._step = plans
        for plan in plans:
            if plan.transfer_id in self._ended:
                continue
            transfer = self._transfers.setdefault(plan.transfer_id, Outgoing(plan.transfer_id))
            transfer.total_blocks, transfer.num_tokens = plan.total_blocks, plan.num_tokens
            transfer.token_digest, transfer.codecs = plan.token_digest, self._codecs_of(plan.tenant)
            transfer.deadline = plan.deadline
            if transfer.grant is not None and not self._same_prompt(transfer):
                continue
            if plan.num_ready:
                hits = plan.block_ids[: plan.num_ready]
                self._ready(transfer, Area(plan.first_block, hits, 0, self._num_layers), None)

    def _layers(self, layers: _Layers) -> None:
        for plan in self._step:
            transfer = self._transfers.get(plan.transfer_id)
            fresh = plan.block_ids[plan.num_ready :]
            if transfer is not None and fresh:
                area = Area(plan.first_block + plan.num_ready, fresh, layers.first_layer, layers.num_layers)
                self._ready(transfer, area, layers.ready)

    def _ready(self, transfer: Outgoing, area: Area, ready: Ready) -> None:
        if transfer.ending:
            return
        if transfer.grant is None:
            transfer.waiting.append((area, ready))
        else:
            self._send(transfer, transfer.grant, area, ready)

    def _granted(self, grant: Grant) -> None:
        if grant.transfer_id in self._ended:
            log.debug("grant for %s came after its end", grant.transfer_id)
            return
        transfer = self._transfers.setdefault(grant.transfer_id, Outgoing(grant.transfer_id))
        if transfer.grant is not None or transfer.ending:
            return
        transfer.grant = grant
        self._lane(grant.decode_id).begin(grant.transfer_id, grant.epoch)
        if transfer.total_blocks and not self._same_prompt(transfer):
            return
        waiting, transfer.waiting = transfer.waiting, []
        for area, ready in waiting:
            self._send(transfer, grant, area, ready)
        self._bound()

    def _same_prompt(self, transfer: Outgoing) -> bool:
        grant = transfer.grant
        assert grant is not None
        last = grant.first_block + len(grant.block_ids)
        if (grant.num_tokens, grant.token_digest) == (transfer.num_tokens, transfer.token_digest) and (
            last == transfer.total_blocks
        ):
            return True
        self._end(
            transfer.transfer_id,
            f"prompts differ: decode has {grant.num_tokens} tokens (digest {grant.token_digest.hex()[:12]}), prefill "
            f"{transfer.num_tokens} ({transfer.token_digest.hex()[:12]}); same tokenizer and chat template on both?",
        )
        return False

    def _send(self, transfer: Outgoing, grant: Grant, area: Area, ready: Ready) -> None:
        wanted = area.clip(grant.first_block)
        if wanted is None:
            return
        lane = self._lane(grant.decode_id)
        for piece in wanted.split(self._chunk_blocks):
            at = piece.first_block - grant.first_block
            targets = tuple(grant.block_ids[at : at + len(piece.block_ids)])
            lane.offer(
                Job(
                    transfer_id=transfer.transfer_id,
                    epoch=grant.epoch,
                    incarnation=grant.decode_incarnation,
                    generation=grant.generations[self._rank] if self._rank < len(grant.generations) else 0,
                    area=piece,
                    target_blocks=targets,
                    ready=ready,
                    codecs=transfer.codecs,
                    num_cells=transfer.num_cells * self._num_layers,
                    num_tokens=transfer.num_tokens * transfer.num_cells // max(1, transfer.total_blocks),
                    deadline=transfer.deadline,
                )
            )

    def _lane(self, engine_id: str) -> Lane:
        if engine_id not in self._lanes:
            self._lanes[engine_id] = self._open_lane(engine_id, self._events.put)
        return self._lanes[engine_id]

    def _area_done(self, done: AreaDone) -> None:
        transfer = self._transfers.get(done.transfer_id)
        if transfer is None or transfer.grant is None or transfer.grant.epoch != done.epoch:
            return
        transfer.num_cells_done += done.num_cells
        if not transfer.ending and transfer.num_cells_done == transfer.num_cells * self._num_layers:
            farewell = Drained(transfer_id=done.transfer_id, epoch=done.epoch, complete=True)
            self._lane(transfer.grant.decode_id).tell(farewell)
            self._settle(transfer, True, "")

    def _end(self, transfer_id: str, reason: str) -> None:
        """Stop a transfer; it settles when its lane has nothing posted any more."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            delivered, why = self._ended.get(transfer_id, (False, reason))
            self._settle(Outgoing(transfer_id), delivered, why)
            return
        if transfer.ending:
            return
        transfer.ending = reason or "ended"
        transfer.waiting.clear()
        if transfer.grant is None or transfer.grant.decode_id not in self._lanes:
            self._settle(transfer, False, reason)
            return
        farewell = Drained(transfer_id=transfer_id, epoch=transfer.grant.epoch, complete=False, reason=reason[:1000])
        self._lanes[transfer.grant.decode_id].drop(transfer_id, transfer.grant.epoch, farewell)

    def _aborted(self, abort: _Abort) -> None:
        """Answer Drained whatever we know of it; a Grant that comes later finds the transfer ended."""
        transfer = self._transfers.get(abort.transfer_id)
        if transfer is not None and transfer.grant is not None:
            self._end(abort.transfer_id, abort.reason)
            return
        if transfer is not None or abort.transfer_id not in self._ended:
            self._settle(transfer or Outgoing(abort.transfer_id), False, abort.reason)
        farewell = Drained(transfer_id=abort.transfer_id, epoch=abort.epoch, complete=False)
        self._lane(abort.engine_id).tell(farewell)

    def _idle(self, idle: LaneIdle) -> None:
        transfer = self._transfers.get(idle.transfer_id)
        if transfer is not None and transfer.ending:
            self._settle(transfer, False, transfer.ending)

    def _lane_failed(self, failed: LaneFailed) -> None:
        for transfer_id, epoch in failed.transfers:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None and transfer.grant is not None and transfer.grant.epoch == epoch:
                self._settle(transfer, False, failed.reason)

    def _close_lane(self, engine_id: str) -> None:
        self._lanes.pop(engine_id).close()
        for transfer in list(self._transfers.values()):
            if transfer.grant is not None and transfer.grant.decode_id == engine_id:
                self._settle(transfer, False, f"{engine_id} is no peer any more")

    def _settle(self, transfer: Outgoing, delivered: bool, reason: str) -> None:
        self._transfers.pop(transfer.transfer_id, None)
        self._ended[transfer.transfer_id] = (delivered, reason)
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        self._on_settled(transfer.transfer_id, delivered, reason)

    def _bound(self) -> None:
        """Grants whose prompt never came are ended, oldest first."""
        unplanned = [t.transfer_id for t in self._transfers.values() if not t.total_blocks and not t.ending]
        for transfer_id in unplanned[: max(0, len(unplanned) - MAX_REMEMBERED)]:
            self._end(transfer_id, "no prompt came for this grant")
