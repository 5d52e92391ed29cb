"""Death and false death on a host whose cores are all busy: a cluster of fake engines, beside processes that spin.

Nobody is suspected while all live, however late the host runs them; one that is stopped is noticed in time.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
from router_kit import wait_until
from test_cli import Cluster, launched

SUSPECT_S = 1.5
"""Three heartbeats."""
SLACK_S = 2.0
"""How late such a host may run the router itself, and this test."""
SPIN = "while True: pass"


@contextmanager
def saturated() -> Iterator[None]:
    """Two spinning processes for each core."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def events(cluster: Cluster, kind: str) -> list[dict[str, Any]]:
    return [event for event in cluster.get(cluster.controller, "/v1/events")["events"] if event["kind"] == kind]


def live_under_load(cluster: Cluster, seconds: float) -> float:
    """Requests one after the other; the largest lateness of a heartbeat that any half reported."""
    worst, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        assert cluster.complete(300)[0]
        for node in cluster.get(cluster.controller, "/v1/health")["engines"]:
            worst = max(worst, *(rank["lag_s"] for rank in node["ranks"]))
    return worst


def prefill_process(cluster: Cluster) -> psutil.Process:
    return next(process for process in cluster.children() if "prefill" in process.cmdline())


@pytest.mark.slow
def test_nobody_is_suspected_on_a_saturated_host_and_a_stopped_engine_is() -> None:
    """20 s without a false death, then a true one within three heartbeats."""
    check(20.0)


@pytest.mark.full
def test_nobody_is_suspected_for_ten_minutes_on_a_saturated_host() -> None:
    check(600.0)


def check(seconds: float) -> None:
    with launched() as cluster:
        cluster.until("everything is ready")
        with saturated():
            worst = live_under_load(cluster, seconds)
            print(f"{seconds:g} s saturated: heartbeats late by {worst:.3f} s at most")
            assert not events(cluster, "suspect") and not events(cluster, "proxy_left")
            victim = prefill_process(cluster)
            stopped = time.time()
            victim.send_signal(signal.SIGSTOP)
            wait_until(lambda: events(cluster, "suspect"), what="the stopped engine's suspicion")
            (noticed,) = events(cluster, "suspect")
            victim.send_signal(signal.SIGCONT)
        assert noticed["detail"]["engine_id"] == "p0"
        print(f"stopped engine noticed after {noticed['wall'] - stopped:.2f} s")
        assert noticed["wall"] - stopped <= SUSPECT_S + SLACK_S
        wait_until(lambda: events(cluster, "back"), what="the engine's return")
