"""What a failed transfer did not bring: asked of the store, then of another prefill; what neither has is computed.

Used by receives.py once nothing of the failed attempt can land any more. EngineCore thread only.
"""

import logging
from collections.abc import Callable

from pdxfer.connector.loads import LOAD_GRACE_S, Loads
from pdxfer.connector.member import Member
from pdxfer.connector.notices import Notices
from pdxfer.connector.transfer import Receive, ReceiveState
from pdxfer.core.clock import Clock
from pdxfer.node.recompute import CHEAPER
from pdxfer.wire.messages import Outcome

log = logging.getLogger(__name__)

RESUME_SHARE = 0.5
"""Of what is left of a transfer's deadline, for another prefill to start; the rest is for its units."""


class Recovery:
    """Of one engine's receives. `unpair` ends a transfer whose receive goes on from the store alone."""

    def __init__(
        self,
        member: Member,
        notices: Notices,
        loads: Loads | None,
        clock: Clock,
        *,
        block_size: int,
        max_resumes: int,
        unpair: Callable[[Receive, Outcome, str], None],
        count: Callable[[str], None],
    ) -> None:
        self._member, self._notices, self._loads, self._clock = member, notices, loads, clock
        self._block_size, self._max_resumes = block_size, max_resumes
        self._unpair, self._count = unpair, count

    def recover(self, receive: Receive) -> None:
        """If the wire is over and blocks are missing: the store first, for it costs no second prefill."""
        self._refill(receive)
        self.resume(receive)

    def resume(self, receive: Receive) -> None:
        """Have another prefill send what is missing, if there is time for it and a router to find one, and sending was
        not what took too long."""
        left_s = receive.deadline - self._clock.now()
        if CHEAPER in receive.reason:
            return
        if not receive.is_resumable or receive.epoch > self._max_resumes or left_s <= 0:
            return
        if not self._member.is_connected:
            return
        self._notices.cancel(receive, receive.reason)
        receive.resume(self._clock.now() + RESUME_SHARE * left_s)
        log.info("%s: %s; another prefill is asked for", receive.name, receive.reason)
        self._notices.resume(receive)

    def _refill(self, receive: Receive) -> None:
        """Before blocks are sent again or computed, the store may have them."""
        loads = self._loads
        if loads is None or receive.abandoned or receive.state is not ReceiveState.FENCED or receive.refilled:
            return
        first = receive.first_block + receive.num_valid
        chunks = loads.lookups.after(receive.request_id, first * self._block_size)
        num_blocks = min(loads.num_blocks(chunks, first), len(receive.block_ids) - receive.num_valid)
        if num_blocks <= 0 or chunks[0][0].first_token > first * self._block_size:
            return
        log.info("%s: %s; the store is asked for %d blocks", receive.name, receive.reason, num_blocks)
        self._count("failed_transfers")
        self._unpair(receive, "failed", receive.reason)
        receive.refill(num_blocks)
        receive.deadline = self._clock.now() + loads.timeout_s + LOAD_GRACE_S
        loads.start(receive, chunks)
