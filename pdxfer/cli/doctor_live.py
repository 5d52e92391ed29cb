"""`pdxfer doctor --live`: looks at a running cluster until it is clean or the time is up, and prints what lasts."""

import threading
from typing import TYPE_CHECKING

from pdxfer.cli.options import print_json
from pdxfer.core.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from pdxfer.cli.checks.live import Report
    from pdxfer.client.api import ControllerClient

EVERY_S = 0.6
"""A little more than a heartbeat, so that each look sees new reports."""


def examine(client: "ControllerClient", settle_s: float) -> "Report":
    """Look until it is clean; what is wrong in every look for `settle_s` seconds is told. Raises UnreachableError."""
    from pdxfer.cli.checks.live import in_both, look

    end = SYSTEM_CLOCK.now() + settle_s
    pause = threading.Event()
    report = look(client.health(), client.summary(), client.nodes())
    while not report.clean and SYSTEM_CLOCK.now() < end:
        pause.wait(EVERY_S)
        report = in_both(report, look(client.health(), client.summary(), client.nodes()))
    return report


def show(report: "Report", as_json: bool) -> None:
    """On stdout."""
    if as_json:
        print_json(report)
        return
    for problem in report.problems:
        print(f"PROBLEM  {problem.where}: {problem.text}")
    judged = "blocks, credits, leases, tiers, allocators and channels"
    if not report.at_rest:
        judged = "tiers, allocators and channels (requests are under way: leaks are judged when there are none)"
    print(f"{'clean' if report.clean else 'not clean'}: {report.num_engines} engines; looked at {judged}")
