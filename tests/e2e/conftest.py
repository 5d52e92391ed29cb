"""Real engines for the end-to-end tests: one pair, started by `pdxfer launch`, shared by the whole session.

The reference is one engine alone: the same prompt sent straight to an engine, without a transfer, under a cache salt of
its own so that no block of the pair's can serve it.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import urllib3

from pdxfer.bench.texts import Prompts
from tests.e2e.engines import PairUrls

START_S = 400


def free_ports(count: int) -> list[int]:
    """Ports the OS says are free."""
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class RunningPair:
    """`pdxfer launch --role all` in a process group of its own."""

    def __init__(self, *sets: str, log: Path) -> None:
        proxy, prefill, decode, router, controller = free_ports(5)
        host = "http://127.0.0.1"
        self.urls = PairUrls(f"{host}:{proxy}", f"{host}:{prefill}", f"{host}:{decode}", f"{host}:{controller}")
        self.log = log
        ports = [
            f"proxy.port={proxy}", f"topology.prefill_port={prefill}", f"topology.decode_port={decode}",
            f"router.port={router}", f"controller.port={controller}", "network.ports=[0,0]",
        ]  # fmt: skip
        args = [arg for setting in (*ports, "model.served_name=demo", *sets) for arg in ("--set", setting)]
        command = [sys.executable, "-m", "pdxfer.cli.main", "launch", "--role", "all", "--config", "cpu-1p1d", *args]
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        self._wait_ready()

    def _wait_ready(self) -> None:
        http, deadline = urllib3.PoolManager(retries=False, timeout=2), time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                pytest.fail(f"the pair ended at start, exit {self.process.returncode}:\n{self.tail()}")
            try:
                if http.request("GET", self.urls.proxy + "/ready").status == 200:
                    return
            except urllib3.exceptions.HTTPError:
                pass
            time.sleep(0.5)
        self.stop()
        pytest.fail(f"the pair was not ready within {START_S} s:\n{self.tail()}")

    def tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])

    def kill_engine(self, url: str) -> None:
        """kill -9 of all processes of the engine that listens there; its launcher starts it again."""
        victims = [p for p in psutil.Process(self.process.pid).children(recursive=True) if _listens(p, url)]
        assert len(victims) == 1, victims
        for process in [*victims[0].children(recursive=True), victims[0]]:
            process.kill()

    def stop(self) -> int:
        """SIGTERM, and SIGKILL to the whole group if that does not help. Returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


def _listens(process: psutil.Process, url: str) -> bool:
    """Whether this process is the API server behind `url`."""
    port = url.rpartition(":")[2]
    try:
        return f"--port {port}" in " ".join(process.cmdline())
    except psutil.Error:
        return False


@pytest.fixture(scope="session")
def logs() -> Path:
    """Where the engines' logs go; kept after the run (PDXFER_TEST_LOGS names the place)."""
    path = Path(os.environ.get("PDXFER_TEST_LOGS") or tempfile.mkdtemp(prefix="pdxfer-e2e-"))
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture(scope="session")
def running(logs: Path) -> Iterator[RunningPair]:
    """A float32 pair (greedy tokens are exact there) with a small pool, so that engines preempt and requests queue."""
    pair = RunningPair(
        "model.dtype=float32",
        "router.min_remote_tokens=0",
        "engine.max_num_seqs=16",
        "engine.extra_args=--num-gpu-blocks-override,64,--enable-auto-tool-choice,--tool-call-parser,hermes",
        "proxy.passthrough=/tokenize",
        "store.enabled=true",
        "store.tiers=[{url: 'dram:', capacity_gib: 0.2}]",
        log=logs / "float32.log",
    )
    yield pair
    code = pair.stop()
    assert code == 0, f"the pair's exit code was {code}:\n{pair.tail()}"


@pytest.fixture(scope="session")
def pair(running: RunningPair) -> PairUrls:
    """URLs of the float32 pair."""
    return running.urls


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    """Real English, cut by the demo model's tokenizer."""
    from transformers import AutoTokenizer

    from pdxfer.launcher.demo_model import demo_model_dir

    return Prompts(AutoTokenizer.from_pretrained(demo_model_dir(os.environ)))


@pytest.fixture(scope="session")
def is_full() -> bool:
    """`tests/run.sh full`: all counts."""
    return os.environ.get("PDXFER_TIER") == "full"
