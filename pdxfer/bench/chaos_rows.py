"""The table and the summary of a chaos run. Pure."""

import sys
from collections.abc import Sequence

from pdxfer.bench.chaos_faults import Happened, role_of
from pdxfer.bench.chaos_judge import Verdict
from pdxfer.bench.chaos_load import Got
from pdxfer.bench.report import Value

Judged = tuple[Got, Verdict]
_QUIET = "none"
_ALL = "all"


def rows(judged: Sequence[Judged], happened: Sequence[Happened]) -> list[dict[str, Value]]:
    """One line a kind of fault and role, one for requests that met none, one for all. A request belongs to the last
    fault that began before it ended, if the cluster was not whole again when it was sent."""
    names = sorted({_name(h) for h in happened})
    found = []
    for name in (*names, _QUIET, _ALL):
        faults = [h for h in happened if name in (_name(h), _ALL)]
        requests = [(got, verdict) for got, verdict in judged if name in (_met(got, happened), _ALL)]
        found.append(_row(name, requests, faults))
    return found


def complain(judged: Sequence[Judged], happened: Sequence[Happened]) -> None:
    """Say on stderr what was not right, and which faults it met."""
    for got, verdict in judged:
        if verdict not in (Verdict.right, Verdict.left):
            faults = ", ".join(str(h.fault) for h in happened if h.touches(got.began, got.ended))
            told = got.failure or repr(got.text)
            print(f"{verdict}: {told} after {got.ended - got.began:.1f} s (met: {faults})", file=sys.stderr)


def summary(judged: Sequence[Judged], happened: Sequence[Happened]) -> dict[str, Value]:
    """The figures that others read."""
    return {
        "requests": len(judged),
        "faults": len(happened),
        "wrong": _count(judged, Verdict.wrong),
        "hung": _count(judged, Verdict.hung),
        "failed": _count(judged, Verdict.failed),
        "failed_unexplained": _count(judged, Verdict.unexplained),
        "aborted": _count(judged, Verdict.left),
        "slowest_recovery_s": max((h.recovery_s for h in happened), default=None),
        "slowest_answer_s": max((got.ended - got.began for got, _ in judged), default=None),
    }


def _row(name: str, judged: Sequence[Judged], happened: Sequence[Happened]) -> dict[str, Value]:
    whole = summary(judged, happened)
    return {"fault": name, "faults": whole.pop("faults"), **whole}


def _count(judged: Sequence[Judged], verdict: Verdict) -> int:
    return sum(found is verdict for _, found in judged)


def _name(happened: Happened) -> str:
    return f"{happened.fault.kind} {role_of(happened.fault.target)}"


def _met(got: Got, happened: Sequence[Happened]) -> str:
    met = [_name(h) for h in happened if h.touches(got.began, got.ended)]
    return met[-1] if met else _QUIET
