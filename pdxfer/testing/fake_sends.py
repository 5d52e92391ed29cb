"""The prefill side of a FakeEngine: computes a prompt step by step and offers each step's blocks to the node."""

from collections.abc import Callable, Coroutine

from pdxfer.connector.transfer import ROUTER_LOST_S, Send
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.node.node import Node
from pdxfer.node.plan import SendPlan
from pdxfer.testing.fake_api import Transfer
from pdxfer.testing.fake_kv import Compute, digest
from pdxfer.testing.fake_link import FakeLink
from pdxfer.wire.halves import Forget, Settled
from pdxfer.wire.messages import Started

Background = Callable[[Coroutine[object, object, None]], None]


class FakeSends:
    """Transfers that leave this engine. Blocks stay reserved until the node reads nothing of them any more."""

    def __init__(
        self, link: FakeLink, node: Callable[[], Node], compute: Compute, step_tokens: int, background: Background
    ) -> None:
        self._link, self._node, self._compute = link, node, compute
        self._step_blocks = max(1, step_tokens // compute.cache.layout.block_size)
        self._background = background
        self._sends: dict[str, Send] = {}

    def __len__(self) -> int:
        return len(self._sends)

    async def run(self, transfer: Transfer, token_ids: list[int], failed: str) -> None:
        """Compute the prompt and send it. `failed`: decode has given up already."""
        cache = self._compute.cache
        blocks = await cache.take(cache.num_needed(len(token_ids)))
        send = Send(
            request_id=transfer.transfer_id,
            transfer_id=transfer.transfer_id,
            num_tokens=len(token_ids),
            total_blocks=len(blocks),
            token_digest=digest(token_ids),
            world_size=1,
            deadline=SYSTEM_CLOCK.now() + transfer.deadline_s,
            held=blocks,
            tenant=transfer.tenant,
        )
        self._sends[transfer.transfer_id] = send
        if failed:
            self.cancel(transfer.transfer_id, failed)
        try:
            self._link.send(Started(transfer_id=send.transfer_id, num_tokens=send.num_tokens))
            self._link.stamp(send.transfer_id, "started")
            await self._steps(send, token_ids)
            self._link.stamp(send.transfer_id, "prefilled")
        except BaseException:
            self._end(send, "prefill was aborted")
            raise
        finally:
            self._background(self._settle(send))

    def cancel(self, transfer_id: str, reason: str) -> bool:
        """Decode wants nothing (more). False: no such transfer here."""
        send = self._sends.get(transfer_id)
        if send is not None and not send.ending:
            send.ending = reason or "cancelled"
            self._link.tell_node(Forget(transfer_id=transfer_id, reason=send.ending[:1000]))
        return send is not None

    def settled(self, fact: Settled) -> None:
        """The node reads nothing of this transfer any more."""
        send = self._sends.get(fact.transfer_id)
        if send is not None:
            if not fact.delivered:
                self._end(send, fact.reason or "not delivered")
            send.rank_settled(fact.rank, fact.delivered)

    async def _steps(self, send: Send, token_ids: list[int]) -> None:
        for first in range(0, send.total_blocks, self._step_blocks):
            part = send.held[first : first + self._step_blocks]
            await self._compute.blocks(part, token_ids, first)
            if send.ending:
                continue
            plan = SendPlan(
                transfer_id=send.transfer_id,
                first_block=first,
                block_ids=tuple(part),
                num_ready=0,
                total_blocks=send.total_blocks,
                num_tokens=send.num_tokens,
                token_digest=send.token_digest,
                tenant=send.tenant,
                deadline=send.deadline,
            )
            self._node().begin_step((plan,))
            self._node().layers_done(0, self._compute.cache.layout.num_layers)

    async def _settle(self, send: Send) -> None:
        losses = self._link.num_losses
        await self._link.until(lambda: send.is_settled or self._link.num_losses > losses, send.deadline)
        end = min(send.deadline, SYSTEM_CLOCK.now() + ROUTER_LOST_S)
        if not await self._link.until(lambda: send.is_settled, end):
            self._end(send, "no grant, or not written, before the deadline")
            await self._link.until(lambda: send.is_settled)
        del self._sends[send.transfer_id]
        self._compute.cache.give(send.held)

    def _end(self, send: Send, reason: str) -> None:
        """We give up: decode is told, the node forgets."""
        if not send.ending:
            self._link.leg_failed(send.transfer_id, "prefill", reason)
            self.cancel(send.transfer_id, reason)
