"""An open channel on which nothing happens costs next to nothing: CPU time of our threads over one second."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HAS_NIXL = importlib.util.find_spec("nixl_cu12") is not None

PROGRAM = """
import sys, threading, time
from pdxfer.testing.channel_suite import ChannelSuite
from pdxfer.transport.kinds import endpoint_factories

class Pair(ChannelSuite):
    def factory(self):
        return endpoint_factories([sys.argv[1]])[sys.argv[1]]

pair = Pair()
pair.setup_method()
pair.decode.endpoint.attend(False)
begin = time.process_time()
threading.Event().wait(2.0)
print((time.process_time() - begin) / 2.0)
pair.teardown_method()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "tcp",
        "local",
        pytest.param(
            "nixl",
            marks=[pytest.mark.nixl, pytest.mark.skipif(not HAS_NIXL, reason="the nixl wheel is not installed")],
        ),
    ],
)
def test_both_ends_of_an_idle_channel_cost_less_than_two_percent_of_a_core(kind: str) -> None:
    """And the process that had them exits with 0."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert float(done.stdout.splitlines()[-1]) < 0.02
