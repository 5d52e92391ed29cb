"""A server process of the tests: started, found ready, frozen, killed, started again. A server that does not start is
an error with its log, never a skip."""

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

PLACE = Path(os.environ.get("PDXFER_SERVERS", Path(__file__).parents[2] / ".pdxfer" / "servers"))
"""Where install.sh puts servers that do not live in our venv."""
START_S = 30.0
STOP_S = 10.0


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scratch(name: str) -> Path:
    """A directory for one server; the system's temporary files."""
    return Path(tempfile.mkdtemp(prefix=f"pdxfer-{name}-"))


class ServerProcess:
    """Runs `command` until closed. `ports`: it is ready when all of them accept."""

    def __init__(
        self, name: str, command: Sequence[str], ports: Sequence[int], env: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.ports = name, list(ports)
        self._command, self._env = list(command), {**os.environ, **(env or {})}
        self._log = tempfile.TemporaryFile()
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start (again), on the same ports."""
        assert self._process is None, f"{self.name} runs"
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=self._env
        )
        deadline = time.monotonic() + START_S
        for port in self.ports:
            while not self._accepts(port):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    code = self._process.poll()
                    raise RuntimeError(f"{self.name} did not start (exit code {code}):\n{self.log()}")
                time.sleep(0.01)

    def kill(self) -> None:
        """kill -9, and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_S)
            self._process = None

    def freeze(self) -> None:
        """It keeps its connections and accepts new ones, but answers nothing."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on."""
        self._signal(signal.SIGCONT)

    def log(self) -> str:
        """The end of what it said."""
        self._log.seek(0)
        return self._log.read()[-3000:].decode(errors="replace")

    def close(self) -> None:
        """End it; idempotent."""
        self.kill()
        self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, f"{self.name} does not run"
        self._process.send_signal(number)

    def _accepts(self, port: int) -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), 0.5).close()
        except OSError:
            return False
        return True
