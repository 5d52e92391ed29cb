"""Memcached, from apt."""

import shutil
import socket
from urllib.parse import unquote

from servers.process import ServerProcess, free_port


class MemcachedServer(ServerProcess):
    """One server. `options` as on its command line."""

    def __init__(self, *options: str) -> None:
        found = shutil.which("memcached")
        assert found, "apt-get install memcached (tests/run.sh does)"
        self.port = free_port()
        where = ["-l", "127.0.0.1", "-p", str(self.port), "-u", "nobody"]
        super().__init__("memcached", [found, *where, "-t", "2", *(options or ("-m", "1024"))], [self.port])

    def url(self) -> str:
        """As a tier writes it."""
        return f"memcached://127.0.0.1:{self.port}"

    def ask(self, line: str, end: bytes = b"\r\n") -> bytes:
        """One command; the answer up to `end`."""
        with socket.create_connection(("127.0.0.1", self.port), 5.0) as connection:
            connection.sendall(line.encode() + b"\r\n")
            answer = b""
            while not answer.endswith(end):
                answer += connection.recv(1 << 16)
            return answer

    def names(self) -> list[str]:
        """Of all items."""
        lines = self.ask("lru_crawler metadump all", b"END\r\n").decode().split("\n")
        return [unquote(line[4:].split(" ")[0]) for line in lines if line.startswith("key=")]

    def num_items(self) -> int:
        """How many it holds."""
        lines = self.ask("stats", b"END\r\n").decode().split("\r\n")
        return int(next(line.split()[2] for line in lines if line.startswith("STAT curr_items ")))
