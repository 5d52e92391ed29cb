"""Running a plan: what is printed, and signals that are obeyed even if nobody reads it."""

import asyncio
import fcntl
import io
import os
import signal
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from pdxfer.config.load import load
from pdxfer.config.schema import Config
from pdxfer.core.errors import CutOffError
from pdxfer.launcher.child import Child
from pdxfer.launcher.errors import LaunchError
from pdxfer.launcher.reaper import Reaper
from pdxfer.launcher.run import run_directory, run_plan
from pdxfer.launcher.spec import PortUse, ProcessSpec

SERVER = """
import signal, socket, sys, time
if len(sys.argv) > 2: signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.argv[2])))
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
time.sleep(60)
"""


def spec(folder: Path, *exit_code: str) -> ProcessSpec:
    path = str(folder / "s")
    return ProcessSpec(
        name="a", argv=(sys.executable, "-c", SERVER, path, *exit_code), ready_url=f"unix:{path}", ready_timeout_s=30
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_log_that_nobody_reads_any_more_keeps_no_signal_from_ending_the_launch(
    tmp_path: Path, number: signal.Signals
) -> None:
    """As with `pdxfer launch ... 2>&1 | tee log` and Ctrl-C, which ends tee first."""
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")

    def interrupt() -> None:
        os.close(reader)
        os.kill(os.getpid(), number)

    async with asyncio.timeout(30):
        await run_plan([spec(tmp_path)], os.environ, stream, 0, interrupt)
    with pytest.raises(BrokenPipeError):
        stream.close()


async def test_a_taken_port_is_said_once(tmp_path: Path) -> None:
    """Nothing was started, so nothing has left."""
    out = io.StringIO()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        use = PortUse(host="127.0.0.1", port=taken.getsockname()[1], key="proxy.port")
        with pytest.raises(LaunchError, match="a cannot listen on .*the port is taken by"):
            await run_plan([replace(spec(tmp_path), ports=(use,))], os.environ, out, 0, lambda: None)
    assert out.getvalue() == ""


async def test_a_variable_that_is_none_is_said_with_its_process(tmp_path: Path) -> None:
    """As `engine.env: {"A=B": x}` asks for."""
    with pytest.raises(LaunchError, match="a: cannot run .*: illegal environment variable name"):
        await run_plan([replace(spec(tmp_path), env={"A=B": "x"})], os.environ, io.StringIO(), 0, lambda: None)


def test_the_configuration_of_a_long_run_is_not_cleared_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """systemd-tmpfiles leaves alone a directory that it cannot lock; a process that dies on day eleven still starts."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with run_directory(Config()) as file:
        assert load([file], [], {}).config == Config() and file.stat().st_mode & 0o077 == 0
        cleaner = os.open(file.parent, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(cleaner)
    assert list(tmp_path.iterdir()) == []


async def stopped(one: ProcessSpec) -> None:
    """Run it, and send SIGTERM when it is ready."""
    out = io.StringIO()
    async with asyncio.timeout(30):
        await run_plan([one], os.environ, out, 0, lambda: os.kill(os.getpid(), signal.SIGTERM))


async def test_a_launch_whose_proxy_cut_requests_off_has_failed(tmp_path: Path) -> None:
    """Time was up, or it had to be killed; an engine's exit code says nothing of the kind."""
    await stopped(spec(tmp_path, "1"))
    (tmp_path / "s").unlink()
    await stopped(replace(spec(tmp_path, "0"), drains=True))
    (tmp_path / "s").unlink()
    with pytest.raises(CutOffError, match="a left before all requests had ended"):
        await stopped(replace(spec(tmp_path, "1"), drains=True))


async def test_a_child_that_is_gone_is_not_killed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second signal comes long after some have left; their process ids may be somebody else's."""
    reaper = Reaper()
    reaper.start()
    one = ProcessSpec(name="a", argv=("true",), ready_url="unix:", ready_timeout_s=1)
    child = Child.start(one, os.environ, lambda line: None, reaper)
    assert await child.wait() == 0
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: killed.append(group))
    child.kill()
    reaper.close()
    assert killed == []
