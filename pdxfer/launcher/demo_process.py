"""Runs one child process (pip, the conversion) to its end: output into a file, a deadline, a tick for progress bars.

Called by demo_source and demo_model. Never shows the child's own output; `last_error` picks the line worth quoting.
"""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pdxfer.core.clock import SYSTEM_CLOCK, Clock
from pdxfer.core.errors import DeadlineError

_TICK_S = 0.1


def run_process(
    argv: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    deadline_s: float,
    tick: Callable[[], None],
    clock: Clock = SYSTEM_CLOCK,
) -> int:
    """The exit code. The child is dead when this returns or raises; DeadlineError after `deadline_s` seconds."""
    end = clock.now() + deadline_s
    with (
        log.open("wb") as out,
        subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT) as child,
    ):
        try:
            while True:
                try:
                    return child.wait(_TICK_S)
                except subprocess.TimeoutExpired:
                    tick()
                if clock.now() > end:
                    raise DeadlineError(f"{' '.join(argv[:4])} ... did not end within {deadline_s:.0f} s")
        finally:
            child.kill()


def last_error(log: Path) -> str:
    """The line of `log` that says why: pip's first ERROR, else the last line that is not empty."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines[-1:] or ["it printed nothing"])[0]
