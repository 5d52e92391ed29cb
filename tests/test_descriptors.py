"""A process that is out of file descriptors says so in a line, and serves on; launch takes as many as it may have."""

import asyncio
import errno
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import IO

import pytest

from pdxfer.core.descriptors import AcceptErrors, attainable, raise_limit
from pdxfer.testing.fake_clock import FakeClock


def accept_error(number: int) -> dict[str, object]:
    """What asyncio tells a loop's exception handler."""
    return {"message": "socket.accept() out of system resource", "exception": OSError(number, os.strerror(number))}


async def test_refused_accepts_are_one_line_each_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(AcceptErrors(clock))
    for _ in range(3):
        for _ in range(500):
            loop.call_exception_handler(accept_error(errno.EMFILE))
        clock.advance(10.0)
    assert [record.exc_info for record in caplog.records] == [None] * 3
    assert "ulimit -n" in caplog.messages[0] and "out of file descriptors" in caplog.messages[0]
    loop.call_exception_handler(accept_error(errno.ENFILE))
    assert "ulimit" not in caplog.messages[-1] and "Too many open files in system" in caplog.messages[-1]


async def test_other_errors_of_the_loop_are_told_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(AcceptErrors(FakeClock()))
    for _ in range(2):
        loop.call_exception_handler({"message": "a task failed", "exception": OSError(errno.EMFILE, "open")})
    assert [(one.name, one.levelno, bool(one.exc_info)) for one in caplog.records] == [
        ("asyncio", logging.ERROR, True)
    ] * 2


@pytest.mark.parametrize(
    ("soft", "hard", "becomes"),
    [(1024, 4096, 4096), (4096, 4096, 4096), (1024, 10**9, 1 << 20), (1024, -1, 1 << 20), (1 << 21, 1 << 22, 1 << 21)],
)
def test_the_soft_limit_becomes_the_hard_one(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, becomes: int
) -> None:
    """Within reason; and it is never lowered."""
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: limits.append(new))
    assert attainable() == becomes
    raise_limit()
    assert limits[-1] == (becomes, hard)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["proxy", "router"])
def test_a_process_without_descriptors_says_so_and_serves_on(role: str) -> None:
    """60 silent connections and 64 descriptors, of which 16 had to be asked for."""
    with socket.create_server(("127.0.0.1", 0)) as http, socket.create_server(("127.0.0.1", 0)) as zmq:
        address, zmq_port = http.getsockname(), zmq.getsockname()[1]
    command = [sys.executable, "-m", "pdxfer.cli.main", "launch", "--role", role, "--config", "cpu-1p1d"]
    section = "proxy" if role == "proxy" else "controller"
    command += ["--set", f"{section}.port={address[1]}", "--set", f"router.port={zmq_port}"]
    limited = ["bash", "-c", 'ulimit -Sn 48; ulimit -Hn 64; exec "$@"', "bash", *command]
    with ExitStack() as stack, subprocess.Popen(limited, stderr=subprocess.PIPE, text=True) as process:
        stack.callback(process.kill)
        assert process.stderr is not None
        said = _read_until(process.stderr, f"{section} on http://")
        with ExitStack() as silent:
            for _ in range(60):
                silent.enter_context(socket.create_connection(address))
            said = _read_until(process.stderr, "descriptors")
            assert "out of file descriptors, it may have 64" in said
        with socket.create_connection(address, timeout=30) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert "Traceback" not in said + rest and rest.count("descriptors") <= 2
        assert process.wait(30) == 0


def _read_until(stream: IO[str], word: str) -> str:
    """All lines up to one with `word`."""
    lines = ""
    for line in stream:
        lines += line
        if word in line:
            return lines
    raise AssertionError(f"ended without {word!r}: {lines}")
