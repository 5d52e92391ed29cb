"""Runs a plan in the foreground: prints what happens, obeys signals, cleans up. What `pdxfer launch` calls.

First SIGTERM or SIGINT drains (proxy not ready → no new pairings → running requests finish → everything leaves);
a second one kills, and the launch has failed then.
"""

import asyncio
import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from pdxfer.config.load import dump
from pdxfer.config.schema import Config
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.errors import CutOffError
from pdxfer.launcher.spec import ProcessSpec
from pdxfer.launcher.supervise import Supervisor

_REPORT_S = 10.0
"""How often a start that takes long says what it waits for."""
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95)


class Console:
    """The supervisor's Output on a terminal or a log: one prefix a process, coloured on a terminal."""

    def __init__(self, stream: TextIO, names: Sequence[str]) -> None:
        self._stream = stream
        self._width = max(map(len, [*names, "pdxfer"]))
        colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
        self._colours = colours if stream.isatty() else {}

    def line(self, name: str, text: str) -> None:
        prefix = f"{name.ljust(self._width)} |"
        if name in self._colours:
            prefix = f"\x1b[{self._colours[name]}m{prefix}\x1b[0m"
        with suppress(OSError):  # who read the log has left, or its disk is full: the processes serve on
            print(prefix, text, file=self._stream, flush=True)

    def note(self, text: str) -> None:
        self.line("pdxfer", text)


@contextmanager
def run_directory(config: Config) -> Iterator[Path]:
    """The configuration as a file for the children, in a private directory; removed afterwards.

    A lock on it tells systemd-tmpfiles, which clears /tmp of what is ten days old, that a restart still needs it.
    """
    folder = Path(tempfile.mkdtemp(prefix="pdxfer-"))
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        file = folder / "config.yaml"
        file.touch(mode=0o600)
        file.write_text(dump(config), encoding="utf-8")
        yield file
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


async def run_plan(
    specs: Sequence[ProcessSpec],
    environ: Mapping[str, str],
    stream: TextIO,
    max_restarts: int,
    on_ready: Callable[[], None],
) -> None:
    """Start, keep up, and take down at a signal. Raises LaunchError if something could not be started or kept, and
    CutOffError if requests were cut off then."""
    console = Console(stream, [spec.name for spec in specs])
    supervisor = Supervisor(specs, environ, console, max_restarts=max_restarts)
    asked, forced = asyncio.Event(), asyncio.Event()
    _on_signals(supervisor, asked, forced, console)
    work = asyncio.create_task(_start_and_watch(supervisor, console, on_ready))
    stop = asyncio.create_task(asked.wait())
    try:
        await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        for task in (work, stop):
            task.cancel()
        await asyncio.gather(work, stop, return_exceptions=True)
        await supervisor.stop()
        if supervisor.has_started:
            console.note("all processes have left")
    if forced.is_set():
        raise CutOffError("a second signal came while processes were draining: those that still ran were killed")
    if supervisor.cut_off:
        raise CutOffError(f"{' and '.join(supervisor.cut_off)} left before all requests had ended: see the log above")


def _on_signals(supervisor: Supervisor, asked: asyncio.Event, forced: asyncio.Event, console: Console) -> None:
    def on_signal() -> None:
        if asked.is_set():
            forced.set()
            console.note("second signal: killing what still runs")
            supervisor.force()
        else:
            console.note("draining; a second signal kills")
            asked.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)


async def _start_and_watch(supervisor: Supervisor, console: Console, on_ready: Callable[[], None]) -> None:
    began = SYSTEM_CLOCK.now()
    report = asyncio.create_task(_report(supervisor, console))
    try:
        await supervisor.start()
    finally:
        report.cancel()
    console.note(f"everything is ready after {SYSTEM_CLOCK.now() - began:.0f} s")
    on_ready()
    await supervisor.watch()


async def _report(supervisor: Supervisor, console: Console) -> None:
    """Say regularly what a start still waits for."""
    began = SYSTEM_CLOCK.now()
    while True:
        await asyncio.sleep(_REPORT_S)
        waiting = "; ".join(f"{name} {reason}" for name, reason in supervisor.waiting_for.items())
        console.note(f"{SYSTEM_CLOCK.now() - began:.0f} s: {waiting}")
