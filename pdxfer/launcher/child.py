"""One running child: its own session, its output line by line, and no way to outlive us.

Used by supervise.py on its event loop. The child leads a process group, so that what it leaves behind can be killed
too; the kernel sends it SIGTERM if we die (PR_SET_PDEATHSIG).
"""

import asyncio
import ctypes
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from pdxfer.launcher.errors import LaunchError
from pdxfer.launcher.spec import ProcessSpec

_PR_SET_PDEATHSIG = 1
_TAIL_LINES = 400
_MAX_LINE = 16 << 10
_DRAIN_S = 2.0
"""How long output may still come after the child itself is gone (grandchildren hold the pipe)."""
_libc = ctypes.CDLL(None)


class Child:
    """A started process. Made by `start`."""

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process, on_line: Callable[[str], None]) -> None:
        self._spec, self._process, self._on_line = spec, process, on_line
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """Last lines of its output."""
        self._reader = asyncio.create_task(self._relay())

    def __repr__(self) -> str:
        state = "running" if self._process.returncode is None else describe_exit(self._process.returncode)
        return f"<Child {self._spec.name} pid={self._process.pid} {state}>"

    @classmethod
    async def start(cls, spec: ProcessSpec, environ: Mapping[str, str], on_line: Callable[[str], None]) -> "Child":
        """Start it. Raises LaunchError if the program cannot be run."""
        parent = os.getpid()

        def die_with_parent() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

        try:
            process = await asyncio.create_subprocess_exec(
                *spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=spec.environment(dict(environ)),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            raise LaunchError(f"{spec.name}: cannot run {spec.argv[0]}: {error.strerror}") from error
        return cls(spec, process, on_line)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Its exit code (negative: signal), once it is gone, with its group, and its output is read."""
        code = await self._process.wait()
        self.kill()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._reader, _DRAIN_S)
        return code

    def terminate(self) -> None:
        """Ask it to leave. Only the leader: it knows how to stop what it started."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Kill the whole group; does nothing when it is gone."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _relay(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        rest = ""
        while chunk := await stream.read(1 << 16):
            *lines, rest = (rest + chunk.decode(errors="replace")).replace("\r", "\n").split("\n")
            for line in lines:
                self._line(line)
            if len(rest) > _MAX_LINE:
                self._line(rest)
                rest = ""
        self._line(rest)

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
