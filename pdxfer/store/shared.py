"""The DRAM tier of an engine that shares its host's memory: values in place in the store process's segment.

Chosen by open.py for `dram:` when `store.shared_memory` names a socket (or by the URL `shm:PATH`). The store process
decides (server.py); we read and write where it says, under leases that it tracks. If it is away or silent the tier is
unreachable and everything a miss; it is attached again within a second of its return.
"""

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import Clock
from pdxfer.core.errors import ConfigError, UnreachableError
from pdxfer.store.base import Buffer, Entry, Outcome, Reservation, TierStats
from pdxfer.store.counters import TierCounters
from pdxfer.store.lease import total_bytes
from pdxfer.store.piece_lease import fill
from pdxfer.store.shared_lease import SharedLease, SharedReservation
from pdxfer.store.shared_link import SharedLink
from pdxfer.store.shared_wire import (
    LONGEST_PAGE,
    MOST_KEYS,
    Answer,
    Commit,
    Count,
    Delete,
    Ended,
    Entries,
    Evicted,
    Figures,
    Get,
    Held,
    Lookup,
    Pin,
    Question,
    Reserve,
    Scan,
    Unpin,
)

log = logging.getLogger(__name__)

RETRY_S = 0.2
LONGEST_RETRY_S = 1.0
"""Attempts to attach double their distance up to here."""
ANSWER_S = 0.005
"""A reservation waits this much less over there, so that the answer is here by the deadline."""
MOST_NOTICES = 1 << 16


