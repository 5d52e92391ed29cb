"""A thread with an event loop for one tiered store: how the node's threads, which have no loop, use it.

`submit` from any thread; the future's result is the call's. Cancelling the future cancels the call. Nothing here waits
without a limit.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from pdxfer.core.cpus import unpin_current_thread
from pdxfer.core.errors import DeadlineError
from pdxfer.store.tiered import TieredStore

log = logging.getLogger(__name__)
T = TypeVar("T")

CLOSE_GRACE_S = 5.0
"""Beyond the time given to `close`, for tiers to close."""


class StoreThread:
    """`start` opens the store on its own thread, `close` closes it and ends the thread."""

    def __init__(self, make: Callable[[], Awaitable[TieredStore]]) -> None:
        """`make` runs on the thread: it opens the tiers and constructs the store (which is opened here)."""
        self._make = make
        self._store: TieredStore | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="pdxfer-store", daemon=True)
        self._closed = False

    @property
    def store(self) -> TieredStore:
        """The open store; its coroutines are for `submit`."""
        assert self._store is not None, "the store has not been started"
        return self._store

    def start(self, timeout_s: float) -> None:
        """Open. Raises what opening raised (ConfigError for what a user has to change), DeadlineError if it hangs."""
        self._thread.start()
        opening = asyncio.run_coroutine_threadsafe(self._open(), self._loop)
        try:
            self._store = opening.result(timeout_s)
        except FutureTimeout as error:
            opening.cancel()
            self._stop()
            raise DeadlineError(
                f"the store's tiers were not open after {timeout_s} s: see the log for which"
            ) from error
        except BaseException:
            self._stop()
            raise

    def submit(self, call: Callable[[TieredStore], Coroutine[Any, Any, T]]) -> "Future[T]":
        """Run `call(store)` on the loop; any thread, does not wait. After close the future is cancelled."""
        if self._closed:
            future: Future[T] = Future()
            future.cancel()
            return future
        return asyncio.run_coroutine_threadsafe(call(self.store), self._loop)

    def call_soon(self, work: Callable[[TieredStore], object]) -> None:
        """Run `work(store)` on the loop; any thread, does not wait, no result. Nothing happens after close."""
        if not self._closed:
            self._loop.call_soon_threadsafe(work, self.store)

    def close(self, timeout_s: float) -> None:
        """Write back and close within about `timeout_s`. Idempotent; not from the store's own thread."""
        if self._closed or self._store is None:
            return
        self._closed = True
        closing = asyncio.run_coroutine_threadsafe(self._close(self._store, timeout_s), self._loop)
        try:
            closing.result(timeout_s + CLOSE_GRACE_S)
        except FutureTimeout:
            log.warning("store: not closed after %.0f s; left behind", timeout_s + CLOSE_GRACE_S)
        self._stop()

    async def _open(self) -> TieredStore:
        store = await self._make()
        await store.open()
        return store

    async def _close(self, store: TieredStore, timeout_s: float) -> None:
        others = asyncio.all_tasks() - {task for task in (asyncio.current_task(),) if task is not None}
        await store.close(store.clock.now() + timeout_s)
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=1.0)

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_GRACE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self) -> None:
        unpin_current_thread()
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
