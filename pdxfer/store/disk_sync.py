"""fdatasync shared by all who wait for it: one call covers every write that was finished when it began."""

import threading
from collections.abc import Callable


class GroupSync:
    """`sync` returns when a call of `run` that began after it was entered has succeeded. Any number of threads."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._changed = threading.Condition()
        self._begun = 0
        self._done = 0
        self._running = False

    def sync(self) -> None:
        """Raises what `run` raises, in the thread that ran it; the others try themselves."""
        with self._changed:
            needed = self._begun + 1
            while self._running and self._done < needed:
                self._changed.wait()
            if self._done >= needed:
                return
            self._running = True
            self._begun += 1
            mine = self._begun
        try:
            self._run()
        except OSError:
            self._ended(self._done)
            raise
        self._ended(mine)

    def _ended(self, done: int) -> None:
        with self._changed:
            self._running = False
            self._done = max(self._done, done)
            self._changed.notify_all()
