"""A writer that is stopped in mid-write and goes on after the fence does not touch the blocks that were given away.

And the check has teeth: without the fence, or with a transport in which the writer itself stores into our memory, it
finds late bytes.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PAIR = Path(__file__).with_name("fencing_pair.py")
HAS_NIXL = importlib.util.find_spec("nixl_cu12") is not None
needs_nixl = [pytest.mark.nixl, pytest.mark.skipif(not HAS_NIXL, reason="the nixl wheel is not installed")]


def late_bytes(*arguments: str, **environment: str) -> int:
    """Run the pair; also fails if one of its processes does not exit with 0."""
    done = subprocess.run(
        [sys.executable, str(PAIR), *arguments],
        env={**os.environ, "PYTHONPATH": str(PAIR.parent.parent), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return int(json.loads(done.stdout.splitlines()[-1])["late_bytes"])


@pytest.mark.parametrize(
    "kind",
    ["tcp", pytest.param("local", marks=pytest.mark.slow), pytest.param("nixl", marks=[*needs_nixl, pytest.mark.slow])],
)
def test_no_byte_lands_after_a_fence(kind: str) -> None:
    assert late_bytes(kind, "fence") == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tcp", pytest.param("nixl", marks=needs_nixl)])
def test_without_the_fence_bytes_land_late(kind: str) -> None:
    assert late_bytes(kind, "no-fence") > 0


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.skipif(not HAS_NIXL, reason="the nixl wheel is not installed")
def test_a_transport_in_which_the_writer_stores_is_not_fenced() -> None:
    """Why UCX_TLS excludes cma and shared memory, and why accepts() refuses them on one host."""
    assert late_bytes("nixl", "fence", "--any-transport", UCX_TLS="tcp,cma") > 0
