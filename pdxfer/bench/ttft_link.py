"""A network link on one machine: two namespaces joined by a veth pair whose ends send at a fixed rate (tc tbf).

    ┌ pdxN-p: client, router, proxy, prefill ┐ veth, rate both ways ┌ pdxN-d: decode ┐
    └────────────── 10.73.0.1 ───────────────┘──────────────────────└── 10.73.0.2 ───┘

Needs root and iproute2. The calling thread works inside the prefill side while the link is up; engines are started with
`ip netns exec`, which also shows them the right /sys/class/net (UCX looks for its devices there). The kernel's byte
counter says what really crossed.
"""

import ctypes
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdxfer.bench.ttft_arms import Site
from pdxfer.bench.ttft_errors import BenchError

_CLONE_NEWNET = 0x40000000
_NETNS_DIR = Path("/run/netns")
_BURST = "256kb"
"""Four full GSO packets: less starves the link, much more lets a short transfer run faster than the rate."""
_LATENCY = "20ms"
_SOCKET_S = 60.0
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPlan:
    """Names and addresses of a link, and the commands that make and remove it. Data only."""

    rate: str
    """As tc writes it: 1gbit."""
    tag: str
    """Part of all names, so that two runs do not meet."""
    prefill_host: str = "10.73.0.1"
    decode_host: str = "10.73.0.2"

    @property
    def prefill_side(self) -> str:
        """Name of a namespace and of its end of the link."""
        return f"pdx{self.tag}-p"

    @property
    def decode_side(self) -> str:
        return f"pdx{self.tag}-d"

    @property
    def qdisc(self) -> str:
        """Token bucket of each end."""
        return f"rate {self.rate} burst {_BURST} latency {_LATENCY}"

    @property
    def site(self) -> Site:
        """The link as the arms see it."""
        return Site(
            prefill_host=self.prefill_host,
            decode_host=self.decode_host,
            prefill_prefix=("ip", "netns", "exec", self.prefill_side),
            decode_prefix=("ip", "netns", "exec", self.decode_side),
            is_link=True,
        )

    def up(self) -> list[list[str]]:
        """Commands that make it, in order."""
        near, far = self.prefill_side, self.decode_side
        lines = [f"ip netns add {near}", f"ip netns add {far}"]
        lines += [f"ip link add {near} netns {near} type veth peer name {far} netns {far}"]
        for name, host in ((near, self.prefill_host), (far, self.decode_host)):
            lines += [
                f"ip -n {name} addr add {host}/30 dev {name}",
                f"ip -n {name} link set lo up",
                f"ip -n {name} link set {name} up",
                f"tc -n {name} qdisc add dev {name} root tbf {self.qdisc}",
            ]
        return [line.split() for line in lines]

    def down(self) -> list[list[str]]:
        """Commands that remove it; the link goes with its namespaces."""
        return [["ip", "netns", "del", name] for name in (self.prefill_side, self.decode_side)]

    def counter(self) -> list[str]:
        """Command that prints the counters of the prefill end."""
        return ["ip", "-n", self.prefill_side, "-s", "-j", "link", "show", self.prefill_side]


@contextmanager
def link(rate: str) -> Iterator[LinkPlan]:
    """Make a link, work inside its prefill side, and remove it at the end, also after a failure."""
    require_namespaces()
    plan = LinkPlan(rate=rate, tag=str(os.getpid()))
    try:
        for command in plan.up():
            run_command(command)
        with inside(plan.prefill_side):
            yield plan
    finally:
        for command in plan.down():
            subprocess.run(command, capture_output=True, check=False)


def require_namespaces() -> None:
    """Raise BenchError if this process cannot make network namespaces."""
    if os.geteuid() != 0:
        raise BenchError("--link makes network namespaces, which needs root: run it with sudo, or leave --link out")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise BenchError(f"--link needs the command {tool}: install iproute2 (apt install iproute2)")


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Put the calling thread into a network namespace; threads and processes it starts are born there."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        target = os.open(_NETNS_DIR / namespace, os.O_RDONLY)
        try:
            _setns(target)
        finally:
            os.close(target)
        try:
            yield
        finally:
            _setns(home)
    finally:
        os.close(home)


def sent_bytes(plan: LinkPlan) -> int:
    """Bytes that prefill's side has put on the link since it was made."""
    return parse_counter(run_command(plan.counter()))


def parse_counter(text: str) -> int:
    """Sent bytes in the JSON of `ip -s -j link show`."""
    return int(json.loads(text)[0]["stats64"]["tx"]["bytes"])


def kv_bytes_per_token(shape: Mapping[str, Any]) -> int:
    """K and V of one token over all layers in a 2-byte dtype, from a model's config.json."""
    heads = shape.get("num_key_value_heads") or shape["num_attention_heads"]
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    return int(2 * 2 * shape["num_hidden_layers"] * heads * head_dim)


def require_crossed(name: str, before: int, after: int, kv_bytes: int) -> int:
    """Bytes that crossed the link. Raises BenchError if they are fewer than the KV that was sent."""
    crossed = after - before
    if crossed < kv_bytes:
        raise BenchError(
            f"{name}: only {crossed:,} bytes crossed the link, but the prompts' KV is {kv_bytes:,} bytes: it went "
            "around the link, or was computed again by decode; these figures would not be of a network"
        )
    return crossed


def socket_seconds(plan: LinkPlan | None, num_bytes: int) -> float:
    """Time to send that many bytes by one plain TCP socket to the decode side and have their arrival confirmed;
    over loopback where there is no link."""
    host = plan.decode_host if plan else "127.0.0.1"
    if plan:
        with inside(plan.decode_side):
            listener = socket.create_server((host, 0))
    else:
        listener = socket.create_server((host, 0))
    with listener:
        listener.settimeout(_SOCKET_S)
        sink = threading.Thread(target=_sink, args=(listener, num_bytes), daemon=True)
        sink.start()
        payload = memoryview(bytes(num_bytes))
        with socket.create_connection(listener.getsockname(), timeout=_SOCKET_S) as connection:
            start = time.perf_counter()
            connection.sendall(payload)
            if connection.recv(1) != b"k":
                raise BenchError(f"the plain socket transfer of {num_bytes:,} bytes to {host} broke off")
            elapsed = time.perf_counter() - start
        sink.join(_SOCKET_S)
    return elapsed


def _sink(listener: socket.socket, num_bytes: int) -> None:
    """Take that many bytes from one connection and confirm."""
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(_SOCKET_S)
        buffer, taken = bytearray(1 << 20), 0
        while taken < num_bytes:
            count = connection.recv_into(buffer)
            if not count:
                return
            taken += count
        connection.sendall(b"k")


def _setns(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise BenchError(f"cannot enter a network namespace: {os.strerror(ctypes.get_errno())}")


def run_command(command: Sequence[str]) -> str:
    """Output of a command. Raises BenchError with what it said if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(f"`{' '.join(command)}` failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
