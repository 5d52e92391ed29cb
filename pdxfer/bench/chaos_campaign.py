"""The faults of a chaos run, one after another, each when the last one is over.

An engine that was killed takes a minute to start: meanwhile come faults that leave others of its role to serve.
"""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress

import aiohttp

from pdxfer.bench.chaos_cluster import Cluster
from pdxfer.bench.chaos_disk import SmallDisk
from pdxfer.bench.chaos_faults import DISK, LINK, Fault, Happened, inject, may_meet
from pdxfer.bench.chaos_link import FaultyLink
from pdxfer.bench.chaos_watch import Watch

_BUSY_S = 5.0
"""A fault of an engine waits so long for the engine to have work."""


class Campaign:
    """`run` once, on a cluster that is whole."""

    def __init__(
        self, cluster: Cluster, session: aiohttp.ClientSession, watch: Watch, link: FaultyLink | None,
        disk: SmallDisk | None, recover_s: float,
    ) -> None:  # fmt: skip
        """The cluster must be whole `recover_s` after a fault."""
        self._cluster, self._session, self._watch = cluster, session, watch
        self._link, self._disk, self._recover_s = link, disk, recover_s
        self._starting: asyncio.Task[None] | None = None
        self._down = ""
        """Engine that starts again while other faults come."""
        self._happened: list[Happened] = []
        self._num_faults = 0

    async def run(self, faults: Sequence[Fault], end: float) -> list[Happened]:
        """All faults that can begin before `end` of the event loop's clock, in the order in which they began. Raises
        BenchError if the cluster does not come back."""
        waiting, loop = list(faults), asyncio.get_running_loop()
        self._num_faults = len(waiting)
        try:
            while waiting and loop.time() < end:
                fault = self._next(waiting)
                if fault is None:
                    await self._all_back()
                else:
                    waiting.remove(fault)
                    await self._break(fault)
            await self._all_back()
        finally:
            if self._starting is not None:
                self._starting.cancel()
        return sorted(self._happened, key=lambda happened: happened.began)

    def _next(self, waiting: Sequence[Fault]) -> Fault | None:
        """The first fault that may come now; None: an engine has to come back before."""
        if self._starting is not None and self._starting.done():
            self._starting.result()
            self._starting, self._down = None, ""
        engines = list(self._cluster.plan.engines)
        return next((f for f in waiting if not self._down or may_meet(f, self._down, engines)), None)

    async def _all_back(self) -> None:
        if self._starting is not None:
            await self._starting
            self._starting, self._down = None, ""

    async def _break(self, fault: Fault) -> None:
        """One fault, and the wait until the cluster is whole again, but for an engine that starts."""
        cluster, loop = self._cluster, asyncio.get_running_loop()
        await asyncio.sleep(fault.gap_s)
        is_process = fault.target not in (LINK, DISK)
        if fault.target in cluster.plan.engines:
            with suppress(TimeoutError):
                async with asyncio.timeout(_BUSY_S):
                    await cluster.until_busy(self._session, fault.target)
        life = await cluster.life(self._session, fault.target) if is_process else None
        await self._watch.look()
        began = loop.time()
        if fault.target == LINK and self._link is not None:
            await self._link.inject(fault)
        elif fault.target == DISK and self._disk is not None:
            await self._disk.inject(fault)
        elif life is not None:
            await inject(fault, life.pid)
        ended = loop.time()
        if life is not None and fault.ends_engine:
            self._down = fault.target

            async def starting() -> None:
                await cluster.until_back(self._session, self._recover_s, life)
                self._over(fault, began, ended)

            self._starting = asyncio.create_task(starting(), name=f"chaos-{fault.target}")
            await cluster.until_whole(self._session, self._recover_s, without=self._down)
        else:
            gone = life if fault.ends_process else None
            await cluster.until_whole(self._session, self._recover_s, gone, without=self._down)
            self._over(fault, began, ended)

    def _over(self, fault: Fault, began: float, ended: float) -> None:
        whole = asyncio.get_running_loop().time()
        done = Happened(fault=fault, began=began, ended=ended, whole=whole)
        self._happened.append(done)
        text = f"{len(self._happened)}/{self._num_faults} {fault}"
        print(f"{text}: whole after {done.recovery_s:.1f} s", file=sys.stderr)
