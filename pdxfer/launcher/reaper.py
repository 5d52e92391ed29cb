"""Cleans up after a supervisor that was killed: a small process of its own that knows the children's groups.

    supervisor ──"+pid" / "-pid" lines on a pipe──▶ reaper       end of the pipe = the supervisor is gone

Then every leader still known gets SIGTERM, and after a while its whole group SIGKILL. PR_SET_PDEATHSIG alone would not
do: it reaches leaders only, and a vLLM that dies while it starts leaves its engine core behind.
"""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import BinaryIO

_LEAVE_S = 15.0
"""How long all leaders together may take after SIGTERM."""


class Reaper:
    """The supervisor's end: `start` before the first child, `close` when all are gone."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Run this file, which needs nothing but the standard library, in a session of its own."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, pid: int) -> None:
        """A child that leads a group was started."""
        self._tell(f"+{pid}\n")

    def remove(self, pid: int) -> None:
        """It and its group are gone."""
        self._tell(f"-{pid}\n")

    def close(self) -> None:
        """Let it end; idempotent. It ends what is still known."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        """A reaper that somebody killed is missed only if we are killed too."""
        assert self._process is not None and self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def main() -> None:
    """The reaper's process: learn pids until the pipe ends, then end what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_groups(learn(sys.stdin.buffer))


def learn(pipe: BinaryIO) -> dict[int, int]:
    """Read the supervisor's lines to the end. Returns leader → pidfd of what is still known."""
    known: dict[int, int] = {}
    for line in pipe:
        pid = int(line[1:])
        if line.startswith(b"+"):
            with suppress(ProcessLookupError):
                known[pid] = os.pidfd_open(pid)
        elif pid in known:
            os.close(known.pop(pid))
    return known


def end_groups(known: dict[int, int]) -> None:
    """Ask the leaders to leave, wait, then kill their groups."""
    for pidfd in known.values():
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
    deadline = time.monotonic() + _LEAVE_S
    for pid, pidfd in known.items():
        select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
