"""The decode side of a FakeEngine: grants blocks, waits for the KV, checks that it is the prompt's."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdxfer.connector.transfer import ROUTER_LOST_S, Receive, ReceiveState
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.node.recompute import CHEAPER
from pdxfer.testing.fake_api import Transfer
from pdxfer.testing.fake_compute import KvError
from pdxfer.testing.fake_kv import Compute, digest
from pdxfer.testing.fake_link import FakeLink
from pdxfer.testing.fake_sends import Background
from pdxfer.wire.halves import Expect, Fenced, Landed, Revoke
from pdxfer.wire.messages import CancelGrant, Ended, Grant, LegFailed, Outcome, Resume, Started

log = logging.getLogger(__name__)

MAX_RESUMES, RESUME_SHARE = 1, 0.5
"""As connector/recovery.py has them."""


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
            self._link.counts["recomputed_blocks"] += len(blocks) - num_valid
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
            if receive.resumed(message.prefill_id, message.epoch):
                self._link.counts["resumed_transfers"] += 1
                self._grant(receive)
            elif message.epoch == receive.epoch:
                receive.started(message.prefill_id)
        elif message.leg == "decode" or message.epoch == receive.epoch:
            self._give_up(receive, f"{message.leg} leg failed: {message.reason}")
        return True

    def landed(self, fact: Landed) -> None:
        """All units are in place and their digests were right."""
        receive = self._receives.get(fact.transfer_id)
        if receive is not None and fact.epoch == receive.epoch:
            self._count(receive, fact)
            receive.channel = fact.channel
            receive.rank_landed(fact.rank)
            self._landed[fact.transfer_id] = fact.wall

    def fenced(self, fact: Fenced) -> None:
        """Nothing of the grant can land any more."""
        receive = self._receives.get(fact.transfer_id)
        if receive is not None and fact.epoch == receive.epoch:
            self._count(receive, fact)
            receive.rank_fenced(fact.rank, fact.num_valid, fact.reason)

    def _count(self, receive: Receive, fact: Landed | Fenced) -> None:
        receive.num_units += fact.num_units
        receive.num_bytes += fact.num_bytes
        self._link.counts["received_bytes"] += fact.num_bytes

    # ---- one receive ---------------------------------------------------------------------------------------------

    async def _receive(self, receive: Receive, blocks: list[int], token_ids: list[int]) -> None:
        """Grant the blocks and wait until all has landed, or nothing more can land and nobody takes over."""
        receive.granted(0, blocks)
        receive.token_digest = digest(token_ids)
        self._grant(receive)
        await self._filled(receive)
        while await self._resumed(receive):
            await self._filled(receive)
        if receive.state is ReceiveState.LANDED:
            self._link.stamp(receive.transfer_id, "landed", self._landed.get(receive.transfer_id))
            self._link.counts["received_transfers"] += 1
            self._ended(receive, "delivered", "")
        else:
            log.warning("%s: %s; computing from block %d on", receive.transfer_id, receive.reason, receive.num_valid)
            self._link.counts["failed_transfers"] += 1
            self._ended(receive, "failed", receive.reason)
        receive.state = ReceiveState.REPORTED

    async def _filled(self, receive: Receive) -> None:
        """Wait for the end of one attempt."""
        losses = self._link.num_losses
        await self._link.until(lambda: receive.quiet or self._link.num_losses > losses, receive.deadline)
        end = min(receive.deadline, SYSTEM_CLOCK.now() + ROUTER_LOST_S)
        if not await self._link.until(lambda: receive.quiet, end):
            self._give_up(receive, "deadline passed before all units had landed")
            await self._link.until(lambda: receive.quiet)

    async def _resumed(self, receive: Receive) -> bool:
        """Whether another prefill has taken over what is missing."""
        now = SYSTEM_CLOCK.now()
        left_s = receive.deadline - now
        if not receive.is_resumable or receive.epoch > MAX_RESUMES or left_s <= 0 or not self._link.is_connected:
            return False
        if CHEAPER in receive.reason:
            return False
        self._cancel(receive, receive.reason)
        receive.resume(now + RESUME_SHARE * left_s)
        self._link.send(
            Resume(
                transfer_id=receive.transfer_id,
                epoch=receive.epoch,
                first_missing=receive.num_good,
                num_missing_tokens=receive.num_tokens - receive.num_good * self._compute.cache.layout.block_size,
                reason=receive.reason[:1000],
            )
        )
        losses = self._link.num_losses
        await self._link.until(
            lambda: receive.state is not ReceiveState.RESUMING or self._link.num_losses > losses, receive.resume_by
        )
        if receive.state is ReceiveState.RESUMING:
            receive.give_up("no other prefill has started in time, or the router was lost")
        return receive.state is not ReceiveState.FENCED

    def _grant(self, receive: Receive) -> None:
        """Permission for the wire's part."""
        assert receive.wire is not None
        first_block, blocks = receive.wire.at, receive.block_ids[receive.wire.at :]
        self._link.tell_node(
            Expect(
                transfer_id=receive.transfer_id,
                epoch=receive.epoch,
                prefill_id=receive.prefill_id,
                first_block=first_block,
                block_ids=blocks,
            )
        )
        self._link.send(
            Grant(
                transfer_id=receive.transfer_id,
                epoch=receive.epoch,
                decode_id=self._engine_id,
                decode_incarnation=self._link.incarnation,
                first_block=first_block,
                block_ids=blocks,
                num_tokens=receive.num_tokens,
                token_digest=receive.token_digest,
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
        if before is ReceiveState.RESUMING and receive.over():
            self._cancel(receive, "request over")
            self._ended(receive, "aborted", "request over")
        elif receive.over():
            self._revoke(receive, "request over")
            await self._link.until(lambda: receive.quiet)
            self._ended(receive, "aborted", receive.reason or "request over")
        elif before in (ReceiveState.WAITING, ReceiveState.READY):
            self._cancel(receive, "request over")
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
        self._cancel(receive, reason)
        self._link.tell_node(Revoke(transfer_id=receive.transfer_id, epoch=receive.epoch, reason=reason[:1000]))

    def _cancel(self, receive: Receive, reason: str) -> None:
        self._link.send(CancelGrant(transfer_id=receive.transfer_id, reason=reason[:1000], epoch=receive.epoch))

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
