"""What every tier counts, from any thread; `stats` makes the TierStats of it."""

import threading

from pdxfer.store.base import Outcome, TierStats


class TierCounters:
    """Counters since open, and what is out now. Held by each tier; reasons of failures are a small closed set."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.leases = 0
        self.reservations = 0
        self.hits = 0
        self.misses = 0
        self.puts = 0
        self.evictions = 0
        self.failures: dict[str, int] = {}

    def lease_opened(self) -> None:
        """A Lease went out."""
        with self._lock:
            self.leases += 1

    def lease_closed(self) -> None:
        """It came back."""
        with self._lock:
            self.leases -= 1

    def reservation_opened(self) -> None:
        """A Reservation went out."""
        with self._lock:
            self.reservations += 1

    def reservation_closed(self) -> None:
        """It ended, by commit or abort."""
        with self._lock:
            self.reservations -= 1

    def got(self, hit: bool) -> None:
        """A get ended."""
        with self._lock:
            if hit:
                self.hits += 1
            else:
                self.misses += 1

    def put_ended(self, outcome: Outcome) -> Outcome:
        """A put or commit ended; returns `outcome`."""
        if outcome is Outcome.STORED:
            with self._lock:
                self.puts += 1
        return outcome

    def evicted(self, times: int = 1) -> None:
        """Values went to make room."""
        with self._lock:
            self.evictions += times

    def failed(self, reason: str) -> None:
        """Something went wrong with the medium or server: a word or two, from a closed set."""
        with self._lock:
            self.failures[reason] = self.failures.get(reason, 0) + 1

    def stats(
        self,
        kind: str,
        *,
        used_bytes: int = 0,
        capacity_bytes: int = 0,
        num_values: int = 0,
        pinned_bytes: int = 0,
        reachable: bool = True,
    ) -> TierStats:
        """The figures now."""
        with self._lock:
            return TierStats(
                kind=kind,
                used_bytes=used_bytes,
                capacity_bytes=capacity_bytes,
                num_values=num_values,
                pinned_bytes=pinned_bytes,
                leases=self.leases,
                reservations=self.reservations,
                hits=self.hits,
                misses=self.misses,
                puts=self.puts,
                evictions=self.evictions,
                failures=dict(self.failures),
                reachable=reachable,
            )
