"""One thread a peer: turns areas into units, digests them, writes them to the peer's channel and reports back.

A slow peer slows only its own lane. Areas of the same blocks whose layers follow each other are merged while they
wait, so a slow link gets few large units and a fast one gets each layer at once. The lane owns the posted writes: it
reports an area done only when its source memory is no longer read.
"""

import logging
import threading
from collections.abc import Callable

from pdxfer.core.cpus import unpin_current_thread
from pdxfer.core.errors import ChannelError
from pdxfer.kv.runs import block_runs, total_bytes
from pdxfer.memory.region import Region
from pdxfer.node.jobs import AreaDone, Job, LaneFailed, LaneIdle, Report, UnitLost
from pdxfer.node.plan import Area
from pdxfer.node.wire_sender import WireSender
from pdxfer.transport.base import Channel, Credit, Drained, OutgoingUnit, UnitFailed, UnitHeader
from pdxfer.transport.kinds import STAGED

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 16
"""Units posted and not yet done; enough to keep a pull reader or an RDMA queue busy."""
POLL_S = 0.001
"""Longest wait for a completion while new areas could arrive."""
IDLE_CHECK_S = 5.0


class Lane:
    """Ordered sending to one peer engine (same rank)."""

    def __init__(
        self,
        engine_id: str,
        region: Region,
        open_channel: Callable[[], Channel | None],
        report: Callable[[Report], None],
        on_failure: Callable[[Channel, str], None],
        digest_every: int,
        wire: WireSender | None = None,
    ) -> None:
        """`digest_every`: 1 takes a digest of each unit, n of every n-th, 0 of none. `wire`: None sends all raw."""
        self.engine_id = engine_id
        self._region, self._open_channel, self._report, self._on_failure = region, open_channel, report, on_failure
        self._digest_every, self._wire = digest_every, wire
        self._num_units = 0
        self._jobs: dict[tuple[str, int, int, int], Job] = {}
        """By (transfer, epoch, first block, layer after the last), in the order they will be written."""
        self._controls: list[Drained] = []
        self._granted: list[tuple[str, int]] = []
        self._heard: list[Credit | UnitFailed] = []
        self._dropping: list[tuple[str, int]] = []
        self._in_flight: dict[tuple[str, int], int] = {}
        self._channels: dict[tuple[str, int], Channel] = {}
        """The channel each transfer began on: its units and its Drained stay in order on one connection."""
        self._changed = threading.Condition()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name=f"pdxfer-lane-{engine_id}", daemon=True)
        self._thread.start()

    # ---- called by the sender thread ----------------------------------------------------------------------------

    def offer(self, job: Job) -> None:
        """Queue an area that lies inside one chunk; merges with a waiting one of the same blocks."""
        area = job.area
        with self._changed:
            waiting = self._jobs.pop((job.transfer_id, job.epoch, area.first_block, area.first_layer), None)
            if waiting is not None:
                assert waiting.area.block_ids == area.block_ids, "one block range of a prompt was planned twice"
                first_layer = waiting.area.first_layer
                layers = waiting.area.num_layers + area.num_layers
                job.area = area = Area(area.first_block, area.block_ids, first_layer, layers)
            self._jobs[job.transfer_id, job.epoch, area.first_block, area.first_layer + area.num_layers] = job
            self._changed.notify()

    def begin(self, transfer_id: str, epoch: int) -> None:
        """A grant has come: its units belong to the channel that is open now, not to one that replaces it later, when
        decode may have given the blocks to somebody else."""
        with self._changed:
            self._granted.append((transfer_id, epoch))
            self._changed.notify()

    def hear(self, news: Credit | UnitFailed) -> None:
        """The peer has staging slots for frames of a transfer, or has refused a frame."""
        with self._changed:
            self._heard.append(news)
            self._changed.notify()

    def drop(self, transfer_id: str, epoch: int, farewell: Drained) -> None:
        """Forget what waits of this transfer; LaneIdle follows once what is posted is done. `farewell` goes last."""
        with self._changed:
            for key in [k for k in self._jobs if k[0] == transfer_id]:
                del self._jobs[key]
            self._dropping.append((transfer_id, epoch))
            self._controls.append(farewell)
            self._changed.notify()

    def tell(self, control: Drained) -> None:
        """Send a control after the units of its transfer."""
        with self._changed:
            self._controls.append(control)
            self._changed.notify()

    def close(self) -> None:
        """Stop the thread; the channel is closed by its pool."""
        with self._changed:
            self._stop = True
            self._changed.notify()
        self._thread.join(timeout=2.0)

    # ---- the lane's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        unpin_current_thread()
        while True:
            with self._changed:
                while not (self._stop or self._has_work()):
                    self._changed.wait(IDLE_CHECK_S)
                if self._stop:
                    return
                job = self._take()
            try:
                self._advance(job)
            except Exception as error:
                # A bug must not end the only thread that sends to this peer: its transfers fail, the next ones go on.
                log.exception("lane to %s failed: please report this", self.engine_id)
                self._fail_all(f"bug in the sender: {error}")

    def _has_work(self) -> bool:
        return bool(self._granted or self._heard or self._jobs or self._controls or self._dropping or self._in_flight)

    def _take(self) -> Job | None:
        if not self._jobs or sum(self._in_flight.values()) >= MAX_IN_FLIGHT:
            return None
        return self._jobs.pop(next(iter(self._jobs)))

    def _advance(self, job: Job | None) -> None:
        """One round: write a job if there is one, collect completions, then controls and drops when due."""
        self._bind()
        if job is not None:
            self._guard((job.transfer_id, job.epoch), lambda: self._write(job))
        if self._in_flight:
            self._collect(0.0 if self._jobs and sum(self._in_flight.values()) < MAX_IN_FLIGHT else POLL_S)
        self._send_controls()
        self._finish_drops()

    def _bind(self) -> None:
        with self._changed:
            granted, self._granted = self._granted, []
            heard, self._heard = self._heard, []
        if self._wire is not None:
            for news in heard:
                self._wire.hear(news)
        for key in granted:
            channel = self._open_channel()
            if channel is not None:
                self._channels.setdefault(key, channel)

    def _guard(self, key: tuple[str, int], action: Callable[[], None]) -> None:
        """Run one action for a transfer; a dead channel or an impossible unit fails what depends on it."""
        try:
            action()
        except (ChannelError, ValueError) as error:
            self._fail(key, str(error))

    def _write(self, job: Job) -> None:
        key = (job.transfer_id, job.epoch)
        channel = self._channel(key)
        if channel.peer.incarnation != job.incarnation:
            self._channels.pop(key, None)
            raise ChannelError(f"{self.engine_id} has restarted since its grant")
        if channel.generation > job.generation:
            self._channels.pop(key, None)
            raise ChannelError(
                f"the grant was given before this channel was opened (generation {job.generation}, the channel's is "
                f"{channel.generation}): {self.engine_id} may have taken it back"
            )
        wire, rest = self._wire if channel.kind in STAGED else None, None
        if wire is not None:
            all_bytes = job.num_cells * self._region.layout.block_bytes
            rest = wire.rest(key, all_bytes, job.num_tokens, job.deadline)
            if reason := wire.gives_up(rest, job.codecs):
                self._discard(key)
                self._report(UnitLost(job.transfer_id, job.epoch, reason))
                return
        if job.ready is not None:
            job.ready()
        area = job.area
        source = block_runs(self._region.layout, list(area.block_ids), area.first_layer, area.num_layers)
        header = UnitHeader(
            transfer_id=job.transfer_id,
            epoch=job.epoch,
            first_block=area.first_block,
            num_blocks=len(area.block_ids),
            first_layer=area.first_layer,
            num_layers=area.num_layers,
            num_bytes=total_bytes(source),
            digest=self._region.digest(source) if self._wants_digest() else 0,
        )
        self._in_flight[key] = self._in_flight.get(key, 0) + 1
        unit = OutgoingUnit(
            header=header,
            source=source,
            source_blocks=list(area.block_ids),
            target_blocks=list(job.target_blocks),
        )
        if wire is None:
            channel.write(unit)
        else:
            wire.write(channel, unit, job.codecs, is_last=not self._jobs, rest=rest)

    def _discard(self, key: tuple[str, int]) -> None:
        """Send nothing of this transfer that waits."""
        with self._changed:
            for job in [k for k in self._jobs if k[:2] == key]:
                del self._jobs[job]

    def _wants_digest(self) -> bool:
        self._num_units += 1
        return self._region.host and self._digest_every > 0 and self._num_units % self._digest_every == 0

    def _collect(self, timeout_s: float) -> None:
        busy = {id(self._channels[key]): key for key in self._in_flight}
        for key in busy.values():
            self._guard(key, lambda channel=self._channels[key]: self._poll(channel, timeout_s))  # type: ignore[misc]

    def _poll(self, channel: Channel, timeout_s: float) -> None:
        for result in channel.poll(timeout_s):
            header = result.header
            key = (header.transfer_id, header.epoch)
            self._in_flight[key] -= 1
            if not self._in_flight[key]:
                del self._in_flight[key]
            if result.error:
                self._report(UnitLost(header.transfer_id, header.epoch, result.error))
            else:
                cells = header.num_blocks * header.num_layers
                self._report(AreaDone(header.transfer_id, header.epoch, cells, header.num_bytes))

    def _send_controls(self) -> None:
        """Controls leave after the last unit of their transfer."""
        with self._changed:
            busy = {key[:2] for key in self._jobs} | self._in_flight.keys()
            due = [c for c in self._controls if (c.transfer_id, c.epoch) not in busy]
            self._controls = [c for c in self._controls if (c.transfer_id, c.epoch) in busy]
            over = {(c.transfer_id, c.epoch) for c in due}
            self._granted = [key for key in self._granted if key not in over]
        for control in due:
            key = (control.transfer_id, control.epoch)
            self._guard(key, lambda key=key, control=control: self._channel(key).tell(control))  # type: ignore[misc]
            self._channels.pop(key, None)
            if self._wire is not None:
                self._wire.forget(key)

    def _finish_drops(self) -> None:
        with self._changed:
            done = [key for key in self._dropping if key not in self._in_flight]
            self._dropping = [key for key in self._dropping if key in self._in_flight]
        for transfer_id, epoch in done:
            self._report(LaneIdle(transfer_id, epoch))

    def _channel(self, key: tuple[str, int]) -> Channel:
        """The transfer's channel: the best one there is when it begins, the same until it ends."""
        channel = self._channels.get(key) or self._open_channel()
        if channel is None:
            raise ChannelError(f"no channel to {self.engine_id} is open; the log of this process says why")
        self._channels[key] = channel
        return channel

    def _fail_all(self, reason: str) -> None:
        with self._changed:
            waiting = {key[:2] for key in self._jobs}
        for key in waiting | set(self._channels) | set(self._in_flight):
            self._fail(key, reason)

    def _fail(self, key: tuple[str, int], reason: str) -> None:
        """Close the transfer's channel, and give up every transfer that uses it."""
        dead = self._channels.get(key)
        if dead is not None:
            dead.close()
            self._on_failure(dead, reason)
        lost = {key} | {k for k, channel in self._channels.items() if channel is dead and dead is not None}
        for transfer in lost:
            if self._wire is not None:
                self._wire.forget(transfer)
            self._channels.pop(transfer, None)
            self._in_flight.pop(transfer, None)
        with self._changed:
            for job in [k for k in self._jobs if k[:2] in lost]:
                del self._jobs[job]
            self._controls = [c for c in self._controls if (c.transfer_id, c.epoch) not in lost]
        self._report(LaneFailed(frozenset(lost), reason))
