"""The last requests' timelines, by request id, filled by the engines' stamps while and after they run.

Event-loop thread only. Bounded: the oldest entry goes when a new one comes.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from pdxfer.metrics.timeline import Timeline
from pdxfer.metrics.tracing import Facts
from pdxfer.wire.messages import Ended, EngineRef, Pairing, Redispatch, Served, Stamp


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Another prefill engine took over."""

    epoch: int
    prefill: str
    """Who took over."""
    before: str
    """Who was lost."""
    first_missing: int
    """Block of the prompt with which it began; those before had landed."""
    reason: str
    wall: float


@dataclass(slots=True, kw_only=True)
class Entry:
    """One request as it is known so far."""

    request_id: str
    tenant: str
    endpoint: str
    arrival: float
    """Wall seconds."""
    mode: str = "none"
    reason: str = ""
    prefill: str = ""
    """Engine ids of the legs."""
    decode: str = ""
    transfer_id: str = ""
    paired: float | None = None
    """Wall seconds when the router had answered."""
    first_byte: float | None = None
    end: float | None = None
    outcome: str = ""
    stamps: dict[str, float] = field(default_factory=dict)
    transfer: Ended | None = None
    """What moved, once decode has settled it."""
    resumes: list[Resumed] = field(default_factory=list)

    def timeline(self) -> Timeline:
        """The part that the header shows."""
        return Timeline(
            mode=self.mode, reason=self.reason, arrival=self.arrival, first_byte=self.first_byte, stamps=self.stamps
        )

    def served(self) -> Served:
        """The report to the router; the request is over."""
        moved = self.transfer
        reason = self.reason or (moved.reason if moved is not None and moved.outcome != "delivered" else "")
        if not reason and self.resumes:
            reason = f"resumed by {self.resumes[-1].prefill}: {self.resumes[-1].reason}"
        return Served(
            request_id=self.request_id,
            endpoint=self.endpoint,
            mode=self.mode,
            outcome=self.outcome,
            arrival=self.arrival,
            end=self.end if self.end is not None else self.arrival,
            first_byte=self.first_byte,
            transfer_id=self.transfer_id,
            prefill=self.prefill,
            decode=self.decode,
            reason=reason[:200],
            stamps=dict(self.stamps),
            num_bytes=moved.num_bytes if moved is not None else 0,
            num_tokens=moved.num_tokens if moved is not None else 0,
            channel=moved.channel if moved is not None else "",
        )

    def facts(self) -> Facts:
        """For the trace; the request is over."""
        served = self.served()
        return Facts(
            arrival=served.arrival, paired=self.paired, first_byte=served.first_byte, end=served.end,
            stamps=served.stamps, mode=served.mode, outcome=served.outcome, request_id=served.request_id,
            transfer_id=served.transfer_id, prefill=served.prefill, decode=served.decode, reason=served.reason,
            channel=served.channel, num_bytes=served.num_bytes, num_tokens=served.num_tokens,
        )  # fmt: skip

    def json(self) -> bytes:
        """Everything, for GET /v1/pdxfer/timeline/{request_id}."""
        moved = self.transfer
        return msgspec.json.encode(
            {
                "request_id": self.request_id,
                "endpoint": self.endpoint,
                "mode": self.mode,
                "reason": self.reason,
                "outcome": self.outcome,
                "prefill": self.prefill,
                "decode": self.decode,
                "transfer_id": self.transfer_id,
                "arrival": self.arrival,
                "first_byte": self.first_byte,
                "end": self.end,
                "stamps": self.stamps,
                "stages_ms": self.timeline().stages_ms(),
                "resumes": self.resumes,
                "transfer": moved
                and {
                    "outcome": moved.outcome,
                    "reason": moved.reason,
                    "num_tokens": moved.num_tokens,
                    "num_bytes": moved.num_bytes,
                    "num_units": moved.num_units,
                    "channel": moved.channel,
                },
            }
        )


class TimelineRing:
    """Entries by request id (a repeated id replaces the older one), and running ones by transfer id."""

    def __init__(self, num_entries: int, num_transfers: int) -> None:
        self._num_entries = num_entries
        self._num_transfers = num_transfers
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._by_transfer: OrderedDict[str, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, entry: Entry) -> None:
        """Add a request that has just arrived."""
        self._entries.pop(entry.request_id, None)
        self._entries[entry.request_id] = entry
        while len(self._entries) > self._num_entries:
            self._entries.popitem(last=False)

    def bind(self, entry: Entry, pairing: Pairing) -> None:
        """The entry runs under this pairing from now on; what an earlier one stamped is forgotten."""
        self._by_transfer.pop(entry.transfer_id, None)
        entry.mode, entry.reason = "pair", ""
        entry.transfer_id = pairing.transfer_id
        entry.prefill, entry.decode = pairing.prefill.engine_id, pairing.decode.engine_id
        entry.stamps.clear()
        entry.resumes.clear()
        entry.transfer = None
        self._by_transfer[entry.transfer_id] = entry
        while len(self._by_transfer) > self._num_transfers:
            self._by_transfer.popitem(last=False)

    def unbind(self, entry: Entry, decode: EngineRef, reason: str) -> None:
        """The entry is served by this decode engine alone."""
        self._by_transfer.pop(entry.transfer_id, None)
        entry.mode, entry.reason = "local", reason
        entry.transfer_id = entry.prefill = ""
        entry.decode = decode.engine_id
        entry.stamps.clear()
        entry.resumes.clear()
        entry.transfer = None

    def get(self, request_id: str) -> Entry | None:
        return self._entries.get(request_id)

    def redispatched(self, message: Redispatch, wall: float) -> None:
        """Note that another engine prefills from now on."""
        entry = self._by_transfer.get(message.transfer_id)
        if entry is not None:
            before, entry.prefill = entry.prefill, message.prefill.engine_id
            entry.resumes.append(
                Resumed(
                    epoch=message.epoch, prefill=entry.prefill, before=before, first_missing=message.first_missing,
                    reason=message.reason, wall=wall,
                )
            )  # fmt: skip

    def stamp(self, stamp: Stamp) -> None:
        """Note a stage; the first stamp of a stage counts. Unknown transfers are ignored."""
        entry = self._by_transfer.get(stamp.transfer_id)
        if entry is not None:
            entry.stamps.setdefault(stamp.stage, stamp.wall)

    def ended(self, ended: Ended) -> None:
        """Note what moved."""
        entry = self._by_transfer.get(ended.transfer_id)
        if entry is not None:
            entry.transfer = ended
