"""Which requests are in this engine and which of them run, for the heartbeats. EngineCore thread; others read the two
numbers."""

from collections.abc import Collection


class Presence:
    """All requests between their arrival and their end."""

    def __init__(self) -> None:
        self._present: set[str] = set()
        self._running: set[str] = set()
        self.num_running = 0
        """Of the last step and not over."""
        self.num_waiting = 0

    def arrived(self, request_id: str) -> None:
        """It waits for its first step."""
        self._present.add(request_id)
        self._count()

    def stepped(self, request_ids: Collection[str]) -> None:
        """These are computed in this step."""
        self._running = self._present.intersection(request_ids)
        self._count()

    def left(self, request_id: str) -> None:
        """It is over."""
        self._present.discard(request_id)
        self._running.discard(request_id)
        self._count()

    def _count(self) -> None:
        self.num_running = len(self._running)
        self.num_waiting = len(self._present) - self.num_running
