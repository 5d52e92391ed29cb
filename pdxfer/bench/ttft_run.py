"""Runs one arm: starts its processes, measures on them, takes them down again, whatever happens.

The launcher's supervisor keeps the processes; each writes its own log file. An engine that dies ends the run at once,
with its last error and the place of its log.
"""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TextIO, TypeVar

from pdxfer.bench.ttft_arms import Arm
from pdxfer.bench.ttft_errors import BenchError
from pdxfer.core.errors import PdxferError
from pdxfer.launcher.supervise import Supervisor

T = TypeVar("T")
_DEATH_NOTICE_S = 3.0
"""After a failed request: how long the death of an engine, which would explain it, may take to show."""


class LogFiles:
    """One file a process, under a directory; what the supervisor itself says goes to stderr."""

    def __init__(self, directory: Path, arm: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._arm = directory, arm
        self._files: dict[str, TextIO] = {}

    def path(self, name: str) -> Path:
        """Log of one process."""
        return self._directory / f"{self._arm}-{name}.log"

    def line(self, name: str, text: str) -> None:
        """One line of a process's output."""
        if name not in self._files:
            self._files[name] = self.path(name).open("w", encoding="utf-8", buffering=1)
        self._files[name].write(f"{text}\n")

    def note(self, text: str) -> None:
        """Something the supervisor has to say."""
        say(f"  {self._arm}: {text}")

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


async def with_arm(arm: Arm, logs: Path, work: Callable[[], Awaitable[T]]) -> T:
    """Run `work` while the arm is up. Raises BenchError when a process dies, with its last error and log."""
    files = LogFiles(logs, arm.name)
    supervisor = Supervisor(arm.processes, os.environ, files, max_restarts=0)
    try:
        await supervisor.start()
        return await _work_or_death(supervisor, work)
    except PdxferError as error:
        places = ", ".join(str(files.path(spec.name)) for spec in arm.processes)
        raise BenchError(f"{arm.name}: {error} (logs: {places})") from error
    finally:
        try:
            await supervisor.stop()
        finally:
            supervisor.force()
            files.close()


async def _work_or_death(supervisor: Supervisor, work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work`; if a process dies first, that is the error."""
    job = asyncio.ensure_future(work())
    watch = asyncio.create_task(supervisor.watch())
    try:
        await asyncio.wait([job, watch], return_when=asyncio.FIRST_COMPLETED)
        if job.done() and job.exception() is not None:
            await asyncio.wait([watch], timeout=_DEATH_NOTICE_S)
        if watch.done():
            watch.result()
        return await job
    finally:
        for task in (job, watch):
            task.cancel()
        await asyncio.gather(job, watch, return_exceptions=True)
