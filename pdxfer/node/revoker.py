"""How a grant of one decode rank ends badly: taken back, the peer told, and Fenced once nothing of it can land.

    begin ──▶ no claim is granted any more; Abort to the peer ──▶ quiet: it has Drained, or never writes by itself
                                                              ──▶ or the drain deadline: its channels are fenced
          ──▶ Fenced (with the length of the good prefix)

Any thread may begin; a reaper thread of its own finishes.
"""

import logging
import threading
from collections.abc import Callable

from pdxfer.core.clock import Clock
from pdxfer.node.grants import Grants
from pdxfer.node.incoming import Incoming
from pdxfer.node.writers import Writers
from pdxfer.transport.base import Abort
from pdxfer.wire.halves import Fenced, Generation, ToScheduler

log = logging.getLogger(__name__)

_IDLE_S = 5.0
_POLL_S = 0.02


class Revoker:
    """Of one rank. `shut` keeps the frames of a retired grant out of its blocks; Fenced is reported after it."""

    def __init__(
        self,
        rank: int,
        grants: Grants,
        writers: Writers,
        report: Callable[[ToScheduler], None],
        shut: Callable[[Incoming], None],
        clock: Clock,
        drain_s: float,
    ) -> None:
        self._rank, self._grants, self._writers = rank, grants, writers
        self._report, self._shut, self._clock, self._drain_s = report, shut, clock, drain_s
        self._stop = False
        self.generation = 0
        """See Sink; grows before the peer is told, so that whoever was not told comes by a channel that names it."""
        self._thread = threading.Thread(target=self._reap, name="pdxfer-receiver", daemon=True)

    def start(self) -> None:
        """Once."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; what is under way stays unfinished."""
        with self._grants.changed:
            self._stop = True
            self._grants.changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    def begin(self, incoming: Incoming, reason: str) -> None:
        """Take this grant back, if it is out and not being taken back already; Fenced follows."""
        with self._grants.changed:
            if incoming.revoked or incoming.key not in self._grants.live:
                return
            incoming.revoked = reason
            incoming.drain_by = self._clock.now() + self._drain_s
            self.generation += 1
            self._report(Generation(rank=self._rank, number=self.generation))
            self._grants.changed.notify_all()
        transfer_id, epoch = incoming.key
        abort = Abort(transfer_id=transfer_id, epoch=epoch, reason=reason[:1000])
        is_pushed = self._writers.tell(self._writers.of(incoming.expect), abort)
        with self._grants.changed:
            incoming.pushed = incoming.pushed or is_pushed
            incoming.told = True
            self._grants.changed.notify_all()

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Finish revoked grants: wait for claims and Drained, or fence when the drain deadline passes."""
        while True:
            with self._grants.changed:
                if self._stop:
                    return
                revoked = [i for i in self._grants.live.values() if i.revoked]
                if not any(_is_quiet(i) or self._clock.now() >= i.drain_by for i in revoked):
                    self._grants.changed.wait(_POLL_S if revoked else _IDLE_S)
                    continue
            for incoming in revoked:
                try:
                    self._finish(incoming)
                except Exception:
                    # Without this thread no failed receive would ever end; the grant stays revoked and is tried again.
                    log.exception("cannot fence %s: please report this", incoming.expect.transfer_id)
                    incoming.drain_by = self._clock.now() + self._drain_s

    def _finish(self, incoming: Incoming) -> None:
        if _is_quiet(incoming):
            self._fenced(incoming)
        elif self._clock.now() >= incoming.drain_by:
            log.warning(
                "%s did not drain %s in %d ms (%s): fencing its channels",
                incoming.expect.prefill_id,
                incoming.expect.transfer_id,
                int(self._drain_s * 1000),
                incoming.revoked,
            )
            self._writers.fence(incoming)
            self._fenced(incoming)

    def _fenced(self, incoming: Incoming) -> None:
        with self._grants.changed:
            if incoming.key not in self._grants.live:
                return
            self._grants.retire(incoming)
        self._shut(incoming)
        transfer_id, epoch = incoming.key
        self._report(
            Fenced(
                rank=self._rank,
                transfer_id=transfer_id,
                epoch=epoch,
                num_valid=incoming.num_valid,
                reason=incoming.revoked[:1000],
                num_units=incoming.num_units,
                num_bytes=incoming.num_bytes,
            )
        )
        self._writers.attend(self._grants.any_live)


def _is_quiet(incoming: Incoming) -> bool:
    """Nothing of this grant can land: no claim is held, and no peer writes by itself (or it has stopped). Frames do
    not count: the staging's fence keeps them out of the blocks."""
    has_claims = incoming.claims > incoming.num_frames
    return incoming.told and not has_claims and (incoming.peer_stopped or not incoming.pushed)
