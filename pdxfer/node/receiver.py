"""What a decode rank expects, who may write where, and what has landed.

    expect ──▶ EXPECTED ──units claimed, landed, verified──▶ complete ──▶ Landed
                  │  revoke / digest mismatch / peer lost / peer drained early
                  ▼
               REVOKED: no claim is granted any more; Abort to the peer; when it has Drained, or its channel is
               fenced, nothing can land ──▶ Fenced (with the length of the good prefix)

Called from the endpoints' threads (Sink), the half link's thread (expect, revoke) and its own reaper thread.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from pdxfer.core.clock import Clock
from pdxfer.core.errors import ChannelError
from pdxfer.kv.runs import Runs, block_runs
from pdxfer.memory.region import Region
from pdxfer.node.incoming import Incoming
from pdxfer.node.staging import Staging
from pdxfer.node.staging_ring import Key
from pdxfer.transport.base import Abort, Control, Credit, Drained, Endpoint, PeerId, UnitFailed, UnitHeader
from pdxfer.transport.kinds import STAGED
from pdxfer.wire.halves import Expect, Fenced, Generation, Landed, ToScheduler

log = logging.getLogger(__name__)

CLAIM_WAIT_S = 1.0
"""How long an early unit waits for its Expect (the scheduler half sends both; only sockets differ)."""
MAX_ENDED = 4096
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
        self._rank, self._region, self._report, self._clock, self._drain_s = rank, region, report, clock, drain_s
        self._peers = peers
        self._staging = staging
        self._incoming: dict[tuple[str, int], Incoming] = {}
        self._ended: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._endpoints: Sequence[Endpoint] = ()
        self._changed = threading.Condition()
        self._attending = threading.Lock()
        self._stop = False
        self.generation = 0
        """See Sink; grows before the peer is told, so that whoever was not told comes by a channel that names it."""
        self.num_rejected = 0
        """Units that were refused: unknown, stale, out of bounds, twice."""
        self.num_corrupt = 0
        """Units whose digest did not match."""
        self._reaper = threading.Thread(target=self._reap, name="pdxfer-receiver", daemon=True)

    def start(self, endpoints: Sequence[Endpoint]) -> None:
        """Begin; `endpoints` are the node's, which call this Sink."""
        self._endpoints = endpoints
        if self._staging is not None:
            self._staging.start(self._settle, self._credit)
        self._reaper.start()

    def close(self) -> None:
        """Stop the reaper. Endpoints are closed by the node, which fences everything."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        if self._reaper.is_alive():
            self._reaper.join(timeout=2.0)
        if self._staging is not None:
            self._staging.close()

    # ---- from the scheduler half ---------------------------------------------------------------------------------

    def expect(self, expect: Expect) -> None:
        """From now on these blocks may be filled under this transfer and epoch."""
        key = (expect.transfer_id, expect.epoch)
        shape = (len(expect.block_ids), self._region.layout.num_layers)
        with self._changed:
            if key in self._incoming or key in self._ended:
                return
            self._incoming[key] = Incoming(expect, np.zeros(shape, np.bool_), np.zeros(shape, np.bool_))
            self._changed.notify_all()
        self._attend()
        if self._staging is not None:
            self._staging.open(key)
            if key not in self._incoming:  # over already
                self._staging.fence(key)

    def revoke(self, transfer_id: str, epoch: int, reason: str) -> None:
        """Take a grant back; Fenced follows."""
        with self._changed:
            incoming = self._incoming.get((transfer_id, epoch))
            if incoming is None:
                log.debug("revoke of %s/%d which is not out", transfer_id, epoch)
                return
        self._begin_revoke(incoming, reason)

    # ---- Sink ----------------------------------------------------------------------------------------------------

    def claim(self, peer: PeerId, header: UnitHeader, kind: str = "") -> Runs | None:
        """Destination runs for one write, or None: not wanted. `kind` names the channel it comes over."""
        key = (header.transfer_id, header.epoch)
        with self._changed:
            self._changed.wait_for(lambda: self._known(key), timeout=CLAIM_WAIT_S)
            incoming = self._incoming.get(key)
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
        incoming = self._incoming.get((header.transfer_id, header.epoch))
        if incoming is None:
            return False
        error = error or self._verify(incoming, header)
        good = not error
        complete = False
        with self._changed:
            incoming.claims -= 1
            incoming.num_frames -= bool(header.frame_bytes)
            self._changed.notify_all()
            if good and not incoming.revoked:
                incoming.cells(header)[:] = True
                incoming.num_units += 1
                incoming.num_bytes += header.num_bytes
                complete = bool(incoming.landed.all())
                if complete:
                    self._retire(incoming)
        if complete:
            if self._staging is not None:
                self._staging.fence((header.transfer_id, header.epoch))
            self._report(self._landed(incoming))
            self._attend()
        if not good:
            self._corrupt(incoming, peer, header, error)
        elif not complete and incoming.all_sent and incoming.claims == 0:
            self._begin_revoke(incoming, MISSING)
        return good

    def failed(self, peer: PeerId, header: UnitHeader, reason: str) -> None:
        """A claimed write did not finish."""
        if header.frame_bytes and self._staging is not None:
            self._staging.failed(header)
        incoming = self._incoming.get((header.transfer_id, header.epoch))
        if incoming is None:
            return
        with self._changed:
            incoming.claims -= 1
            incoming.num_frames -= bool(header.frame_bytes)
            self._changed.notify_all()
        self._begin_revoke(incoming, f"unit from {peer.engine_id} failed: {reason}")

    def control(self, peer: PeerId, control: Control) -> None:
        """Drained and UnitFailed concern us; Abort is for the sender (the node routes it)."""
        assert not isinstance(control, Abort | Credit)
        key = (
            (control.header.transfer_id, control.header.epoch)
            if isinstance(control, UnitFailed)
            else (control.transfer_id, control.epoch)
        )
        incoming = self._incoming.get(key)
        if incoming is None or incoming.expect.prefill_id != peer.engine_id:
            return
        if isinstance(control, Drained):
            with self._changed:
                incoming.peer_stopped = True
                incoming.all_sent = control.complete
                self._changed.notify_all()
                is_decoding = incoming.claims > 0
            if control.complete and not incoming.revoked:
                if not is_decoding:
                    self._begin_revoke(incoming, MISSING)
                return
        self._begin_revoke(incoming, f"{peer.engine_id}: {control.reason or 'stopped'}")

    def lost(self, peer: PeerId, reason: str, kind: str = "") -> None:
        """A connection of that peer ended: what came over it, and what could come over no other one, is missing."""
        if any(e.kind == kind and e.has(peer) for e in self._endpoints):
            return
        elsewhere = any(e.has(peer) for e in self._endpoints)
        with self._changed:
            theirs = [i for i in self._incoming.values() if i.expect.prefill_id == peer.engine_id]
        for incoming in theirs:
            if incoming.peer is None and (elsewhere or peer not in self._peers()):
                continue
            if incoming.peer is not None and (incoming.peer, incoming.channel) != (peer, kind):
                continue
            incoming.peer_stopped = incoming.peer_stopped or not elsewhere
            self._begin_revoke(incoming, f"connection to {peer.engine_id} lost: {reason}")

    def expects(self, header: UnitHeader) -> bool:
        """Whether this unit belongs to a grant of ours."""
        return (header.transfer_id, header.epoch) in self._incoming

    # ---- inside --------------------------------------------------------------------------------------------------

    def _known(self, key: tuple[str, int]) -> bool:
        return key in self._incoming or key in self._ended or self._stop

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
        for endpoint in self._endpoints:
            self._tell(endpoint, peer, UnitFailed(header=header, reason=reason[:1000]))
        self._begin_revoke(incoming, reason)

    def _credit(self, key: Key, num_slots: int) -> None:
        """Tell a transfer's sender that it may send frames."""
        incoming = self._incoming.get(key)
        assert self._staging is not None
        if incoming is None:
            return
        codec, rate = self._staging.last_decoded
        credit = Credit(
            transfer_id=key[0],
            epoch=key[1],
            num_slots=num_slots,
            slot_bytes=self._staging.slot_bytes,
            codec=codec,
            decode_bytes_per_s=rate,
        )
        for peer in self._peers_of(incoming):
            for endpoint in self._endpoints:
                if endpoint.kind in STAGED:
                    self._tell(endpoint, peer, credit)

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

    def _begin_revoke(self, incoming: Incoming, reason: str) -> None:
        with self._changed:
            key = (incoming.expect.transfer_id, incoming.expect.epoch)
            if incoming.revoked or key not in self._incoming:
                return
            incoming.revoked = reason
            incoming.drain_by = self._clock.now() + self._drain_s
            self.generation += 1
            self._report(Generation(rank=self._rank, number=self.generation))
            self._changed.notify_all()
        abort = Abort(transfer_id=key[0], epoch=key[1], reason=reason[:1000])
        for peer in self._peers_of(incoming):
            for endpoint in self._endpoints:
                told = self._tell(endpoint, peer, abort)
                incoming.pushed = incoming.pushed or (told and not endpoint.writes_here)
        with self._changed:
            incoming.told = True
            self._changed.notify_all()

    def _reap(self) -> None:
        """Finish revoked grants: wait for claims and Drained, or fence when the drain deadline passes."""
        while True:
            with self._changed:
                if self._stop:
                    return
                revoked = [i for i in self._incoming.values() if i.revoked]
                if not any(self._is_quiet(i) or self._clock.now() >= i.drain_by for i in revoked):
                    self._changed.wait(0.02 if revoked else 5.0)
                    continue
            for incoming in revoked:
                try:
                    self._finish(incoming)
                except Exception:
                    # Without this thread no failed receive would ever end; the grant stays revoked and is tried again.
                    log.exception("cannot fence %s: please report this", incoming.expect.transfer_id)
                    incoming.drain_by = self._clock.now() + self._drain_s

    def _finish(self, incoming: Incoming) -> None:
        if self._is_quiet(incoming):
            self._fenced(incoming)
        elif self._clock.now() >= incoming.drain_by:
            self._fence(incoming)

    def _is_quiet(self, incoming: Incoming) -> bool:
        """Nothing of this grant can land: no claim is held, and no peer writes by itself (or it has stopped). Frames do
        not count: the staging's fence keeps them out of the blocks."""
        has_claims = incoming.claims > incoming.num_frames
        return incoming.told and not has_claims and (incoming.peer_stopped or not incoming.pushed)

    def _fence(self, incoming: Incoming) -> None:
        log.warning(
            "%s did not drain %s in %d ms (%s): fencing its channels",
            incoming.expect.prefill_id,
            incoming.expect.transfer_id,
            int(self._drain_s * 1000),
            incoming.revoked,
        )
        for peer in self._peers_of(incoming):
            for endpoint in self._endpoints:
                if endpoint.writes_here or incoming.pushed or not incoming.told:
                    endpoint.fence(peer)
        self._fenced(incoming)

    def _fenced(self, incoming: Incoming) -> None:
        key = (incoming.expect.transfer_id, incoming.expect.epoch)
        with self._changed:
            if key not in self._incoming:
                return
            self._retire(incoming)
        if self._staging is not None:  # after it is retired: `expect` may be about to open it
            self._staging.fence(key)
        self._report(
            Fenced(
                rank=self._rank,
                transfer_id=incoming.expect.transfer_id,
                epoch=incoming.expect.epoch,
                num_valid=incoming.num_valid,
                reason=incoming.revoked[:1000],
                num_units=incoming.num_units,
                num_bytes=incoming.num_bytes,
            )
        )
        self._attend()

    def _retire(self, incoming: Incoming) -> None:
        key = (incoming.expect.transfer_id, incoming.expect.epoch)
        self._incoming.pop(key, None)
        self._ended[key] = None
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _tell(self, endpoint: Endpoint, peer: PeerId, control: Control) -> bool:
        try:
            endpoint.tell(peer, control)
        except ChannelError as error:
            log.debug("%s to %s over %s not sent: %s", type(control).__name__, peer.engine_id, endpoint.kind, error)
            return False
        return True

    def _attend(self) -> None:
        with self._attending:  # the last to apply has seen the latest state
            with self._changed:
                active = bool(self._incoming)
            for endpoint in self._endpoints:
                endpoint.attend(active)

    def _peers_of(self, incoming: Incoming) -> list[PeerId]:
        return [p for p in self._peers() if p.engine_id == incoming.expect.prefill_id]
