"""The simulated prefill engine: connector.transfer.Send decides; here are its blocks, its writes and their gate.

Blocks go back only when no posted write can read them any more: done, or the channel is closed (DESIGN: fencing at the
source).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from pdxfer.connector.transfer import Send
from pdxfer.testing.sim_engine import BAD, BLOCK, STEP_S, SimChannel, SimEngine, Write
from pdxfer.testing.sim_world import World
from pdxfer.wire.messages import CancelGrant, FromRouter, Grant, LegFailed, Started

SEND_S, DRAIN_S = 2.5, 0.3
Reply = Callable[[bool], None]


@dataclass(eq=False, slots=True)
class Sending:
    """One prefill leg."""

    send: Send
    reply: Reply
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    grant: Grant | None = None
    num_posted: int = 0
    flying: list[Write] = field(default_factory=list)
    """Posted and not known to be done."""
    gate_by: float = 0.0
    """After this the channel is closed to make them end."""
    abort: tuple[SimChannel, int] | None = None
    """Channel and epoch that decode wants to hear Drained of."""


class SimPrefill(SimEngine):
    """Computes prompts and writes their blocks where they are granted."""

    def __init__(self, world: World, name: str) -> None:
        self.sending: dict[str, Sending] = {}
        self.early: dict[str, str] = {}
        super().__init__(world, name, "prefill")

    def leg(self, request_id: str, transfer_id: str, num_tokens: int, reply: Reply) -> None:
        """A prefill leg arrived over HTTP."""
        send = Send(request_id, transfer_id, num_tokens, -(-num_tokens // BLOCK), b"d", 1, self.world.now + SEND_S)
        self.sending[transfer_id] = Sending(send, reply)
        if transfer_id in self.early:
            self._cancel(self.sending[transfer_id], self.early.pop(transfer_id))
        self.world.at(self.world.rng.uniform(0, STEP_S), self, self.step, transfer_id)

    def crash(self, seconds: float) -> None:
        super().crash(seconds)
        for one in self.sending.values():
            one.reply(False)
        self.sending.clear()
        self.early.clear()

    def abort(self, transfer_id: str) -> None:
        """The HTTP connection of this leg closed."""
        one = self.sending.get(transfer_id)
        if one is not None:
            one.send.request_over = True
            self._cancel(one, "request over")
            self._settle(one)

    def step(self, transfer_id: str) -> None:
        """An engine step with this request in it."""
        one = self.sending.get(transfer_id)
        if one is None:
            return
        send = one.send
        if not one.blocks and not send.request_over:
            one.blocks = self.take(send.total_blocks, transfer_id)
        if one.blocks and not send.computed and not send.request_over:
            self._compute(one)
        if self.world.now >= send.deadline:
            self._cancel(one, "no grant before the deadline")
        if one.flying and send.ending and self.world.now >= one.gate_by:
            self._close_gate(one)
        self._post(one)
        self._settle(one)
        self.world.at(STEP_S, self, self.step, transfer_id)

    def _compute(self, one: Sending) -> None:
        send = one.send
        if not send.started:
            send.started = True
            self.send(Started(transfer_id=send.transfer_id, num_tokens=send.num_tokens))
        one.num_computed = min(send.num_tokens, one.num_computed + self.world.rng.choice((16, 24, 48)))
        end = send.plan_to(one.num_computed, BLOCK)
        for index in range(send.num_planned, end):
            self.memory[one.blocks[index]] = (send.request_id, index)
        send.num_planned = end
        if end == send.total_blocks:
            send.computed = send.request_over = True
            one.reply(True)

    def _post(self, one: Sending) -> None:
        """Write what is planned and granted."""
        send, grant = one.send, one.grant
        if grant is None or send.ending:
            return
        channel = self.channels[grant.decode_id]
        is_stale = self.world.grants_name_generation and channel.grants_before > grant.generations[0]
        if not channel.is_open or is_stale or channel.decode.life != grant.decode_incarnation:
            self._cancel(one, "there is no channel")
            self.send(LegFailed(transfer_id=send.transfer_id, leg="prefill", reason="no channel"))
            return
        while one.num_posted < min(send.num_planned - grant.first_block, len(grant.block_ids)):
            source = one.blocks[grant.first_block + one.num_posted]
            target = grant.block_ids[one.num_posted]
            digest = self.memory.get(source, BAD)
            write = Write(send.transfer_id, grant.epoch, one.num_posted, source, target, digest, 0, False)
            one.flying.append(write)
            one.num_posted += 1
            channel.post(write)

    def _close_gate(self, one: Sending) -> None:
        """A hung peer: our end of the channel goes, and with it what is posted."""
        assert one.grant is not None
        self.world.note(f"{self.name}: closes its channel to {one.grant.decode_id}")
        self.channels[one.grant.decode_id].fence()

    def _cancel(self, one: Sending, reason: str) -> None:
        if not one.send.ending and 0 not in one.send.settled:
            one.send.ending = reason
            one.gate_by = self.world.now + DRAIN_S

    def _settle(self, one: Sending) -> None:
        """When nothing of it is read any more, its blocks go back."""
        send = one.send
        if one.flying:
            return
        if one.abort is not None:
            channel, epoch = one.abort
            channel.tell(channel.decode, channel.decode.drained, send.transfer_id, epoch)  # type: ignore[attr-defined]
            one.abort = None
        is_sent = one.grant is not None and send.computed and one.num_posted == len(one.grant.block_ids)
        if 0 not in send.settled and (send.ending or is_sent):
            send.rank_settled(0, not send.ending)
        if send.is_settled and send.request_over:
            self.give(one.blocks)
            del self.sending[send.transfer_id]

    # ---- messages --------------------------------------------------------------------------------------------

    def on_message(self, route: bytes, message: FromRouter) -> None:
        if route != self.sched or not isinstance(message, Grant | CancelGrant | LegFailed):
            return
        one = self.sending.get(message.transfer_id)
        if isinstance(message, Grant):
            if one is None:
                reason = "prefill has forgotten this transfer"
                self.send(LegFailed(transfer_id=message.transfer_id, leg="prefill", reason=reason))
            elif one.grant is None:
                one.grant, one.send.granted = message, True
                self._post(one)
        elif one is None:
            self.early[message.transfer_id] = message.reason or "cancelled"
        else:
            self._cancel(one, message.reason or "cancelled")
            self._settle(one)

    def done(self, write: Write) -> None:
        """DONE of one write."""
        one = self.sending.get(write.transfer_id)
        if one is not None and write in one.flying:
            one.flying.remove(write)
            self._settle(one)

    def aborted(self, channel: SimChannel, transfer_id: str, epoch: int) -> None:
        """Decode has revoked its grant: write no more, then say so."""
        one = self.sending.get(transfer_id)
        if one is None:
            channel.tell(channel.decode, channel.decode.drained, transfer_id, epoch)  # type: ignore[attr-defined]
            return
        one.abort = (channel, epoch)
        self._cancel(one, "revoked")
        self._settle(one)

    def lost(self, channel: SimChannel) -> None:
        """The channel is closed: nothing that was posted on it reads our blocks any more."""
        for one in list(self.sending.values()):
            if one.grant is not None and one.grant.decode_id == channel.decode.name and one.num_posted:
                one.flying.clear()
                self._cancel(one, "channel lost")
                self._settle(one)
