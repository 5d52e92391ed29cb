"""Which codec, if any, makes one unit arrive soonest: measured rates in, a name out. Pure; one a peer.

A unit costs `encode + send + decode` when nothing waits behind it; when more follow the stages overlap, but for a part
SHARED, since they compete for the same cores. Raw costs the sending alone. A codec must win by MARGIN: a tie goes to
the bytes as they are, and on a link faster than the codecs everything does. Where raw would miss the deadline any win
will do.
"""

from collections import deque
from dataclasses import dataclass, field

from pdxfer.node.wire_settings import split

RAW = "raw"
MARGIN = 0.9
"""A codec is used if it takes at most so much of raw's time."""
SHARED = 0.5
"""Part of the overlapping stages that is paid all the same."""
SMOOTHING = 0.3
"""Weight of the newest measurement."""
FORGETTING = 0.02
"""A codec that is not used drifts back to its first rates by this part a unit, so that it is tried again."""
MIN_BYTES = 64 << 10
"""Smaller units stay raw: their cost is not their bytes."""
NUM_RECENT = 8
"""Busy stretches of a link that are remembered: about as many chunks."""
MIN_SAMPLE_BYTES, MIN_SAMPLE_S = 256 << 10, 0.002
"""A busy stretch shorter than this says nothing about the link."""


@dataclass(slots=True, kw_only=True)
class Rates:
    """One codec on this machine."""

    ratio: float
    """Raw bytes a frame byte."""
    encode: float
    """Raw bytes a second; also of decode."""
    decode: float
    first: tuple[float, float] = field(init=False)
    """Both, as measured at the start."""

    def __post_init__(self) -> None:
        self.first = (self.encode, self.decode)

    def forget(self) -> None:
        """Drift back: what made it slow may be over."""
        self.encode += FORGETTING * (self.first[0] - self.encode)
        self.decode += FORGETTING * (self.first[1] - self.decode)


class LinkRate:
    """Bytes a second that a link takes, from what was written and what the kernel has not delivered yet.

    Between two looks the link was busy if something is still pending at the second: that stretch measures it. With
    nothing pending it was faster than that, which can only raise the estimate. The fastest recent stretch counts:
    a receiver that was not scheduled for a while makes some slow, a slow link all of them.
    """

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        """0: not known yet."""
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)
        self._at = 0.0
        self._delivered = 0
        self._busy_bytes, self._busy_s = 0, 0.0

    def begin(self, now: float, written: int, pending: int) -> None:
        """A write begins; `written` so far, of which `pending` are not delivered."""
        if pending > 0:
            self._add(now, written - pending)
        self._at, self._delivered = now, written - pending

    def end(self, now: float, written: int, pending: int) -> None:
        """It has returned."""
        if pending > 0:
            self._add(now, written - pending)
        elif now > self._at and written - self._delivered >= MIN_SAMPLE_BYTES:
            rate = (written - self._delivered) / (now - self._at)
            if rate > self.bytes_per_s:
                self._note(rate)
        self._at, self._delivered = now, written - pending

    def _add(self, now: float, delivered: int) -> None:
        self._busy_bytes += delivered - self._delivered
        self._busy_s += now - self._at
        if self._busy_bytes >= MIN_SAMPLE_BYTES and self._busy_s >= MIN_SAMPLE_S:
            self._note(self._busy_bytes / self._busy_s)
            self._busy_bytes, self._busy_s = 0, 0.0

    def _note(self, rate: float) -> None:
        self._recent.append(rate)
        self.bytes_per_s = max(self._recent)


class Chooser:
    """Decides for one peer. `fixed`: that codec whenever there is a slot, whatever it costs."""

    def __init__(self, rates: dict[str, Rates], fixed: str = "") -> None:
        """`rates` by codec, shared by all peers of a node and refined by `encoded`."""
        self._rates, self._fixed = rates, fixed
        self.is_fixed = bool(fixed)
        self._forbidden: set[str] = set()
        self.link = LinkRate()

    def choose(
        self, allowed: tuple[str, ...], num_bytes: int, credits: int, is_last: bool, is_late: bool = False
    ) -> str:
        """Codec for a unit of so many bytes: an entry of `allowed`, or RAW. `is_late`: raw, the transfer would miss its
        deadline, so whatever is faster by anything is taken."""
        if credits <= 0 or num_bytes < MIN_BYTES and not self._fixed:
            return RAW
        allowed = tuple(entry for entry in allowed if split(entry)[0] not in self._forbidden)
        if self._fixed:
            return self._fixed if self._fixed in allowed else RAW
        if not self.link.bytes_per_s:
            return RAW
        margin = 1.0 if is_late else MARGIN
        best, limit = RAW, margin * num_bytes / self.link.bytes_per_s
        for entry in allowed:
            rates = self._rates.get(entry)
            if rates is None:
                continue
            took = self.seconds(rates, num_bytes, is_last)
            if took < limit:
                best, limit = entry, margin * took
        for entry in allowed:
            if entry != best and entry in self._rates:
                self._rates[entry].forget()
        return best

    def raw_seconds(self, num_bytes: int) -> float:
        """What so many bytes cost as they are; 0: the link's rate is not known yet."""
        return num_bytes / self.link.bytes_per_s if self.link.bytes_per_s else 0.0

    def least_seconds(self, allowed: tuple[str, ...], num_bytes: int) -> float:
        """What so many bytes cost in many units by the fastest way; 0: not known."""
        known = [self._rates[e] for e in allowed if e in self._rates and split(e)[0] not in self._forbidden]
        raw_s = self.raw_seconds(num_bytes)
        return min([raw_s, *(self.seconds(rates, num_bytes, is_last=False) for rates in known)]) if raw_s else 0.0

    def seconds(self, rates: Rates, num_bytes: int, is_last: bool) -> float:
        """What a unit costs with a codec."""
        steps = (
            num_bytes / rates.encode,
            num_bytes / rates.ratio / self.link.bytes_per_s,
            num_bytes / rates.decode,
        )
        slowest = max(steps)
        return slowest + (sum(steps) - slowest) * (1.0 if is_last else SHARED)

    def encoded(self, entry: str, num_bytes: int, frame_bytes: int, elapsed_s: float) -> None:
        """A frame was made: what it cost and what it saved."""
        rates = self._rates.get(entry)
        if rates is None or elapsed_s <= 0:
            return
        rates.encode += SMOOTHING * (num_bytes / elapsed_s - rates.encode)
        rates.ratio += SMOOTHING * (num_bytes / frame_bytes - rates.ratio)

    def decoded(self, codec: str, bytes_per_s: float) -> None:
        """How fast the peer has decoded a frame of this codec, at whatever level."""
        for entry, rates in list(self._rates.items()):  # they are still being measured, on another thread
            if bytes_per_s > 0 and split(entry)[0] == codec:
                rates.decode += SMOOTHING * (bytes_per_s - rates.decode)

    def forbid(self, entry: str) -> bool:
        """Never again towards this peer, at whatever level: it cannot be made here, or refused there. False: known."""
        codec = split(entry)[0]
        is_new = codec not in self._forbidden
        self._forbidden.add(codec)
        return is_new
