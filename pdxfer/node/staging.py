"""Decode's end of the staged path: frames arrive in ring slots, workers decode them and scatter into the blocks.

    receiver.claim ──▶ slot ── bytes arrive ──▶ queue ──▶ worker: check, decode ──▶ scatter ──▶ slot free, credit
                                                                                       │
    receiver.fence(key) ──▶ no scatter of that grant begins any more, and none is under way ◀┘

The receiver keeps its claim on the blocks until `done`; it alone decides what has landed. Any thread may call.
"""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pdxfer.codec.frame import FrameError
from pdxfer.core.clock import Clock
from pdxfer.core.cpus import unpin_current_thread
from pdxfer.kv.runs import Runs
from pdxfer.memory.region import Region
from pdxfer.node.recompute import StepRate
from pdxfer.node.staging_ring import Key, StagingRing
from pdxfer.node.wire_frames import WireFrames
from pdxfer.node.wire_settings import WireSettings
from pdxfer.transport.base import Credit, PeerId, UnitHeader

log = logging.getLogger(__name__)

MAX_SLOTS = 64
OVER = "the grant is over"
_CLOSE_S = 2.0


class Done(Protocol):
    """What the receiver does with a unit that was decoded, or was not (`error`)."""

    def __call__(self, peer: PeerId, header: UnitHeader, error: str) -> object: ...


@dataclass(frozen=True, slots=True)
class _Job:
    peer: PeerId
    header: UnitHeader
    slot: int
    runs: Runs
    """Where the unit's bytes go, in the region."""


