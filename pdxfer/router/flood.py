"""Bounds what each connection may send the router, by count and size, before anything is decoded.

Used by server.py on its own thread. A member that is over the bound loses messages (its heartbeats too, so it becomes
suspect); nobody else does. Never looks into a message.
"""

from collections import OrderedDict

_BYTES_PER_TOKEN = 4096
"""A message costs one token, and one more for each of these: a Grant for a million tokens costs about a hundred."""
_MAX_ROUTES = 8192
"""Connections remembered; the one heard longest ago is forgotten, and starts with a full bucket if it comes back."""


class Rate:
    """Token bucket: `per_s` tokens a second, and at most so many saved."""

    __slots__ = ("_per_s", "_tokens", "_at")

    def __init__(self, per_s: float, now: float) -> None:
        self._per_s, self._tokens, self._at = per_s, per_s, now

    def take(self, now: float, cost: float = 1.0) -> bool:
        """Whether one more message is within the bound; if not, nothing is taken.

        A full bucket always admits one, whatever it costs.
        """
        self._tokens = min(self._per_s, self._tokens + (now - self._at) * self._per_s)
        self._at = now
        if self._tokens < min(cost, self._per_s):
            return False
        self._tokens -= cost
        return True


class Flood:
    """The buckets of all connections."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._rates: OrderedDict[bytes, Rate] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rates)

    def admits(self, route: bytes, num_bytes: int, now: float) -> bool:
        """Whether a message of this size from this connection may be looked at."""
        rate = self._rates.get(route)
        if rate is None:
            if len(self._rates) >= _MAX_ROUTES:
                self._rates.popitem(last=False)
            rate = self._rates[route] = Rate(self._per_s, now)
        else:
            self._rates.move_to_end(route)
        return rate.take(now, 1.0 + num_bytes // _BYTES_PER_TOKEN)
