"""Waiting for news that may come from any thread, with a deadline and without missing any.

A waiter notes `rung`, looks whether it has what it needs, and if not waits `after` that count.
"""

import asyncio
import threading


class Bell:
    """`ring` from any thread wakes everybody who waits, in the order they came."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self.rung = 0
        """How often it rang."""

    def ring(self) -> None:
        """There is news. Cheap if nobody waits."""
        with self._lock:
            self.rung += 1
            waiting, self._waiting = self._waiting, {}
        for news, loop in waiting.items():
            try:
                loop.call_soon_threadsafe(_tell, news)
            except RuntimeError:  # that loop is closed: nobody waits there
                continue

    async def after(self, rung: int, timeout_s: float) -> bool:
        """Until it rang more often than `rung`; False: not within `timeout_s`."""
        if timeout_s <= 0:
            return self.rung > rung
        loop = asyncio.get_running_loop()
        news: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self.rung > rung:
                return True
            self._waiting[news] = loop
        try:
            await asyncio.wait((news,), timeout=timeout_s)
            return news.done()
        finally:
            with self._lock:
                self._waiting.pop(news, None)


def _tell(news: "asyncio.Future[None]") -> None:
    if not news.done():
        news.set_result(None)
