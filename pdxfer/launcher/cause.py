"""Finds, in the last log lines of a process that died, the one line that says why. Pure."""

import re
from collections.abc import Sequence

_ERROR = re.compile(r"(?:^|[\s\]])((?:[A-Za-z_][\w.]*)?(?:Error|Exception|Killed)\b(?:: .*)?)$")
_PLAIN = re.compile(r"(?:^|\s)error: (.+)$")
_POINTER = re.compile(r"root cause|Engine core initialization failed|WorkerProc initialization failed|SystemExit")
"""Errors that only say that another one came before."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def find_cause(lines: Sequence[str]) -> str:
    """The last error that is not a mere pointer to an earlier one; else the last line; else empty."""
    clean = [_COLOUR.sub("", line).rstrip() for line in lines]
    for line in reversed(clean):
        if _POINTER.search(line):
            continue
        found = _ERROR.search(line) or _PLAIN.search(line)
        if found:
            return found[1].strip()
    return next((line.strip() for line in reversed(clean) if line.strip()), "")
