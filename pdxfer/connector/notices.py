"""What decode tells the router about a transfer's life; nothing for receives that no transfer belongs to."""

from pdxfer.connector.member import Member
from pdxfer.connector.transfer import Receive
from pdxfer.wire.messages import CancelGrant, Ended, Outcome, Stage


class Notices:
    """To the router, about receives."""

    def __init__(self, member: Member, block_size: int) -> None:
        self._member, self._block_size = member, block_size

    def stamp(self, receive: Receive, stage: Stage, wall: float | None = None) -> None:
        """A stage was reached, now or at `wall`."""
        if receive.transfer_id:
            self._member.stamp(receive.transfer_id, stage, wall)

    def cancel(self, receive: Receive, reason: str) -> None:
        """Prefill need not send (any more)."""
        if receive.transfer_id:
            self._member.tell_router(CancelGrant(transfer_id=receive.transfer_id, reason=reason[:1000]))

    def ended(self, receive: Receive, outcome: Outcome, reason: str = "") -> None:
        """The transfer is over."""
        if not receive.transfer_id:
            return
        first_block = receive.first_block + (receive.wire.at if receive.wire is not None else 0)
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
