"""Starts the processes of a plan, keeps them up, and takes them down in order. One event loop; no I/O of its own.

waiting ──deps ready──▶ starting ──probe──▶ ready ──died──▶ backoff ──▶ starting ...   at most max_restarts times
                           └── died, or out of time, before it was ever ready: the launch fails with its last error
A process that has been ready before and is slow to be so again is waited for: the others serve on meanwhile.
"""

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Protocol

from pdxfer.core.clock import SYSTEM_CLOCK, Clock
from pdxfer.launcher.cause import find_cause
from pdxfer.launcher.child import Child, describe_exit
from pdxfer.launcher.errors import LaunchError
from pdxfer.launcher.ready import Prober, check_ports
from pdxfer.launcher.reaper import Reaper
from pdxfer.launcher.spec import ProcessSpec

_QUIET_S = 300.0
"""A life that was ready and this long: earlier deaths are forgotten."""
_BACKOFF_MAX_S = 30.0
_LAST_LINES = 12
"""Log lines shown again when a process died."""


class Output(Protocol):
    """Where the supervisor tells what happens."""

    def line(self, name: str, text: str) -> None:
        """One line of a child's output."""
        ...

    def note(self, text: str) -> None:
        """Something the supervisor itself has to say."""
        ...


class Supervisor:
    """Processes of one plan. `start`, then `watch` until it ends, then `stop`; `force` at any time."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        environ: Mapping[str, str],
        output: Output,
        *,
        max_restarts: int = 3,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        ready = {spec.name: asyncio.Event() for spec in specs}
        self._output = output
        self._reaper = Reaper()
        self._keepers = [_Keeper(spec, environ, output, ready, max_restarts, clock, self._reaper) for spec in specs]
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"<Supervisor {' '.join(f'{keeper.spec.name}={keeper.state}' for keeper in self._keepers)}>"

    @property
    def has_started(self) -> bool:
        """Whether anything was: not if a port is taken."""
        return bool(self._tasks)

    @property
    def waiting_for(self) -> dict[str, str]:
        """Processes that are not ready → why."""
        return {keeper.spec.name: keeper.reason for keeper in self._keepers if not keeper.is_ready}

    @property
    def cut_off(self) -> list[str]:
        """Processes that `stop` has ended before what they served had."""
        return [keeper.spec.name for keeper in self._keepers if keeper.has_cut_off]

    def pid(self, name: str) -> int:
        """Process id of a running child, 0 if it is down."""
        return next((k.child.pid for k in self._keepers if k.spec.name == name and k.child), 0)

    async def start(self) -> None:
        """Start everything in order and return when all is ready. Raises LaunchError with the cause if one is not."""
        check_ports(keeper.spec for keeper in self._keepers)
        self._reaper.start()
        self._tasks = [asyncio.create_task(keeper.keep(), name=keeper.spec.name) for keeper in self._keepers]
        ready = asyncio.create_task(self._all_ready())
        try:
            await asyncio.wait([ready, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            self._raise_failure()
        finally:
            ready.cancel()

    async def watch(self) -> None:
        """Keep everything up. Raises LaunchError when a process died too often; else returns only after `stop`."""
        if self._tasks:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            self._raise_failure()

    async def stop(self) -> None:
        """Take everything down by stop order, each within its time. Idempotent."""
        for keeper in self._keepers:
            keeper.is_stopping = True
        for _, group in _by_stop_order(self._keepers):
            await asyncio.gather(*(keeper.stop() for keeper in group))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._reaper.close()

    def force(self) -> None:
        """Kill what still runs."""
        for keeper in self._keepers:
            keeper.is_stopping = True
            if keeper.child is not None:
                keeper.child.kill()

    async def _all_ready(self) -> None:
        for keeper in self._keepers:
            await keeper.wait_ready()

    def _raise_failure(self) -> None:
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error


def _by_stop_order(keepers: Sequence["_Keeper"]) -> Iterator[tuple[int, Iterator["_Keeper"]]]:
    def order(keeper: _Keeper) -> int:
        return keeper.spec.stop_order

    return groupby(sorted(keepers, key=order), order)


class _Keeper:
    """Keeps one process up."""

    def __init__(
        self,
        spec: ProcessSpec,
        environ: Mapping[str, str],
        output: Output,
        ready: Mapping[str, asyncio.Event],
        max_restarts: int,
        clock: Clock,
        reaper: Reaper,
    ) -> None:
        self._reaper = reaper
        self.spec, self._environ, self._output, self._clock = spec, environ, output, clock
        self._ready, self._max_restarts = ready, max_restarts
        self._prober = Prober(spec.ready_url)
        self.child: Child | None = None
        self.is_stopping = self.has_cut_off = False
        self.state = "waiting"

    @property
    def is_ready(self) -> bool:
        return self._ready[self.spec.name].is_set()

    @property
    def reason(self) -> str:
        """Why it is not ready."""
        if self.state == "starting":
            return self._prober.reason
        missing = [name for name in self.spec.depends_on if not self._ready[name].is_set()]
        return f"waits for {', '.join(missing)}" if self.state == "waiting" and missing else self.state

    async def wait_ready(self) -> None:
        await self._ready[self.spec.name].wait()

    async def keep(self) -> None:
        """Run it until `stop`. Raises LaunchError when it cannot be started, or died too often."""
        for name in self.spec.depends_on:
            await self._ready[name].wait()
        num_deaths, was_ready = 0, False
        while not self.is_stopping:
            started = self._clock.now()
            code = await self._run_once(was_ready)
            if self.is_stopping:
                return
            was_quiet = self.is_ready and self._clock.now() - started > _QUIET_S
            was_ready = was_ready or self.is_ready
            self._ready[self.spec.name].clear()
            num_deaths = 1 if was_quiet else num_deaths + 1
            await self._after_death(code, num_deaths, was_ready)

    async def stop(self) -> None:
        """Ask it to leave, wait, kill it."""
        self.is_stopping = True
        child = self.child
        if child is None:
            return
        self.state = "stopping"
        child.terminate()
        try:
            code = await asyncio.wait_for(asyncio.shield(child.wait()), self.spec.stop_timeout_s)
        except TimeoutError:
            self._output.note(f"{self.spec.name} did not leave within {self.spec.stop_timeout_s:g} s: killed")
            child.kill()
            code = await child.wait()
        self.has_cut_off = self.spec.drains and self.is_ready and code != 0
        self.state = "stopped"

    async def _run_once(self, was_ready: bool) -> int:
        """Start it and return its exit code when it is gone. `was_ready`: in an earlier life."""
        self.state = "starting"
        self.child = Child.start(
            self.spec, self._environ, lambda line: self._output.line(self.spec.name, line), self._reaper
        )
        gone = asyncio.create_task(self.child.wait())
        probe = asyncio.create_task(self._prober.until_ready())
        both, time_s = [gone, probe], self.spec.ready_timeout_s
        try:
            done, _ = await asyncio.wait(both, timeout=time_s, return_when=asyncio.FIRST_COMPLETED)
            if not done and not self.is_stopping:
                self._out_of_time(was_ready)
                done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if probe in done and gone not in done:
                self.state = "ready"
                self._ready[self.spec.name].set()
                self._output.note(f"{self.spec.name} is ready")
            return await gone
        finally:
            probe.cancel()
            with suppress(asyncio.CancelledError):
                await probe

    def _out_of_time(self, was_ready: bool) -> None:
        """Raise LaunchError, or say that it is waited for: what it needs may be down for longer than it was itself."""
        what, time_s = self.spec.name, self.spec.ready_timeout_s
        if not was_ready:
            raise LaunchError(f"{what} was not ready after {time_s:g} s: it {self._prober.reason}. See its log above")
        self._output.note(f"{what} is up again but not ready after {time_s:g} s: {self._prober.reason}; waiting for it")

    async def _after_death(self, code: int, num_deaths: int, was_ready: bool) -> None:
        """Report it; wait for the next start, or raise LaunchError."""
        assert self.child is not None
        tail, self.child = list(self.child.tail), None
        what = f"{self.spec.name} died ({describe_exit(code)})"
        cause = find_cause(tail)
        if not was_ready:
            raise LaunchError(f"{what} before it was ready: {cause or 'it said nothing'}")
        self._output.note(f"{what}; its last lines:")
        for line in tail[-_LAST_LINES:]:
            self._output.line(self.spec.name, line)
        if num_deaths > self._max_restarts:
            raise LaunchError(f"{what} {num_deaths} times; giving up. Last error: {cause or 'none was logged'}")
        delay = min(_BACKOFF_MAX_S, 0.5 * 2**num_deaths) * random.uniform(0.8, 1.2)
        self._output.note(f"starting {self.spec.name} again in {delay:.1f} s ({num_deaths} of {self._max_restarts})")
        self.state = f"starts again in {delay:.1f} s"
        await asyncio.sleep(delay)
