"""Prefill's end of the staged path, one a lane: turns units into codec frames while the peer has slots for them.

Used by its lane's thread only. What is sent how is wire_choice.py's decision; whatever cannot be a frame (no credit, a
codec that fails, a frame that is no smaller) goes the direct way, so this can only ever fall back to raw.
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass

import msgspec
import numpy as np

from pdxfer.codec.base import Bytes
from pdxfer.core.clock import Clock
from pdxfer.core.errors import PdxferError
from pdxfer.kv.runs import Runs
from pdxfer.memory.region import Region
from pdxfer.node.recompute import CHEAPER, Recompute, Rest
from pdxfer.node.staging_ring import Key
from pdxfer.node.wire_choice import RAW, Chooser
from pdxfer.node.wire_frames import WireFrames
from pdxfer.node.wire_settings import split
from pdxfer.transport.base import Channel, Credit, MeasuredChannel, OutgoingUnit, UnitFailed, UnitHeader

log = logging.getLogger(__name__)

MAX_TRANSFERS = 4096
"""Transfers whose credits are remembered."""
MAX_SENT = 1024
"""Frames whose codec is remembered."""
_Unit = tuple[str, int, int, int]
"""(transfer, epoch, first block, first layer)."""


@dataclass(slots=True)
class WireCounts:
    """Of one node, since its start."""

    frames: int = 0
    raw_units: int = 0
    """Units that went the direct way although codecs were allowed."""
    frame_bytes: int = 0
    saved_bytes: int = 0
    """Bytes that did not have to be sent."""


@dataclass(slots=True)
class _Credits:
    num_slots: int
    slot_bytes: int


class WireSender:
    """Credits of one peer, and the frames made for it."""

    def __init__(
        self,
        engine_id: str,
        frames: WireFrames,
        chooser: Chooser,
        region: Region,
        counts: WireCounts,
        clock: Clock,
    ) -> None:
        self._engine_id = engine_id
        self._frames, self._chooser, self._region, self._clock = frames, chooser, region, clock
        self.counts = counts
        self._recompute = Recompute()
        self._credits: OrderedDict[Key, _Credits] = OrderedDict()
        self._sent_bytes: OrderedDict[Key, int] = OrderedDict()
        """Of each transfer, as KV, whichever way it went."""
        self._taken: frozenset[str] = frozenset()
        """Codecs that the peer decodes, as it has said with its credits."""
        self._told: set[str] = set()
        """Entries of which the log says that the peer does not take them."""
        self._sent: OrderedDict[_Unit, str] = OrderedDict()
        """Frame → its codec: a refusal may come when the transfer is long over."""

    def hear(self, news: Credit | UnitFailed) -> None:
        """What the peer says about frames."""
        if isinstance(news, Credit):
            self.credit(news)
        else:
            self.refused(news)

    def credit(self, credit: Credit) -> None:
        """The peer has room for more frames of a transfer."""
        key = (credit.transfer_id, credit.epoch)
        held = self._credits.setdefault(key, _Credits(0, credit.slot_bytes))
        held.num_slots += credit.num_slots
        self._taken = frozenset(credit.codecs)
        self._recompute.tokens_per_s = credit.tokens_per_s
        self._chooser.decoded(credit.codec, credit.decode_bytes_per_s)
        while len(self._credits) > MAX_TRANSFERS:
            self._credits.popitem(last=False)

    def refused(self, failed: UnitFailed) -> None:
        """The peer could not use a frame: whatever the reason, its codec is not tried there again."""
        entry = self._sent.get(_unit(failed.header))
        if entry is not None and self._chooser.forbid(entry):
            log.warning("codec %s is not sent to %s any more: %s", entry, self._engine_id, failed.reason)

    def forget(self, key: Key) -> None:
        """A transfer is over."""
        self._credits.pop(key, None)
        self._sent_bytes.pop(key, None)

    def rest(self, key: Key, num_bytes: int, num_tokens: int, deadline: float) -> Rest:
        """What is left of a transfer of so many bytes before its next unit."""
        sent = self._sent_bytes.get(key, 0)
        return Rest(num_bytes=num_bytes - sent, sent_bytes=sent, num_tokens=num_tokens, deadline=deadline)

    def gives_up(self, rest: Rest, allowed: tuple[str, ...]) -> str:
        """Why a transfer should end here because decode computes it sooner; empty: go on. Only where we may choose."""
        if not allowed or self._chooser.is_fixed:
            return ""
        send_s = self._chooser.least_seconds(self._accepted(allowed), rest.num_bytes)
        if not self._recompute.is_cheaper(rest, send_s, self._clock.now()):
            return ""
        return (
            f"{CHEAPER}: {rest.num_bytes >> 20} MiB take {send_s:.1f} s, {rest.num_tokens} tokens at "
            f"{self._recompute.tokens_per_s:.0f} a second less than half"
        )

    def write(
        self,
        channel: Channel,
        unit: OutgoingUnit,
        allowed: tuple[str, ...],
        is_last: bool,
        rest: Rest | None = None,
    ) -> None:
        """Send a unit one way or the other, and learn how fast the link is. Raises as Channel.write."""
        link, staged = self._chooser.link, self.staged(unit, allowed, is_last, rest)
        pending = channel.pending() if isinstance(channel, MeasuredChannel) else None
        if pending is not None:
            link.begin(self._clock.now(), *pending)
        channel.write(staged)
        key = (unit.header.transfer_id, unit.header.epoch)
        self._sent_bytes[key] = self._sent_bytes.get(key, 0) + unit.header.num_bytes
        while len(self._sent_bytes) > MAX_TRANSFERS:
            self._sent_bytes.popitem(last=False)
        pending = channel.pending() if isinstance(channel, MeasuredChannel) else None
        if pending is not None:
            link.end(self._clock.now(), *pending)

    def staged(
        self, unit: OutgoingUnit, allowed: tuple[str, ...], is_last: bool, rest: Rest | None = None
    ) -> OutgoingUnit:
        """The unit as a frame where that is faster, else as it is. `is_last`: nothing waits behind it. `rest`: of its
        transfer; None: it has no deadline."""
        header = unit.header
        held = self._credits.get((header.transfer_id, header.epoch))
        credits = held.num_slots if held is not None else 0
        taken = self._accepted(allowed) if credits else ()
        is_late = rest is not None and self._chooser.raw_seconds(rest.num_bytes) > rest.deadline - self._clock.now()
        choice = self._chooser.choose(taken, header.num_bytes, credits, is_last, is_late) if taken else RAW
        framed = self._framed(unit, choice) if choice != RAW else None
        if framed is None or held is None or framed.header.frame_bytes > held.slot_bytes:
            self.counts.raw_units += bool(allowed)
            return unit
        held.num_slots -= 1
        self.counts.frames += 1
        self.counts.frame_bytes += framed.header.frame_bytes
        self.counts.saved_bytes += header.num_bytes - framed.header.frame_bytes
        self._sent[_unit(header)] = choice
        while len(self._sent) > MAX_SENT:
            self._sent.popitem(last=False)
        return framed

    def _accepted(self, allowed: tuple[str, ...]) -> tuple[str, ...]:
        """Of these, what the peer takes; what it does not is said once."""
        for entry in allowed:
            if split(entry)[0] not in self._taken and entry not in self._told:
                self._told.add(entry)
                takes = ", ".join(sorted(self._taken)) or "none"
                log.warning("codec %s is not sent to %s: its codec.allow takes %s", entry, self._engine_id, takes)
        return tuple(entry for entry in allowed if split(entry)[0] in self._taken)

    def _framed(self, unit: OutgoingUnit, entry: str) -> OutgoingUnit | None:
        """None: it cannot be made, or is no smaller."""
        name, level = split(entry)
        header = unit.header
        try:
            codec = self._frames.codec(name, level)
            if not self._frames.usable(codec):
                raise PdxferError("this engine's values are not known")
            began = self._clock.now()
            frame = self._frames.encode(self._gather(unit.source, header.num_bytes), header, codec)
            source = self._runs(frame)
        except Exception as error:
            # Whatever a codec does, installed ones too, costs that codec only: the unit goes as it is.
            expected = isinstance(error, PdxferError | ValueError)
            log.warning("codec %s is not used on the wire any more: %s", entry, error, exc_info=not expected)
            self._chooser.forbid(entry)
            return None
        frame_bytes = sum(len(part) for part in frame)
        self._chooser.encoded(entry, header.num_bytes, frame_bytes, self._clock.now() - began)
        if frame_bytes >= header.num_bytes:
            return None
        digest = header.digest if codec.lossless else 0
        return OutgoingUnit(
            header=msgspec.structs.replace(header, frame_bytes=frame_bytes, digest=digest),
            source=source,
            source_blocks=unit.source_blocks,
            target_blocks=unit.target_blocks,
            frame=frame,
        )

    def _gather(self, source: Runs, num_bytes: int) -> Bytes:
        """The unit's bytes in one piece, in canonical order. One copy."""
        raw, at = np.empty(num_bytes, dtype=np.uint8), 0
        for view in self._region.views(source):
            part = np.frombuffer(view, dtype=np.uint8)
            np.copyto(raw[at : at + part.nbytes], part)
            at += part.nbytes
        return raw

    def _runs(self, frame: tuple[bytes | memoryview, ...]) -> Runs:
        base = self._region.layout.base
        rows = [(np.frombuffer(part, dtype=np.uint8).ctypes.data - base, len(part)) for part in frame]
        return np.array(rows, dtype=np.int64)


def _unit(header: UnitHeader) -> _Unit:
    return header.transfer_id, header.epoch, header.first_block, header.first_layer
