"""What decode tells its workers and the router about a transfer; nothing for receives that no transfer belongs to."""

from pdxfer.connector.member import Member
from pdxfer.connector.transfer import Receive
from pdxfer.wire.halves import Expect
from pdxfer.wire.messages import CancelGrant, Ended, Grant, Outcome, Resume, Stage


class Notices:
    """About receives."""

    def __init__(self, member: Member, block_size: int) -> None:
        self._member, self._block_size = member, block_size

    def grant(self, receive: Receive, engine_id: str) -> None:
        """The wire's part of its blocks may be filled: first our workers learn it, then prefill's."""
        assert receive.wire is not None
        first_block, block_ids = receive.first_block + receive.wire.at, receive.block_ids[receive.wire.at :]
        self._member.tell_workers(
            Expect(
                transfer_id=receive.transfer_id,
                epoch=receive.epoch,
                prefill_id=receive.prefill_id,
                first_block=first_block,
                block_ids=block_ids,
            )
        )
        self._member.tell_router(
            Grant(
                transfer_id=receive.transfer_id,
                epoch=receive.epoch,
                decode_id=engine_id,
                decode_incarnation=self._member.incarnation,
                first_block=first_block,
                block_ids=block_ids,
                num_tokens=receive.num_tokens,
                token_digest=receive.token_digest,
                generations=self._member.generations,
            )
        )
        self.stamp(receive, "granted")

    def stamp(self, receive: Receive, stage: Stage, wall: float | None = None) -> None:
        """A stage was reached, now or at `wall`."""
        if receive.transfer_id:
            self._member.stamp(receive.transfer_id, stage, wall)

    def cancel(self, receive: Receive, reason: str) -> None:
        """Prefill need not send (any more)."""
        if receive.transfer_id:
            self._member.tell_router(
                CancelGrant(transfer_id=receive.transfer_id, reason=reason[:1000], epoch=receive.epoch)
            )

    def resume(self, receive: Receive) -> None:
        """Another prefill is to send what is missing, under the receive's new epoch."""
        first_missing = receive.first_block + receive.num_good
        self._member.tell_router(
            Resume(
                transfer_id=receive.transfer_id,
                epoch=receive.epoch,
                first_missing=first_missing,
                num_missing_tokens=receive.num_tokens - first_missing * self._block_size,
                reason=receive.reason[:1000],
            )
        )

    def ended(self, receive: Receive, outcome: Outcome, reason: str = "") -> None:
        """The transfer is over."""
        if not receive.transfer_id:
            return
        first_block = receive.first_block + receive.wire_from
        self._member.tell_router(
            Ended(
                transfer_id=receive.transfer_id,
                outcome=outcome,
                num_tokens=receive.num_tokens - first_block * self._block_size if outcome == "delivered" else 0,
                num_bytes=receive.num_bytes,
                num_units=receive.num_units,
                channel=receive.channel,
                reason=reason[:1000],
            )
        )
