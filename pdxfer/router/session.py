"""What both clients share: when to say hello and to report, and whether the router is there. No I/O, no threads.

A client reads all that has come before it has silence judged, and silence that it slept through is not counted.

offline ──can send: hello──▶ greeting ──HeartbeatAck known──▶ connected ──not known, silence, closed──▶ offline
"""

from pdxfer.router.attention import Attention

MISSED_BEATS = 3
"""Heartbeats without an answer after which the router counts as lost."""
RECONNECT_BEATS = 10
"""Silent heartbeats after which the connection is made anew: the other end vanished without closing it."""
REFUSED_PAUSE_S = 5.0


class Session:
    """State of one connection to the router. All times are the clock's monotonic seconds."""

    def __init__(self, heartbeat_s: float, now: float) -> None:
        self.heartbeat_s = heartbeat_s
        self.is_connected = False
        """The router knows us, and answered lately."""
        self._hello_at = now
        self._beat_at = now
        self.lag_s = 0.0
        """How late the last heartbeat was."""
        self._acked_at = now
        self._attention = Attention(1.5 * heartbeat_s, now)

    def wait_s(self, now: float) -> float:
        """How long nothing is due."""
        return min(max(0.0, self._beat_at - now), self.heartbeat_s)

    def is_hello_due(self, now: float) -> bool:
        """Whether hello should be said, as soon as the socket can send."""
        return not self.is_connected and now >= self._hello_at

    def said_hello(self, now: float) -> None:
        """It was sent; ask again if no answer comes."""
        self._hello_at = now + 2 * self.heartbeat_s

    def take_beat(self, now: float) -> bool:
        """Whether a heartbeat is due; counts as sent."""
        if now < self._beat_at:
            return False
        self.lag_s = max(0.0, now - self._beat_at) if self._beat_at else 0.0
        self._beat_at = now + self.heartbeat_s
        return True

    def beat_now(self) -> None:
        """Report at the next opportunity: something changed that others wait to see."""
        self._beat_at = 0.0

    def acked(self, known: bool, now: float) -> None:
        """The router answered."""
        self._acked_at = now
        if known:
            self.is_connected = True
        elif self.is_connected:
            self.lost(now)

    def lost(self, now: float) -> None:
        """The connection is closed, or the router forgot us: say hello again."""
        if self.is_connected:
            self.is_connected = False
            self._hello_at = now

    def refused(self, now: float) -> None:
        """The router does not want us as we are; ask again, but not at once."""
        self.is_connected = False
        self._hello_at = now + REFUSED_PAUSE_S

    def judge(self, now: float) -> bool:
        """Notice silence. True when the connection should be made anew. Called at least once a heartbeat."""
        self._acked_at = min(now, self._acked_at + self._attention.look(now))
        silent_s = now - self._acked_at
        if silent_s > MISSED_BEATS * self.heartbeat_s:
            self.lost(now)
        if silent_s <= RECONNECT_BEATS * self.heartbeat_s:
            return False
        self._acked_at = self._hello_at = now
        return True
