"""Silence counts against others only while we listened. Pure; used by the router's state and by members' sessions.

A process that was not run for a while (stopped, starved of CPU, its whole host paused) wakes with old times and the
others' words still unread: judged at once, all of them would look dead. What passed between two looks beyond the
interval at which one looks is nobody's silence.

    last look ── expected ──┐····· excused ·····┐ now
"""


class Attention:
    """Remembers when we looked last."""

    def __init__(self, expected_s: float, now: float | None = None) -> None:
        """`expected_s`: longest time between two looks of one that is not held up."""
        self._expected_s = expected_s
        self._looked_at = now

    def look(self, now: float) -> float:
        """Seconds since the last look that are nobody's silence; 0.0 if we are not late."""
        before, self._looked_at = self._looked_at, now
        return 0.0 if before is None else max(0.0, now - before - self._expected_s)
