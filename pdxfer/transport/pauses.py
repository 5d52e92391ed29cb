"""How long to sleep between two looks at work that nothing announces (NIXL's writes)."""

import ctypes

SHORTEST_S, LONGEST_S = 60e-6, 1e-3
_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000


def pause_after(waited_s: float) -> float:
    """A 64th of what has been waited since something completed, within bounds.

    So a unit of 6 MiB is looked at about every 100 KiB at any speed of the link: less than a socket buffer holds, and
    a slow link costs no CPU.
    """
    return min(max(waited_s / 64, SHORTEST_S), LONGEST_S)


def sleep_precisely() -> None:
    """Let this thread's short sleeps be short: the kernel's default adds 50 us to each."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS), 0, 0, 0)
