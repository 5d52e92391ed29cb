"""The decode side of a FakeEngine: grants blocks, waits for the KV, checks that it is the prompt's."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdxfer.connector.transfer import ROUTER_LOST_S, Receive, ReceiveState
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.testing.fake_api import Transfer
from pdxfer.testing.fake_compute import KvError
from pdxfer.testing.fake_kv import Compute, digest
from pdxfer.testing.fake_link import FakeLink
from pdxfer.testing.fake_sends import Background
from pdxfer.wire.halves import Expect, Fenced, Landed, Revoke
from pdxfer.wire.messages import CancelGrant, Ended, Grant, LegFailed, Outcome, Started

log = logging.getLogger(__name__)


class FakeReceives:
    """Transfers that come to this engine."""

    def __init__(self, link: FakeLink, engine_id: str, compute: Compute, background: Background) -> None:
        self._link, self._engine_id, self._compute = link, engine_id, compute
        self._background = background
        self._receives: dict[str, Receive] = {}
        self._landed: dict[str, float] = {}
        """Transfer id → wall time at which its last unit landed."""

    def __len__(self) -> int:
        return len(self._receives)

    @asynccontextmanager
    async def run(
        self, transfer: Transfer, token_ids: list[int], early: Started | LegFailed | None
    ) -> AsyncIterator[None]:
        """The block runs with the prompt's KV in our blocks: received, or else computed. Raises KvError."""
        receive = Receive(
            request_id=transfer.transfer_id,
            transfer_id=transfer.transfer_id,
            num_tokens=len(token_ids),
            world_size=1,
            deadline=SYSTEM_CLOCK.now() + transfer.deadline_s,
        )
        self._receives[transfer.transfer_id] = receive
        if early is not None:
            self.told(early)
        blocks: list[int] = []
        cache = self._compute.cache
        try:
            losses = self._link.num_losses
            await self._link.until(
                lambda: receive.state is not ReceiveState.WAITING or self._link.num_losses > losses, receive.deadline
            )
            if receive.state is ReceiveState.WAITING:
                self._give_up(receive, "prefill did not start before the deadline, or the router was lost")
            blocks = await cache.take(cache.num_needed(len(token_ids)))
            if receive.state is ReceiveState.READY:
                await self._receive(receive, blocks, token_ids)
            num_valid = receive.num_valid if receive.block_ids else 0
            await self._compute.blocks(blocks[num_valid:], token_ids, num_valid)
            self._check(receive, blocks, token_ids)
            self._link.stamp(receive.transfer_id, "scheduled")
            yield
        finally:
            self._background(self._leave(receive, blocks))

    def told(self, message: Started | LegFailed) -> bool:
        """Something about the prefill leg. False: no such transfer here."""
        receive = self._receives.get(message.transfer_id)
        if receive is None:
            return False
        if isinstance(message, Started):
            receive.started(message.prefill_id)
        else:
            self._give_up(receive, f"{message.leg} leg failed: {message.reason}")
        return True

    def landed(self, fact: Landed) -> None:
        """All units are in place and their digests were right."""
        receive = self._receives.get(fact.transfer_id)
        if receive is not None:
            receive.num_units, receive.num_bytes, receive.channel = fact.num_units, fact.num_bytes, fact.channel
            receive.rank_landed(fact.rank)
            self._landed[fact.transfer_id] = fact.wall

    def fenced(self, fact: Fenced) -> None:
        """Nothing of the grant can land any more."""
        receive = self._receives.get(fact.transfer_id)
        if receive is not None:
            receive.rank_fenced(fact.rank, fact.num_valid, fact.reason)

    # ---- one receive ---------------------------------------------------------------------------------------------

    async def _receive(self, receive: Receive, blocks: list[int], token_ids: list[int]) -> None:
        """Grant the blocks and wait until all has landed, or nothing more can land."""
        losses = self._link.num_losses
        self._grant(receive, blocks, token_ids)
        await self._link.until(lambda: receive.quiet or self._link.num_losses > losses, receive.deadline)
        end = min(receive.deadline, SYSTEM_CLOCK.now() + ROUTER_LOST_S)
        if not await self._link.until(lambda: receive.quiet, end):
            self._give_up(receive, "deadline passed before all units had landed")
            await self._link.until(lambda: receive.quiet)
        if receive.state is ReceiveState.LANDED:
            self._link.stamp(receive.transfer_id, "landed", self._landed.get(receive.transfer_id))
            self._ended(receive, "delivered", "")
        else:
            log.warning("%s: %s; computing from block %d on", receive.transfer_id, receive.reason, receive.num_valid)
            self._ended(receive, "failed", receive.reason)
        receive.state = ReceiveState.REPORTED

    def _grant(self, receive: Receive, blocks: list[int], token_ids: list[int]) -> None:
        receive.granted(0, blocks)
        self._link.tell_node(
            Expect(
                transfer_id=receive.transfer_id,
                epoch=receive.epoch,
                prefill_id=receive.prefill_id,
                first_block=0,
                block_ids=blocks,
            )
        )
        self._link.send(
            Grant(
                transfer_id=receive.transfer_id,
                epoch=receive.epoch,
                decode_id=self._engine_id,
                decode_incarnation=self._link.incarnation,
                first_block=0,
                block_ids=blocks,
                num_tokens=receive.num_tokens,
                token_digest=digest(token_ids),
                generations=[self._link.generation],
            )
        )
        self._link.stamp(receive.transfer_id, "granted")

    def _check(self, receive: Receive, blocks: list[int], token_ids: list[int]) -> None:
        wrong = self._compute.cache.first_wrong(blocks, token_ids)
        if wrong is not None:
            raise KvError(
                f"block {wrong} of {len(blocks)} of {receive.transfer_id} does not hold this prompt's KV "
                f"({receive.num_valid} blocks came from {receive.prefill_id or 'nowhere'})"
            )

    async def _leave(self, receive: Receive, blocks: list[int]) -> None:
        """The request is over: blocks go back when nothing can land in them any more."""
        before = receive.state
        if receive.over():
            self._revoke(receive, "request over")
            await self._link.until(lambda: receive.quiet)
            self._ended(receive, "aborted", receive.reason or "request over")
        elif before in (ReceiveState.WAITING, ReceiveState.READY):
            self._link.send(CancelGrant(transfer_id=receive.transfer_id, reason="request over"))
            self._ended(receive, "aborted", "request over")
        del self._receives[receive.transfer_id]
        self._landed.pop(receive.transfer_id, None)
        self._compute.cache.give(blocks)

    def _give_up(self, receive: Receive, reason: str) -> None:
        """Compute here; what was granted is taken back first."""
        before = receive.state
        if receive.give_up(reason):
            self._revoke(receive, reason)
        elif before in (ReceiveState.WAITING, ReceiveState.READY):
            log.info("%s: %s; computed here", receive.transfer_id, reason)
            self._ended(receive, "unused", reason)

    def _revoke(self, receive: Receive, reason: str) -> None:
        self._link.send(CancelGrant(transfer_id=receive.transfer_id, reason=reason[:1000]))
        self._link.tell_node(Revoke(transfer_id=receive.transfer_id, epoch=receive.epoch, reason=reason[:1000]))

    def _ended(self, receive: Receive, outcome: Outcome, reason: str) -> None:
        self._link.send(
            Ended(
                transfer_id=receive.transfer_id,
                outcome=outcome,
                num_tokens=receive.num_tokens if outcome == "delivered" else 0,
                num_bytes=receive.num_bytes,
                num_units=receive.num_units,
                channel=receive.channel,
                reason=reason[:1000],
            )
        )
