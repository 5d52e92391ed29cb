"""Leases: each pairing has one, with a deadline. A lease ends exactly once; later messages find it gone.

Ended pairings are remembered for a while (bounded), only so that a late timeline stamp still reaches its proxy.
"""

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field

from pdxfer.router.members import Engine

_REMEMBERED = 16384


@dataclass(slots=True, kw_only=True)
class Lease:
    """One pairing while it lives."""

    transfer_id: str
    request_id: str
    proxy: bytes
    """Connection of the proxy that asked."""
    prefill: Engine
    decode: Engine
    num_tokens: int
    """The proxy's estimate."""
    deadline: float
    model: str = ""
    """The client's, for another prefill."""
    attempt: int = 1
    """Epoch of the attempt under way; what concerns an earlier one is dropped."""
    tried: set[str] = field(default_factory=set)
    """Prefill engines of earlier attempts."""
    is_prefill_over: bool = False
    """Prefill computed its prompt, or its leg is lost: its tokens no longer count as load."""
    is_prefill_lost: bool = False
    """Decode was told not to wait for it."""
    is_proxy_told: bool = False
    """Its proxy got the Ended."""
    epoch: int = -1
    """Of the last grant; -1 before any."""


class Leases:
    """All leases, by transfer and by engine, with the order of their deadlines."""

    def __init__(self) -> None:
        self._live: dict[str, Lease] = {}
        self._of_engine: dict[str, dict[str, Lease]] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._ended: OrderedDict[str, Lease] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def open(self, lease: Lease) -> None:
        """A pairing was made."""
        assert lease.transfer_id not in self._live
        self._live[lease.transfer_id] = lease
        for engine_id in (lease.prefill.engine_id, lease.decode.engine_id):
            self._of_engine.setdefault(engine_id, {})[lease.transfer_id] = lease
        heapq.heappush(self._deadlines, (lease.deadline, lease.transfer_id))

    def get(self, transfer_id: str) -> Lease | None:
        """The lease if it lives."""
        return self._live.get(transfer_id)

    def get_ended(self, transfer_id: str) -> Lease | None:
        """The lease if it ended not long ago."""
        return self._ended.get(transfer_id)

    def renew(self, lease: Lease, deadline: float) -> None:
        """Move the deadline out; never in."""
        lease.deadline = max(lease.deadline, deadline)

    def move(self, lease: Lease, prefill: Engine) -> None:
        """A live lease goes on with another prefill engine, as its next attempt."""
        self._leave(lease.prefill.engine_id, lease.transfer_id)
        lease.tried.add(lease.prefill.engine_id)
        lease.prefill, lease.attempt = prefill, lease.attempt + 1
        lease.is_prefill_lost = lease.is_prefill_over = False
        self._of_engine.setdefault(prefill.engine_id, {})[lease.transfer_id] = lease

    def end(self, transfer_id: str) -> Lease:
        """Close a live lease."""
        lease = self._live.pop(transfer_id)
        for engine_id in (lease.prefill.engine_id, lease.decode.engine_id):
            self._leave(engine_id, transfer_id)
        self._ended[transfer_id] = lease
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        if len(self._deadlines) > 64 + 4 * len(self._live):
            self._deadlines = [(lease.deadline, key) for key, lease in self._live.items()]
            heapq.heapify(self._deadlines)
        return lease

    def _leave(self, engine_id: str, transfer_id: str) -> None:
        mine = self._of_engine[engine_id]
        del mine[transfer_id]
        if not mine:
            del self._of_engine[engine_id]

    def of_engine(self, engine_id: str) -> list[Lease]:
        """Leases in which this engine is a leg."""
        return list(self._of_engine.get(engine_id, {}).values())

    def of_proxy(self, route: bytes) -> list[Lease]:
        """Leases of one proxy; a scan, for the rare case that it leaves."""
        return [lease for lease in self._live.values() if lease.proxy == route]

    def expired(self, now: float) -> list[Lease]:
        """Leases whose deadline has passed, each once; the caller ends them."""
        due = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, transfer_id = heapq.heappop(self._deadlines)
            lease = self._live.get(transfer_id)
            if lease is None:
                continue
            if lease.deadline > now:
                heapq.heappush(self._deadlines, (lease.deadline, transfer_id))
            else:
                due.append(lease)
        return due
