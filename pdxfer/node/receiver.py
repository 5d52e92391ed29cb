"""What a decode rank expects, who may write where, and what has landed.

    expect ──▶ EXPECTED ──units claimed, landed, verified──▶ complete ──▶ Landed
                  │  revoke / digest mismatch / peer lost / peer drained early
                  ▼
               REVOKED ──▶ Fenced (node/revoker.py)

Called from the endpoints' threads (Sink), the staging's workers and the half link's thread (expect, revoke).
"""

import logging
from collections.abc import Callable, Sequence

from pdxfer.core.clock import Clock
from pdxfer.kv.runs import Runs, block_runs
from pdxfer.memory.region import Region
from pdxfer.node.grants import Grants
from pdxfer.node.incoming import Incoming
from pdxfer.node.revoker import Revoker
from pdxfer.node.staging import Staging
from pdxfer.node.staging_ring import Key
from pdxfer.node.writers import Writers
from pdxfer.transport.base import Abort, Control, Credit, Drained, Endpoint, PeerId, UnitFailed, UnitHeader
from pdxfer.transport.kinds import STAGED
from pdxfer.wire.halves import Expect, Landed, ToScheduler

log = logging.getLogger(__name__)

CLAIM_WAIT_S = 1.0
"""How long an early unit waits for its Expect (the scheduler half sends both; only sockets differ)."""
MISSING = "prefill says all was sent, but units are missing"