class SharedDramTier:
    """Implements base.Tier and base.EvictionNotices. Capacity, eviction, ttl and quotas are the store process's."""

    kind = "dram"

    def __init__(
        self,
        config: TierConfig,
        clock: Clock,
        *,
        tenant_quota: Mapping[str, int] | None = None,
        pin_fraction: float = 0.5,
    ) -> None:
        self._path = Path(config.url.partition(":")[2])
        self._clock = clock
        self._counters = TierCounters()
        self._link: SharedLink | None = None
        self._figures = Figures(0, 0, 0, 0, 0)
        self._keeping: asyncio.Task[None] | None = None
        self._closed = False
        self._evicted: list[bytes] | None = []

    def __repr__(self) -> str:
        return f"<SharedDramTier {self._path} {self._link!r}>"

    @property
    def segment_address(self) -> tuple[int, int] | None:
        """Address and length of the memory, to register with a transport; None while unreachable."""
        link = self._live
        return (link.segment.address, link.segment.num_bytes) if link else None

    async def open(self) -> None:
        """Attach; if nobody serves the path now, go on trying in the background."""
        try:
            self._attached(await SharedLink.attach(self._path, self._take_notice))
        except UnreachableError as error:
            self._counters.failed("unreachable")
            log.warning("dram tier: %s; going on without shared memory until it is there", error)
        self._keeping = asyncio.ensure_future(self._keep_attached())

    # -- reading --------------------------------------------------------------------------------------------------

    async def lookup(self, keys: Sequence[bytes], deadline: float) -> list[Entry | None]:
        """Asked of the store process: one round trip."""
        found: list[Entry | None] = []
        for some in _steps(keys):
            answer = await self._ask(Lookup(0, some), deadline)
            found += answer.entries if isinstance(answer, Entries) else [None] * len(some)
        return found

    async def get(self, key: bytes, deadline: float) -> SharedLease | None:
        """The value in place; one round trip, no copy."""
        link = self._live
        answer = await self._ask(Get(0, key), deadline)
        if link is None or not isinstance(answer, Held):
            self._counters.got(False)
            return None
        self._counters.got(True)
        return SharedLease(link, answer, self._counters)

    async def scan(self, after: bytes, limit: int, deadline: float) -> list[Entry]:
        """One page of entries; a long one takes several round trips."""
        page: list[Entry] = []
        while len(page) < limit:
            wanted = min(limit - len(page), LONGEST_PAGE)
            answer = await self._ask(Scan(0, page[-1].key if page else after, wanted), deadline)
            some = [entry for entry in answer.entries if entry] if isinstance(answer, Entries) else []
            page += some
            if len(some) < wanted:
                break
        return page

    # -- writing --------------------------------------------------------------------------------------------------

    async def put(self, key: bytes, parts: Sequence[Buffer], deadline: float, tenant: str = "") -> Outcome:
        """Reserve, copy once, commit: two round trips."""
        reservation = await self.reserve(key, total_bytes(parts), deadline, tenant)
        if isinstance(reservation, Outcome):
            return reservation
        async with reservation:
            await fill(reservation.view, parts)
            return await reservation.commit()

    async def reserve(self, key: bytes, num_bytes: int, deadline: float, tenant: str = "") -> Reservation | Outcome:
        """Room in the segment, to be filled in place."""
        link = self._live
        theirs = deadline - min(ANSWER_S, 0.1 * (deadline - self._clock.now()))
        answer = await self._ask(Reserve(0, key, num_bytes, theirs, tenant), deadline)
        if link is not None and isinstance(answer, Held):
            commit = partial(self._commit, link, Commit(0, answer.handle, deadline))
            return SharedReservation(link, answer, self._counters, commit)
        return self._outcome_of(answer)

    async def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        """For all engines of this host."""
        return await self._count([Delete(0, some) for some in _steps(keys)], deadline)

    async def pin(self, keys: Sequence[bytes], ttl_s: float | None, deadline: float) -> int:
        """For all engines of this host."""
        return await self._count([Pin(0, some, ttl_s) for some in _steps(keys)], deadline)

    async def unpin(self, keys: Sequence[bytes], deadline: float) -> int:
        """Whoever pinned them."""
        return await self._count([Unpin(0, some) for some in _steps(keys)], deadline)

    # -- state ------------------------------------------------------------------------------------------------------

    def take_evicted(self) -> list[bytes] | None:
        """Keys the store process dropped by itself, or another engine's since the last call; None: look yourself."""
        keys, self._evicted = self._evicted, []
        return keys

    @property
    def reachable(self) -> bool:
        """As stats say it, without making them: a breaker asks after every call. False also while the store process
        is silent: frozen, or far too slow."""
        link = self._live
        return link is not None and not link.silent

    def stats(self) -> TierStats:
        """Leases, hits and puts are this engine's; the rest is the whole tier's, as of its last answer."""
        now = self._figures
        stats = self._counters.stats(
            self.kind,
            used_bytes=now.used_bytes,
            capacity_bytes=now.capacity_bytes,
            num_values=now.num_values,
            pinned_bytes=now.pinned_bytes,
            reachable=self.reachable,
        )
        return replace(stats, evictions=now.evictions)

    async def close(self) -> None:
        """Detach; the store process keeps the values. Idempotent."""
        self._closed = True
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait((self._keeping,))
        await self._detach()  # a task that is cancelled before its first step does not get to it

    # -- how --------------------------------------------------------------------------------------------------------

    @property
    def _live(self) -> SharedLink | None:
        return self._link if self._link is not None and self._link.alive and not self._closed else None

    async def _ask(self, request: Question, deadline: float) -> Answer | None:
        link = self._live
        if self._clock.now() >= deadline or self._closed:
            return None
        if link is None:
            self._counters.failed("unreachable")
            return None
        return await self._ask_over(link, request, deadline - self._clock.now())

    async def _ask_over(self, link: SharedLink, request: Question, timeout_s: float) -> Answer | None:
        answer = await link.call(request, timeout_s)
        self._figures = link.figures
        if answer is None and not self._closed:
            self._counters.failed("timeout" if link.alive else "unreachable")
        return answer

    async def _commit(self, link: SharedLink, request: Commit) -> Outcome:
        """End of a reservation of that link, which may have ended meanwhile. Past its deadline it is given back."""
        left_s = request.deadline - self._clock.now()
        if left_s <= 0:
            link.drop(request.handle)
            return self._outcome_of(None)
        return self._outcome_of(await self._ask_over(link, request, left_s))

    async def _count(self, requests: Sequence[Question], deadline: float) -> int:
        total = 0
        for request in requests:
            answer = await self._ask(request, deadline)
            total += answer.count if isinstance(answer, Count) else 0
        return total

    def _outcome_of(self, answer: Answer | None) -> Outcome:
        """What an answer, or none, means for a write."""
        if isinstance(answer, Ended) and answer.outcome is not None:
            return self._counters.put_ended(answer.outcome)
        return Outcome.FAILED if self._live is None else Outcome.LATE

    def _take_notice(self, notice: Evicted) -> None:
        if self._evicted is None or notice.lost or len(self._evicted) + len(notice.keys) > MOST_NOTICES:
            self._evicted = None
        else:
            self._evicted += notice.keys

    async def _keep_attached(self) -> None:
        """As long as we are open: wait for the link's end, then attach again."""
        try:
            while True:
                if self._link is not None:
                    await self._link.ended.wait()
                    await self._detach()
                await self._attach_again()
        finally:
            await self._detach()

    async def _attach_again(self) -> None:
        pause_s = RETRY_S
        while self._link is None:
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.0))
            pause_s = min(2 * pause_s, LONGEST_RETRY_S)
            try:
                self._attached(await SharedLink.attach(self._path, self._take_notice))
            except UnreachableError as error:
                log.debug("dram tier: %s", error)
            except ConfigError as error:
                log.warning("dram tier stays unreachable: %s", error)
                pause_s = LONGEST_RETRY_S

    def _attached(self, link: SharedLink) -> None:
        self._link = link
        self._figures = link.figures
        log.info("dram tier: attached to %s, %r", self._path, link.segment)

    async def _detach(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            self._evicted = None
            await link.close()


def _steps(keys: Sequence[bytes]) -> list[list[bytes]]:
    return [list(keys[first : first + MOST_KEYS]) for first in range(0, len(keys), MOST_KEYS)]
