"""For tests that start our commands as real processes: free ports, and waiting for a line of output."""

import os
import re
import select
import socket
import time
from typing import IO

import pytest

DEADLINE_S = 90.0
PORT_KEYS = ("router.port", "controller.port", "proxy.port", "topology.prefill_port", "topology.decode_port")


def free_ports(count: int) -> list[int]:
    """Ports the OS has free now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def port_sets(ports: list[int]) -> list[str]:
    """`--set` arguments that give a one-pair topology these ports."""
    return [arg for key, port in zip(PORT_KEYS, ports, strict=True) for arg in ("--set", f"{key}={port}")]


class Lines:
    """Output of a process, read from its pipe without losing lines in a buffer."""

    def __init__(self, pipe: IO[bytes] | None) -> None:
        assert pipe is not None
        self._pipe = pipe
        self._rest = b""
        self.log = ""
        """Everything read so far."""

    def until(self, pattern: str) -> str:
        """The next line that matches; the test fails if none comes in time."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            while b"\n" in self._rest:
                line, _, self._rest = self._rest.partition(b"\n")
                text = line.decode(errors="replace")
                self.log += f"{text}\n"
                if re.search(pattern, text):
                    return text
            left = deadline - time.monotonic()
            chunk = b""
            if left > 0 and select.select([self._pipe], [], [], left)[0]:
                chunk = os.read(self._pipe.fileno(), 1 << 16)
            if not chunk:
                pytest.fail(f"no line matches {pattern!r} in:\n{self.log}")
            self._rest += chunk

    def close(self) -> None:
        """Close the pipe."""
        self._pipe.close()