class Receiver:
    """Expectations of one rank; implements Sink (the node hands each endpoint a view that names its kind)."""

    def __init__(
        self,
        rank: int,
        region: Region,
        report: Callable[[ToScheduler], None],
        clock: Clock,
        drain_s: float,
        peers: Callable[[], Sequence[PeerId]],
        staging: Staging | None = None,
    ) -> None:
        self._rank, self._region, self._report, self._clock = rank, region, report, clock
        self._staging = staging
        self._grants = Grants()
        self._writers = Writers(peers)
        self._revoker = Revoker(rank, self._grants, self._writers, report, self._shut, clock, drain_s)
        self._is_closed = False
        self.num_rejected = 0
        """Units that were refused: unknown, stale, out of bounds, twice."""
        self.num_corrupt = 0
        """Units whose digest did not match."""

    @property
    def generation(self) -> int:
        """See Sink."""
        return self._revoker.generation

    def start(self, endpoints: Sequence[Endpoint]) -> None:
        """Begin; `endpoints` are the node's, which call this Sink."""
        self._writers.start(endpoints)
        if self._staging is not None:
            self._staging.start(self._settle, self._credit)
        self._revoker.start()

    def close(self) -> None:
        """Stop the threads. Endpoints are closed by the node, which fences everything."""
        with self._grants.changed:
            self._is_closed = True
            self._grants.changed.notify_all()
        self._revoker.close()
        if self._staging is not None:
            self._staging.close()

    # ---- from the scheduler half ---------------------------------------------------------------------------------

    def expect(self, expect: Expect) -> None:
        """From now on these blocks may be filled under this transfer and epoch."""
        key = (expect.transfer_id, expect.epoch)
        connections = self._writers.connections(*self._writers.of(expect))
        with self._grants.changed:
            if not self._grants.add(expect, self._region.layout.num_layers, connections):
                return
        self._writers.attend(self._grants.any_live)
        if self._staging is not None:
            self._staging.open(key)
            if key not in self._grants.live:  # over already
                self._staging.fence(key)

    def revoke(self, transfer_id: str, epoch: int, reason: str) -> None:
        """Take a grant back; Fenced follows."""
        incoming = self._grants.live.get((transfer_id, epoch))
        if incoming is None:
            log.debug("revoke of %s/%d which is not out", transfer_id, epoch)
            return
        self._revoker.begin(incoming, reason)

    # ---- Sink ----------------------------------------------------------------------------------------------------

    def claim(self, peer: PeerId, header: UnitHeader, kind: str = "") -> Runs | None:
        """Destination runs for one write, or None: not wanted. `kind` names the channel it comes over."""
        key = (header.transfer_id, header.epoch)
        with self._grants.changed:
            self._grants.changed.wait_for(lambda: self._is_answered(key), timeout=CLAIM_WAIT_S)
            incoming = self._grants.live.get(key)
            if incoming is None or incoming.revoked or not self._fits(incoming, peer, header):
                self.num_rejected += 1
                return None
            runs = self._place(incoming, header, kind)
            if runs is None:
                self.num_rejected += 1
                return None
            incoming.claims += 1
            incoming.num_frames += bool(header.frame_bytes)
            incoming.claimed(header)[:] = True
            incoming.peer, incoming.channel = peer, kind
        return runs

    def arrived(self, peer: PeerId, header: UnitHeader) -> bool:
        """Verify, count, release the claim; a frame is decoded first, by the staging's worker."""
        if header.frame_bytes and self._staging is not None:
            self._staging.arrived(peer, header)
            return True
        return self._settle(peer, header)

    def _settle(self, peer: PeerId, header: UnitHeader, error: str = "") -> bool:
        """A unit's bytes are in their blocks, or cannot be had (`error`)."""
        incoming = self._grants.live.get((header.transfer_id, header.epoch))
        if incoming is None:
            return False
        error = error or self._verify(incoming, header)
        good = not error
        complete = False
        with self._grants.changed:
            incoming.claims -= 1
            incoming.num_frames -= bool(header.frame_bytes)
            self._grants.changed.notify_all()
            if good and not incoming.revoked:
                incoming.cells(header)[:] = True
                incoming.num_units += 1
                incoming.num_bytes += header.num_bytes
                complete = bool(incoming.landed.all())
                if complete:
                    self._grants.retire(incoming)
        if complete:
            self._shut(incoming)
            self._report(self._landed(incoming))
            self._writers.attend(self._grants.any_live)
        if not good:
            self._corrupt(incoming, peer, header, error)
        elif not complete and incoming.all_sent and incoming.claims == 0:
            self._revoker.begin(incoming, MISSING)
        return good

    def failed(self, peer: PeerId, header: UnitHeader, reason: str) -> None:
        """A claimed write did not finish."""
        if header.frame_bytes and self._staging is not None:
            self._staging.failed(header)
        incoming = self._grants.live.get((header.transfer_id, header.epoch))
        if incoming is None:
            return
        with self._grants.changed:
            incoming.claims -= 1
            incoming.num_frames -= bool(header.frame_bytes)
            self._grants.changed.notify_all()
        self._revoker.begin(incoming, f"unit from {peer.engine_id} failed: {reason}")

    def control(self, peer: PeerId, control: Control) -> None:
        """Drained and UnitFailed concern us; Abort is for the sender (the node routes it)."""
        assert not isinstance(control, Abort | Credit)
        key = (
            (control.header.transfer_id, control.header.epoch)
            if isinstance(control, UnitFailed)
            else (control.transfer_id, control.epoch)
        )
        incoming = self._grants.live.get(key)
        if incoming is None or incoming.expect.prefill_id != peer.engine_id:
            return
        if isinstance(control, Drained):
            with self._grants.changed:
                incoming.peer_stopped = True
                incoming.all_sent = control.complete
                self._grants.changed.notify_all()
                is_decoding = incoming.claims > 0
            if control.complete and not incoming.revoked:
                if not is_decoding:
                    self._revoker.begin(incoming, MISSING)
                return
        self._revoker.begin(incoming, f"{peer.engine_id}: {control.reason or 'stopped'}")

    def lost(self, peer: PeerId, reason: str, kind: str = "") -> None:
        """A connection of that peer ended: what came over it is missing, and what no other one can bring. The peer may
        have opened a new one before we noticed."""
        connections = self._writers.connections(peer)
        with self._grants.changed:
            theirs = [i for i in self._grants.live.values() if i.expect.prefill_id == peer.engine_id]
        for incoming in theirs:
            if incoming.peer is None and peer not in self._writers.of(incoming.expect):
                continue
            if incoming.peer is not None and (incoming.peer, incoming.channel) != (peer, kind):
                continue
            if incoming.all_sent or incoming.can_come(connections):
                continue
            incoming.peer_stopped = incoming.peer_stopped or not connections
            self._revoker.begin(incoming, f"connection to {peer.engine_id} lost: {reason}")

    def expects(self, header: UnitHeader) -> bool:
        """Whether this unit belongs to a grant of ours."""
        return (header.transfer_id, header.epoch) in self._grants.live

    # ---- inside --------------------------------------------------------------------------------------------------

    def _is_answered(self, key: Key) -> bool:
        return self._grants.is_known(key) or self._is_closed

    def _fits(self, incoming: Incoming, peer: PeerId, header: UnitHeader) -> bool:
        at = header.first_block - incoming.expect.first_block
        if incoming.expect.prefill_id not in ("", peer.engine_id) or at < 0:
            return False
        if at + header.num_blocks > len(incoming.expect.block_ids):
            return False
        if header.first_layer < 0 or header.first_layer + header.num_layers > self._region.layout.num_layers:
            return False
        if header.num_bytes != header.num_blocks * header.num_layers * self._region.layout.block_bytes:
            return False
        return not bool(incoming.claimed(header).any())

    def _place(self, incoming: Incoming, header: UnitHeader, kind: str) -> Runs | None:
        """Where an arriving unit goes: its blocks, or a staging slot for a frame. None: the sender has no slot."""
        runs = self._runs(incoming, header)
        if not header.frame_bytes:
            return runs
        if self._staging is None or kind not in STAGED:
            return None
        return self._staging.take(header, runs)

    def _runs(self, incoming: Incoming, header: UnitHeader) -> Runs:
        at = header.first_block - incoming.expect.first_block
        ids = incoming.expect.block_ids[at : at + header.num_blocks]
        return block_runs(self._region.layout, ids, header.first_layer, header.num_layers)

    def _verify(self, incoming: Incoming, header: UnitHeader) -> str:
        """What is wrong with the bytes in their blocks; empty: nothing that could be known."""
        if not header.digest or not self._region.host:
            return ""
        good = self._region.digest(self._runs(incoming, header)) == header.digest
        return "" if good else "digest mismatch"

    def _corrupt(self, incoming: Incoming, peer: PeerId, header: UnitHeader, reason: str) -> None:
        if incoming.revoked:
            return
        self.num_corrupt += 1
        log.warning("unit of %s from %s: %s; recomputing from there", header.transfer_id, peer, reason)
        self._writers.tell([peer], UnitFailed(header=header, reason=reason[:1000]))
        self._revoker.begin(incoming, reason)

    def _credit(self, key: Key, num_slots: int) -> None:
        """Tell a transfer's sender that it may send frames."""
        incoming = self._grants.live.get(key)
        assert self._staging is not None
        if incoming is None:
            return
        credit = self._staging.credit(key, num_slots)
        self._writers.tell(self._writers.of(incoming.expect), credit, STAGED)

    def _landed(self, incoming: Incoming) -> Landed:
        return Landed(
            rank=self._rank,
            transfer_id=incoming.expect.transfer_id,
            epoch=incoming.expect.epoch,
            num_units=incoming.num_units,
            num_bytes=incoming.num_bytes,
            channel=incoming.channel,
            wall=self._clock.wall(),
        )

    def _shut(self, incoming: Incoming) -> None:
        """It has been retired: its frames no longer reach the blocks. Not before: `expect` may be about to open it."""
        if self._staging is not None:
            self._staging.fence(incoming.key)
