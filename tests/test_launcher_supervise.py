"""Supervisor: order, restarts, causes, drain and no orphans; children are small Python servers."""

import asyncio
import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pdxfer.launcher import reaper
from pdxfer.launcher.errors import LaunchError
from pdxfer.launcher.spec import PortUse, ProcessSpec
from pdxfer.launcher.supervise import Supervisor
from pdxfer.testing.fake_clock import FakeClock

SERVER = """
import http.server, os, signal, sys, time
def is_busy(): return "busy" in sys.argv and os.path.exists(sys.argv[-1])
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(503 if is_busy() else 200); self.end_headers()
    def log_message(self, *a): pass
if "deaf" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
else: signal.signal(signal.SIGTERM, lambda *_: (print("leaving", flush=True), sys.exit(0)))
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), H)
print("serving", flush=True)
server.serve_forever()
"""


class Record:
    """An Output that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def line(self, name: str, text: str) -> None:
        self.lines.append((name, text))

    def note(self, text: str) -> None:
        self.lines.append(("pdxfer", text))

    def notes(self) -> str:
        return "\n".join(text for name, text in self.lines if name == "pdxfer")

    def index(self, name: str, text: str) -> int:
        return self.lines.index((name, text))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server(name: str, *args: str, after: tuple[str, ...] = (), stop_order: int = 0) -> ProcessSpec:
    port = free_port()
    return ProcessSpec(
        name=name,
        argv=(sys.executable, "-c", SERVER, str(port), *args),
        ports=(PortUse(host="127.0.0.1", port=port, key=f"{name}.port"),),
        ready_url=f"http://127.0.0.1:{port}/health",
        ready_timeout_s=30,
        depends_on=after,
        stop_order=stop_order,
        stop_timeout_s=5,
    )


def is_gone(pid: int) -> bool:
    """Dead, or dead and not yet reaped by whoever inherited it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Wait for a condition; fail by itself."""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(f"never happened: {what}")


async def test_processes_become_ready_in_order_and_leave_in_order() -> None:
    """b starts when a is ready; b leaves before a."""
    out = Record()
    supervisor = Supervisor([server("a", stop_order=1), server("b", after=("a",))], os.environ, out)
    await supervisor.start()
    assert supervisor.waiting_for == {}
    assert out.index("pdxfer", "a is ready") < out.index("b", "serving") < out.index("pdxfer", "b is ready")
    await supervisor.stop()
    assert out.index("b", "leaving") < out.index("a", "leaving")
    assert supervisor.pid("a") == 0 or not psutil.pid_exists(supervisor.pid("a"))


@pytest.mark.slow
async def test_a_killed_process_is_reported_and_started_again() -> None:
    """With its last lines, under a new pid, and it becomes ready again."""
    out = Record()
    supervisor = Supervisor([server("a")], os.environ, out)
    await supervisor.start()
    old = supervisor.pid("a")
    os.kill(old, signal.SIGKILL)
    await until(lambda: out.lines.count(("pdxfer", "a is ready")) == 2, "ready again")
    assert supervisor.pid("a") not in (0, old)
    assert "a died (SIGKILL); its last lines:" in out.notes() and "(1 of 3)" in out.notes()
    await supervisor.stop()


@pytest.mark.slow
async def test_a_restarted_process_that_is_not_ready_in_time_is_waited_for(tmp_path: Path) -> None:
    """As a proxy while no prefill engine is there: it serves what it can, and nobody else is taken down for it."""
    busy, out = tmp_path / "busy", Record()
    spec = replace(server("a", "busy", str(busy)), ready_timeout_s=30.0)
    supervisor = Supervisor([spec, server("b")], os.environ, out)
    await supervisor.start()
    watching, sibling = asyncio.create_task(supervisor.watch()), supervisor.pid("b")
    busy.touch()
    supervisor._keepers[0].spec = replace(spec, ready_timeout_s=0.5)
    os.kill(supervisor.pid("a"), signal.SIGKILL)
    await until(lambda: "a is up again but not ready after 0.5 s" in out.notes() or watching.done(), "the note")
    assert not watching.done() and supervisor.pid("a") and list(supervisor.waiting_for) == ["a"]
    busy.unlink()
    await until(lambda: out.lines.count(("pdxfer", "a is ready")) == 2, "ready again")
    assert not watching.done() and supervisor.waiting_for == {} and supervisor.pid("b") == sibling
    await supervisor.stop()
    await watching


@pytest.mark.slow
async def test_a_long_life_that_never_was_ready_does_not_forgive_deaths(tmp_path: Path) -> None:
    """Else a process that dies after long loading would be started again for ever."""
    busy, out, clock = tmp_path / "busy", Record(), FakeClock()
    supervisor = Supervisor([server("a", "busy", str(busy))], os.environ, out, max_restarts=1, clock=clock)
    await supervisor.start()
    busy.touch()
    old = supervisor.pid("a")
    os.kill(old, signal.SIGKILL)
    await until(lambda: supervisor.pid("a") not in (0, old), "up again")
    clock.advance(600.0)
    os.kill(supervisor.pid("a"), signal.SIGKILL)
    with pytest.raises(LaunchError, match=r"a died \(SIGKILL\) 2 times; giving up"):
        await asyncio.wait_for(supervisor.watch(), 20)
    await supervisor.stop()


async def test_a_process_that_keeps_dying_ends_the_launch() -> None:
    """After max_restarts."""
    out = Record()
    supervisor = Supervisor([server("a")], os.environ, out, max_restarts=0)
    await supervisor.start()
    os.kill(supervisor.pid("a"), signal.SIGKILL)
    with pytest.raises(LaunchError, match=r"a died \(SIGKILL\) 1 times; giving up"):
        await asyncio.wait_for(supervisor.watch(), 20)
    await supervisor.stop()


async def test_death_at_start_fails_with_the_last_error_of_the_log() -> None:
    """One line, no restart; what ran already is taken down."""
    before = psutil.Process().children()
    out = Record()
    bad = replace(server("bad"), argv=(sys.executable, "-c", "raise ValueError('no such model')"))
    supervisor = Supervisor([server("a"), bad], os.environ, out)
    with pytest.raises(LaunchError, match=r"bad died \(exit code 1\) before it was ready: ValueError: no such model"):
        await supervisor.start()
    await supervisor.stop()
    assert set(psutil.Process().children()) <= set(before)


async def test_a_process_that_never_gets_ready_is_given_up() -> None:
    """Its last answer is the reason."""
    before = psutil.Process().children()
    spec = replace(server("a"), ready_url=f"http://127.0.0.1:{free_port()}/health", ready_timeout_s=0.5)
    supervisor = Supervisor([spec], os.environ, Record())
    with pytest.raises(LaunchError, match=r"a was not ready after 0.5 s: it does not listen yet"):
        await supervisor.start()
    await supervisor.stop()
    assert set(psutil.Process().children()) <= set(before)


async def test_a_program_that_does_not_exist_is_one_line() -> None:
    """Not a traceback."""
    supervisor = Supervisor([replace(server("a"), argv=("/nowhere/program",))], os.environ, Record())
    with pytest.raises(LaunchError, match="a: cannot run /nowhere/program: No such file"):
        await supervisor.start()
    await supervisor.stop()


async def test_a_taken_port_names_port_key_and_holder() -> None:
    """Before anything is started."""
    spec = server("a")
    with socket.create_server(("127.0.0.1", spec.ports[0].port)):
        supervisor = Supervisor([spec], os.environ, Record())
        expected = rf"a cannot listen on 127.0.0.1:{spec.ports[0].port} \(a.port\): the port is taken by .*set a.port"
        with pytest.raises(LaunchError, match=expected):
            await supervisor.start()
        await supervisor.stop()


async def test_who_does_not_leave_is_killed() -> None:
    """After its stop timeout, and said so."""
    out = Record()
    supervisor = Supervisor([replace(server("a", "deaf"), stop_timeout_s=0.2)], os.environ, out)
    await supervisor.start()
    await asyncio.wait_for(supervisor.stop(), 20)
    assert "a did not leave within 0.2 s: killed" in out.notes()


async def test_force_ends_a_drain_at_once() -> None:
    """Even when a process ignores SIGTERM and has minutes to leave."""
    supervisor = Supervisor([replace(server("a", "deaf"), stop_timeout_s=600)], os.environ, Record())
    await supervisor.start()
    stopping = asyncio.create_task(supervisor.stop())
    await until(lambda: "stopping" in repr(supervisor), "stop has begun")
    supervisor.force()
    await asyncio.wait_for(stopping, 20)


@pytest.mark.slow
async def test_a_killed_leader_is_noticed_though_its_children_hold_the_pipe() -> None:
    """As vLLM's engine core does when the API server is killed: reported, cleared away, started again."""
    code = (
        "import subprocess,sys; p=subprocess.Popen([sys.executable,'-c','import time; time.sleep(600)']);"
        "print('grandchild', p.pid, flush=True);" + f"exec({SERVER!r})"
    )
    spec, out = server("a"), Record()
    supervisor = Supervisor([replace(spec, argv=(sys.executable, "-c", code, spec.argv[3]))], os.environ, out)
    await supervisor.start()
    grandchild = int(next(text for name, text in out.lines if text.startswith("grandchild")).split()[1])
    os.kill(supervisor.pid("a"), signal.SIGKILL)
    await until(lambda: is_gone(grandchild), "grandchild killed")
    await until(lambda: out.lines.count(("pdxfer", "a is ready")) == 2, "ready again")
    await supervisor.stop()


