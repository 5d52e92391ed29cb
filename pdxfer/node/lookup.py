"""Questions of the scheduler half to one rank's tiers: Find (slow tiers asked, within a deadline) and Prefetch."""

import logging
from collections.abc import Callable

from pdxfer.core.clock import Clock
from pdxfer.store.runtime import StoreThread
from pdxfer.store.tiered import TieredStore
from pdxfer.wire.store_facts import Find, Found, Prefetch

log = logging.getLogger(__name__)

PREFETCH_TIMEOUT_S = 30.0
"""A request that waits longer for its turn loads the rest itself."""


class Lookup:
    """Lookups of one rank."""

    def __init__(self, rank: int, thread: StoreThread, report: Callable[[Found], None], clock: Clock) -> None:
        self._rank, self._thread, self._report, self._clock = rank, thread, report, clock

    def find(self, find: Find) -> None:
        """Answered by Found, at the latest when its time is over."""
        self._thread.submit(lambda store: self._find(store, find))

    def prefetch(self, prefetch: Prefetch) -> None:
        """Bring chunks into memory, or stop bringing them."""
        if not prefetch.on:
            self._thread.submit(lambda store: self._cancel(store, prefetch.find_id))
            return
        deadline = self._clock.now() + PREFETCH_TIMEOUT_S
        self._thread.submit(lambda store: store.prefetch(prefetch.keys, prefetch.find_id, deadline))

    async def _cancel(self, store: TieredStore, find_id: str) -> None:
        """A task, as what it ends: so it comes after that one has begun."""
        store.cancel_prefetch(find_id)

    async def _find(self, store: TieredStore, find: Find) -> None:
        num_keys = 0
        try:
            prefix = await store.lookup(find.keys, self._clock.now() + find.timeout_s)
            num_keys = prefix.num_chunks
        finally:
            self._report(Found(rank=self._rank, find_id=find.find_id, num_keys=num_keys))
