"""File descriptors of processes that serve HTTP: as many as the system allows, and one line when they have run out.

Called by the entry points of those processes. Of a file it knows nothing.
"""

import asyncio
import errno
import logging
import os
import resource
from typing import Any

from pdxfer.core.clock import SYSTEM_CLOCK, Clock

log = logging.getLogger(__name__)

_MOST = 1 << 20
"""Where the hard limit is a thousand million, programs that close every descriptor they could have take minutes."""
_EVERY_S = 10.0


def attainable() -> int:
    """Descriptors that a process may have once it has called `raise_limit`."""
    soft, hard = (_MOST if one == resource.RLIM_INFINITY else one for one in _limits())
    return max(soft, min(hard, _MOST))


def raise_limit() -> None:
    """The soft limit of this process, and of those it starts, becomes the hard one."""
    soft, hard = _limits()
    if soft != resource.RLIM_INFINITY and soft < attainable():
        resource.setrlimit(resource.RLIMIT_NOFILE, (attainable(), hard))


class AcceptErrors:
    """A loop's exception handler: connections that cannot be accepted are told in a line each 10 s, where asyncio
    writes a traceback for each try, a hundred at a time. Everything else goes to asyncio's own handler."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._next = clock.now()

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or not str(context.get("message")).startswith("socket.accept()"):
            loop.default_exception_handler(context)
        elif self._clock.now() >= self._next:
            self._next = self._clock.now() + _EVERY_S
            log.error("no connection can be accepted, and clients wait: %s", _told(error))


def _told(error: OSError) -> str:
    if error.errno == errno.EMFILE:
        return (
            f"this process is out of file descriptors, it may have {_limits()[0]}; raise the limit with `ulimit -n`, "
            "or LimitNOFILE= of a systemd service"
        )
    return os.strerror(error.errno or 0)


def _limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)
