"""CLI: exit codes, one-line errors, light --help, and `launch --role all` with fake engines as a real process."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from launch_rig import DEADLINE_S, Lines, free_ports, port_sets

from pdxfer.cli import main
from pdxfer.cli.main import COMMANDS

CLI = [sys.executable, "-m", "pdxfer.cli.main"]
ROOT = Path(__file__).parent.parent


def pdxfer(*args: str, timeout: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *args], capture_output=True, text=True, timeout=timeout, cwd=ROOT)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_in_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And its help exits 0."""
    below = {"keys": ["new"], "model": ["demo"]}.get(name, [])
    assert main.run([name, *below, "--help"]) == 0
    assert "Example:" in capsys.readouterr().out


@pytest.mark.parametrize("args", [["--help"], ["launch", "--help"], ["config", "--help"], ["status", "--help"]])
def test_help_imports_nothing_heavy(args: list[str]) -> None:
    """Neither torch nor vllm nor zmq nor a web stack; that is what keeps it under half a second."""
    code = (
        "import sys; from pdxfer.cli.main import run; code = run(sys.argv[1:]);"
        "heavy = {'torch', 'vllm', 'zmq', 'aiohttp', 'fastapi', 'numpy', 'nixl', 'nixl_cu12', 'uvicorn'};"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=30, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "[]\n")


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["config", "check", "--set", "rooter.port=1"], 2, "unknown section rooter; did you mean router?"),
        (["config", "check", "--config", "cpu-1p1"], 2, "did you mean 'cpu-1p1d'"),
        (["config", "show", "--section", "routr"], 2, "--section routr: there is none; sections are model, engine,"),
        (["launch", "--role", "all", "--model", "/nowhere/m"], 2, "model.path /nowhere/m does not exist"),
        (["launch", "--role", "router", "--", "-x"], 2, "starts no engine, but flags for vLLM are given: -x"),
        (["launch", "--role", "router", "--engine-id", "x"], 2, "--engine-id x is of one engine, but --role router is"),
        (["launch", "--role", "all", "--engine-id", "x"], 2, "name engines with topology.prefill and decode"),
        (["launch", "--role", "store", "--port", "7"], 2, "--role store listens on no port"),
        (["launch", "--role", "prefill", "oops"], 2, "flags for vLLM come after --"),
        (["launch", "--role", "decode", "--router", "A:5570", "--engine", "fake"], 2, "write it as tcp://HOST:PORT"),
        (["status", "--url", "http://127.0.0.1:1"], 3, "the controller at http://127.0.0.1:1 does not answer"),
        (["status", "--token-file", "/nowhere/t"], 2, "security.token_file /nowhere/t: No such file"),
        (["bench", "nope"], 2, "no bench 'nope'"),
    ],
)
def test_errors_are_one_line_with_the_right_exit_code(
    args: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 wrong usage or configuration, 3 unreachable; no traceback."""
    assert main.run(args) == code
    out, err = capsys.readouterr()
    assert out == "" and text in err and err.count("\n") == 1 and err.startswith("error: ")


def test_wrong_usage_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown commands and options."""
    assert main.run(["nope"]) == 2
    assert main.run(["launch", "--role", "nope"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    allowed = "'router', 'prefill', 'decode', 'both', 'store', 'proxy', 'all'"
    assert last == f"Error: Invalid value for '--role': 'nope' is not one of {allowed}."
    assert main.run(["config", "show", "--nope"]) == 2


def test_a_flag_is_the_origin_of_its_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """Errors name --model, not some key the user never wrote."""
    assert main.run(["launch", "--role", "all", "--model", "x", "--set", "model.path="]) == 2
    assert main.run(["config", "show", "--json", "--set", "router.port=5571", "--changed"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(row["key"], row["value"], row["origin"]) for row in shown] == [("router.port", 5571, "--set router.port")]


def test_dry_run_prints_the_processes(capsys: pytest.CaptureFixture[str]) -> None:
    """And starts nothing."""
    assert main.run(["launch", "--role", "all", "--config", "fake-1p1d", "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [process["name"] for process in plan] == ["router", "p0", "d0", "proxy"]
    assert plan[0]["ports"] == {"router.port": 5570, "controller.port": 5580}


# ---- the real thing with fake engines ------------------------------------------------------------------------------


class Cluster:
    """A running `launch --role all`."""

    def __init__(self, process: "subprocess.Popen[bytes]", ports: list[int]) -> None:
        self.process = process
        self.lines = Lines(process.stderr)
        self.router, self.controller, self.proxy, self.prefill, self.decode = ports

    def until(self, pattern: str) -> str:
        """The next line of its log that matches."""
        return self.lines.until(pattern)

    def get(self, port: int, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return json.load(answer)

    def complete(self, words: int) -> tuple[str, str]:
        """Text and timeline of one completion through the proxy."""
        body = {"model": "fake", "prompt": " ".join(["word"] * words), "max_tokens": 4}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.proxy}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)["choices"][0]["text"], answer.headers["x-pdxfer-timeline"]

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def launched(*args: str) -> Iterator[Cluster]:
    ports = free_ports(5)
    process = subprocess.Popen(
        [*CLI, "launch", "--role", "all", "--config", "fake-1p1d", *port_sets(ports), *args],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    cluster = Cluster(process, ports)
    try:
        yield cluster
    finally:
        process.kill()
        process.wait()
        cluster.lines.close()


@pytest.mark.slow
def test_all_serves_survives_a_killed_engine_and_drains() -> None:
    """One launch: a pair serves; kill -9 of prefill is reported and healed; SIGTERM leaves nothing behind."""
    with launched() as cluster:
        cluster.until("everything is ready")
        text, timeline = cluster.complete(300)
        assert text and "mode=pair" in timeline

        url = f"http://127.0.0.1:{cluster.controller}"
        nodes = json.loads(pdxfer("nodes", "--url", url, "--json").stdout)
        assert {(node["engine_id"], node["role"], node["state"]) for node in nodes} == {
            ("p0", "prefill", "ready"),
            ("d0", "decode", "ready"),
        }
        assert pdxfer("status", "--url", url).returncode == 0
        assert json.loads(pdxfer("drain", "p0", "--url", url, "--json").stdout)["state"] == "draining"
        assert pdxfer("status", "--url", url).returncode == 1
        assert json.loads(pdxfer("undrain", "p0", "--url", url, "--json").stdout)["state"] == "ready"
        assert pdxfer("drain", "nobody", "--url", url).returncode == 1
        assert "joined" in pdxfer("events", "--url", url).stdout

        victim = next(p for p in cluster.children() if "prefill" in p.cmdline())
        victim.kill()
        cluster.until(r"p0 died \(SIGKILL\)")
        cluster.until("p0 is ready")
        assert cluster.complete(300)[0] == text

        children = cluster.children()
        cluster.process.send_signal(signal.SIGTERM)
        cluster.until("all processes have left")
        assert cluster.process.wait(DEADLINE_S) == 0
        assert not [child for child in children if child.is_running()]


@pytest.mark.slow
def test_children_die_with_a_killed_launcher() -> None:
    """kill -9 of the supervisor leaves no orphans."""
    with launched() as cluster:
        cluster.until("everything is ready")
        children = cluster.children()
        assert len(children) == 5, "four processes and the reaper"
        cluster.process.kill()
        _, alive = psutil.wait_procs(children, timeout=DEADLINE_S)
        assert not alive


def test_a_taken_port_is_one_line_and_exit_code_1() -> None:
    """Naming port and key."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = pdxfer("launch", "--role", "all", "--config", "fake-1p1d", "--set", f"controller.port={port}")
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert f"router cannot listen on 127.0.0.1:{port} (controller.port): the port is taken by" in errors[0]


@pytest.mark.parametrize(("role", "key"), [("router", "router.port"), ("proxy", "proxy.port")])
def test_a_taken_port_of_one_process_is_the_same(role: str, key: str) -> None:
    """Whoever notices it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = pdxfer("launch", "--role", role, "--set", f"{key}={port}", "--set", "controller.port=0")
    assert done.returncode == 1
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert f":{port}: " in line and "ddress already in use" in line and key in line


@pytest.mark.slow
def test_an_engine_that_dies_at_start_is_one_line_and_exit_code_1() -> None:
    """With its own last error, and everything else taken down."""
    with launched("--", "--no-such-flag") as cluster:
        line = cluster.until("^error: ")
        assert re.search(
            r"(p0|d0) died \(exit code 2\) before it was ready: unrecognized arguments: --no-such-flag", line
        )
        assert cluster.process.wait(DEADLINE_S) == 1


@pytest.mark.parametrize("role", ["router", *(pytest.param(r, marks=pytest.mark.slow) for r in ("proxy", "prefill"))])
def test_each_role_runs_alone_and_leaves_at_sigterm(role: str) -> None:
    """Exit code 0 after SIGTERM, also without the others."""
    port, controller = free_ports(2)
    args = ["launch", "--role", role, "--engine", "fake", "--model", "fake", "--port", str(port)]
    args += ["--set", f"controller.port={controller}", "--router", f"tcp://127.0.0.1:{port}"]
    process = subprocess.Popen([*CLI, *args], stderr=subprocess.PIPE, cwd=ROOT)
    lines = Lines(process.stderr)
    try:
        lines.until({"router": "Started server", "proxy": "proxy on", "prefill": "everything is ready"}[role])
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
        lines.close()


def test_environment_overrides_files(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """PDXFER_SECTION__KEY, as containers set it."""
    monkeypatch.setitem(os.environ, "PDXFER_PROXY__PORT", "8123")
    assert main.run(["config", "show", "--json", "--section", "proxy.port"]) == 0
    row = json.loads(capsys.readouterr().out)[0]
    assert (row["value"], row["origin"]) == (8123, "PDXFER_PROXY__PORT")