class Staging:
    """The ring of one decode rank and its workers."""

    def __init__(
        self, settings: WireSettings, frames: WireFrames, region: Region, chunk_blocks: int, clock: Clock
    ) -> None:
        self._frames, self._region, self._clock = frames, region, clock
        layout = region.layout
        self.slot_bytes = chunk_blocks * layout.num_layers * layout.block_bytes
        """A frame of the largest unit that is smaller than the unit itself."""
        num_slots = max(1, min(MAX_SLOTS, settings.staging_bytes // self.slot_bytes))
        self._memory = np.empty(num_slots * self.slot_bytes, dtype=np.uint8)
        self._ring = StagingRing(num_slots)
        self._arriving: dict[tuple[str, int, int, int], tuple[int, Runs]] = {}
        """Unit → its slot and destination, from take to arrived or failed."""
        self._scattering: dict[Key, int] = {}
        self._open: set[Key] = set()
        """Grants whose frames may be scattered."""
        self._is_closed = False
        self._changed = threading.Condition()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: Done | None = None
        self._tell: Callable[[Key, int], None] | None = None
        self._threads = [
            threading.Thread(target=self._run, name=f"pdxfer-staging-{i}", daemon=True) for i in range(settings.workers)
        ]
        self._last_decoded = ("", 0.0)
        """Codec, and raw bytes a second with decoding and scattering, of the newest frame: senders choose by it."""
        self.steps = StepRate()
        """How fast this engine computes, for senders to weigh against their link."""
        self.num_frames = 0
        """Units that were decoded into their blocks."""
        self.num_bad = 0
        """Frames that were refused: damaged, foreign, of a codec that is not allowed."""

    def __repr__(self) -> str:
        return f"<Staging {self._ring!r} decoded={self.num_frames} bad={self.num_bad}>"

    def start(self, done: Done, tell: Callable[[Key, int], None]) -> None:
        """Begin to work; `tell` sends credits to the sender of a transfer."""
        self._done, self._tell = done, tell
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop the workers. What is not in its blocks then stays out: nothing is scattered any more. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._open.clear()
            self._changed.wait_for(lambda: not self._scattering, timeout=_CLOSE_S)
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=_CLOSE_S)

    def open(self, key: Key) -> None:
        """A grant is out: its sender gets credits."""
        with self._changed:
            if self._is_closed:
                return
            self._open.add(key)
            credits = self._ring.open(key)
        self._pass_on(credits)

    def fence(self, key: Key) -> None:
        """After it returns no frame of this grant is scattered any more. Waits for a copy at most. Idempotent."""
        with self._changed:
            credits: dict[Key, int] = {}
            if key in self._open:
                self._open.discard(key)
                credits = self._ring.close(key)
            self._changed.wait_for(lambda: key not in self._scattering)
        self._pass_on(credits)

    def take(self, header: UnitHeader, runs: Runs) -> Runs | None:
        """The slot for an arriving frame, as runs from the region's base; None: no credit, or longer than a slot."""
        with self._changed:
            slot = self._ring.take(_key(header)) if header.frame_bytes <= self.slot_bytes else None
            if slot is None:
                return None
            self._arriving[_unit(header)] = (slot, runs)
        start = self._memory.ctypes.data + slot * self.slot_bytes - self._region.layout.base
        return np.array([[start, header.frame_bytes]], dtype=np.int64)

    def arrived(self, peer: PeerId, header: UnitHeader) -> None:
        """The frame is in its slot: decode it; `done` follows."""
        with self._changed:
            slot, runs = self._arriving.pop(_unit(header))
        self._jobs.put(_Job(peer, header, slot, runs))

    def failed(self, header: UnitHeader) -> None:
        """The frame did not come, and nobody writes into its slot any more."""
        with self._changed:
            slot, _ = self._arriving.pop(_unit(header))
        self._release(slot)

    def credit(self, key: Key, num_slots: int) -> Credit:
        """What a transfer's sender is told: its slots, and what it should know to choose."""
        codec, rate = self._last_decoded
        return Credit(
            transfer_id=key[0],
            epoch=key[1],
            num_slots=num_slots,
            slot_bytes=self.slot_bytes,
            codec=codec,
            decode_bytes_per_s=rate,
            codecs=self._frames.taken,
            tokens_per_s=self.steps.tokens_per_s,
        )

    # ---- the workers ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        unpin_current_thread()
        while (job := self._jobs.get()) is not None and not self._is_closed:
            try:
                self._work(job)
            except Exception:
                # Without this thread no frame would ever be decoded again; the transfer ends by its deadline.
                log.exception("frame of %s: please report this", job.header.transfer_id)

    def _work(self, job: _Job) -> None:
        error = self._unstage(job)
        if self._is_closed:
            return
        self._release(job.slot)
        assert self._done is not None
        self._done(job.peer, job.header, error)

    def _unstage(self, job: _Job) -> str:
        """Decode and scatter one frame; returns why not."""
        if _key(job.header) not in self._open:  # looked at again before the scatter: this only saves the work
            return OVER
        start = job.slot * self.slot_bytes
        frame = self._memory[start : start + job.header.frame_bytes].data
        start_s = self._clock.now()
        try:
            raw, codec = self._frames.decode(frame, job.header)
            problem = self._scatter(_key(job.header), job.runs, raw)
        except FrameError as error:
            self.num_bad += 1
            return f"bad frame: {error}"
        except Exception as error:
            # A codec's bug must cost this unit only.
            log.exception("frame of %s: please report this", job.header.transfer_id)
            self.num_bad += 1
            return f"bad frame: {type(error).__name__}: {error}"
        self._last_decoded = (codec, raw.nbytes / max(1e-9, self._clock.now() - start_s))
        return problem

    def _scatter(self, key: Key, runs: Runs, raw: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> str:
        with self._changed:
            if key not in self._open:
                return OVER
            self._scattering[key] = self._scattering.get(key, 0) + 1
        try:
            at = 0
            for view in self._region.views(runs):
                target = np.frombuffer(view, dtype=np.uint8)
                np.copyto(target, raw[at : at + target.nbytes])
                at += target.nbytes
            self.num_frames += 1
            return ""
        finally:
            with self._changed:
                self._scattering[key] -= 1
                if not self._scattering[key]:
                    del self._scattering[key]
                self._changed.notify_all()

    def _release(self, slot: int) -> None:
        with self._changed:
            credits = self._ring.release(slot)
        self._pass_on(credits)

    def _pass_on(self, credits: dict[Key, int]) -> None:
        assert self._tell is not None
        for key, num_slots in credits.items():
            self._tell(key, num_slots)


def _key(header: UnitHeader) -> Key:
    return header.transfer_id, header.epoch


def _unit(header: UnitHeader) -> tuple[str, int, int, int]:
    return header.transfer_id, header.epoch, header.first_block, header.first_layer