async def test_what_a_dead_process_left_behind_is_killed() -> None:
    """A grandchild in its group does not survive it."""
    code = (
        "import subprocess,sys; p=subprocess.Popen([sys.executable,'-c','import time; time.sleep(600)']);"
        "print('grandchild', p.pid, flush=True);" + f"exec({SERVER!r})"
    )
    spec = server("a")
    out = Record()
    supervisor = Supervisor([replace(spec, argv=(sys.executable, "-c", code, spec.argv[3]))], os.environ, out)
    await supervisor.start()
    grandchild = int(next(text for name, text in out.lines if text.startswith("grandchild")).split()[1])
    assert psutil.pid_exists(grandchild)
    await supervisor.stop()
    await until(lambda: is_gone(grandchild), "grandchild killed")


async def test_the_reaper_ends_leaders_and_what_they_left_behind() -> None:
    """A leader that dies at once at SIGTERM, as a vLLM that is starting does, leaves its child to the reaper."""
    code = (
        "import subprocess,sys,time; p=subprocess.Popen([sys.executable,'-c','import time; time.sleep(600)']);"
        "print(p.pid, flush=True); time.sleep(600)"
    )
    leader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout is not None
    grandchild = int(leader.stdout.readline())
    known = reaper.learn(io.BytesIO(f"+{leader.pid}\n+1\n-1\n".encode()))
    assert list(known) == [leader.pid]
    await asyncio.to_thread(reaper.end_groups, known)
    assert leader.wait(20) == -signal.SIGTERM
    await until(lambda: is_gone(grandchild), "grandchild killed")
    leader.stdout.close()
    for pidfd in known.values():
        os.close(pidfd)
