"""One running child: its own session, its output line by line, and no way to outlive us.

Used by supervise.py on its event loop. The child leads a process group, so that what it leaves behind can be killed
too; the reaper ends the group if we are killed.
"""

import asyncio
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from pdxfer.launcher.errors import LaunchError
from pdxfer.launcher.reaper import Reaper
from pdxfer.launcher.spec import ProcessSpec

_TAIL_LINES = 400
_MAX_LINE = 16 << 10
_DRAIN_S = 2.0
"""How long output may still come after the child itself is gone (grandchildren hold the pipe)."""


class Child:
    """A started process. Made by `start` on a running event loop.

    Its end is seen through a pidfd, not through its output: what it leaves behind may hold the pipe open for ever.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        process: "subprocess.Popen[bytes]",
        on_line: Callable[[str], None],
        reaper: Reaper,
    ) -> None:
        self._spec, self._process, self._on_line, self._reaper = spec, process, on_line, reaper
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """Last lines of its output."""
        self._rest = b""
        self._gone, self._silent = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._pidfd, self._on_exit)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._loop.add_reader(process.stdout.fileno(), self._on_output)

    def __repr__(self) -> str:
        state = "running" if self._process.returncode is None else describe_exit(self._process.returncode)
        return f"<Child {self._spec.name} pid={self._process.pid} {state}>"

    @classmethod
    def start(
        cls, spec: ProcessSpec, environ: Mapping[str, str], on_line: Callable[[str], None], reaper: Reaper
    ) -> "Child":
        """Start it. Raises LaunchError if the program cannot be run."""
        try:
            process = subprocess.Popen(
                spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=spec.environment(dict(environ)),
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # ValueError: a variable that is none, as `A=B`
            why = getattr(error, "strerror", None) or error
            raise LaunchError(f"{spec.name}: cannot run {spec.argv[0]}: {why}") from error
        reaper.add(process.pid)
        return cls(spec, process, on_line, reaper)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Its exit code (negative: signal), once it and its group are gone and its output is read."""
        await self._gone.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._silent.wait(), _DRAIN_S)
        self._close_output()
        return self._process.wait()

    def terminate(self) -> None:
        """Ask it to leave. Only the leader: it knows how to stop what it started."""
        if not self._gone.is_set():
            self._process.terminate()

    def kill(self) -> None:
        """Kill the whole group; does nothing when it is gone, for its number may be another's by then."""
        if self._gone.is_set():
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.kill()
        self._process.wait()
        self._reaper.remove(self._process.pid)
        self._gone.set()

    def _on_output(self) -> None:
        assert self._process.stdout is not None
        try:
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return
        *lines, self._rest = (self._rest + chunk).replace(b"\r", b"\n").split(b"\n")
        if not chunk or len(self._rest) > _MAX_LINE:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._line(line.decode(errors="replace"))
        if not chunk:
            self._close_output()

    def _close_output(self) -> None:
        """Read no more; idempotent."""
        assert self._process.stdout is not None
        if not self._process.stdout.closed:
            self._loop.remove_reader(self._process.stdout.fileno())
            self._process.stdout.close()
        self._silent.set()

    def _line(self, line: str) -> None:
        line = line.rstrip()[:_MAX_LINE]
        if line:
            self.tail.append(line)
            self._on_line(line)


def describe_exit(code: int) -> str:
    """`exit code 1`, or `SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
