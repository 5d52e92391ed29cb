"""In CI a skipped test is a hole that nobody sees: it fails there, unless the machine cannot have what it needs.

run.sh names the tier in PDXFER_TIER and installs every tool and package that tests need. Elsewhere they skip.
"""

import os
import re
from collections.abc import Generator

import pytest

MACHINE = re.compile(
    r"this CPU has no|needs an NVIDIA GPU|needs root|this kernel gives no huge pages|does not apply|"
    r"--link makes network namespaces, which needs root"
)
"""Reasons that no installation can mend."""
IS_CI = os.environ.get("PDXFER_TIER") in ("ci", "full")


def refuse(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Make a skip a failure if something is missing that should be there."""
    if not report.skipped or not isinstance(report.longrepr, tuple):
        return
    path, line, reason = report.longrepr
    if not MACHINE.search(reason):
        report.outcome = "failed"
        report.longrepr = f"{path}:{line}: skipped in CI, where nothing may be missing: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if IS_CI:
        refuse(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if IS_CI:
        refuse(report)
    return report
