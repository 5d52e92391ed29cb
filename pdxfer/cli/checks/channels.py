"""Which kinds of channel work here, which one two engines would choose, and what they need of the system.

Kinds are tried for real in child processes with a deadline: a broken library must not take doctor down.
"""

import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from pdxfer.cli.checks.finding import Finding, blocks, ok, warning
from pdxfer.cli.checks.software import installed
from pdxfer.config.schema import Config
from pdxfer.core.install import pip_install
from pdxfer.transport.device import rdma_devices
from pdxfer.transport.kinds import preferred

_TRY_S = 60.0
_NIXL = """
import os; os.environ.setdefault("UCX_MODULES", "^efa")
import importlib, logging
for name in ("nixl_cu12", "nixl_cu13", "nixl._api"):
    try: nixl = importlib.import_module(name); break
    except ImportError as error: reason = error
else: raise SystemExit(f"import: {reason}")
logging.getLogger("nixl").setLevel(logging.WARNING)
agent = nixl.nixl_agent("doctor", nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
print("pdxfer-ok", name)
"""
_UCX = """
from pdxfer.transport.base import EndpointOptions
from pdxfer.transport.ucx_link import Ucx, UcxLink
UcxLink(Ucx(EndpointOptions()), 1, 0).close()
print("pdxfer-ok")
"""
_CMA_TARGET = """
import ctypes, os, sys
try:
    from pdxfer.transport.cma import allow_readers; allow_readers()
except ImportError: pass
data = ctypes.create_string_buffer(b"pdxfer-cma")
print(os.getpid(), ctypes.addressof(data), flush=True)
sys.stdin.read()
"""
_CMA_BYTES = b"pdxfer-cma"


def check_channels(config: Config, environ: Mapping[str, str]) -> list[Finding]:
    """All configured kinds, the choice between them, and their surroundings."""
    configured = tuple(config.transport.channels)
    wanted = preferred(configured, config.codec.wire != "off", bool(rdma_devices()))
    reasons = {kind: _try(kind) for kind in wanted}
    findings = [_kind(kind, reasons[kind]) for kind in wanted]
    why = "" if wanted == configured else "; codec.wire is on and there is no RDMA: tcp before nixl"
    return [*findings, _choice(reasons, why), _ucx(environ), _memlock(), _hugepages()]


def _try(kind: str) -> str:
    """Empty if this kind works here, else why not."""
    if kind == "local":
        return try_cma()
    if kind in ("nixl", "ucx"):
        return _try_library(_NIXL if kind == "nixl" else _UCX)
    if kind == "tcp":
        return ""
    return "" if ":" in kind else _try_plugin(kind)


def _kind(kind: str, reason: str) -> Finding:
    name = f"channel {kind}"
    if not reason:
        detail = {
            "local": "reads of another process's memory (CMA) are allowed",
            "tcp": "plain sockets, always there",
            "ucx": "ucxx makes a worker",
        }
        found = installed("nixl-cu12", "nixl-cu13", "nixl") if kind == "nixl" else None
        text = f"{found[0]} {found[1]}; its UCX plugin makes an agent" if found else "available"
        return ok(name, detail.get(kind, text))
    fixes = {
        "local": "let engines run as one user in one container, with CAP_SYS_PTRACE or "
        "kernel.yama.ptrace_scope 0 or 1; or leave `local` out of transport.channels",
        "nixl": f"{pip_install('nixl')}; or leave `nixl` out of transport.channels",
        "ucx": f"{pip_install('ucx')}; or leave `ucx` out of transport.channels",
    }
    return warning(name, reason, fixes.get(kind, f"leave {kind!r} out of transport.channels"))


def _choice(reasons: Mapping[str, str], why: str = "") -> Finding:
    """The first that works, as the pool decides. `why`: what the order is due to."""
    working = [kind for kind, reason in reasons.items() if not reason]
    if not working:
        return blocks(
            "channel choice",
            f"none of {', '.join(reasons)} works here",
            "add tcp to transport.channels: it always works",
        )
    remote = next((kind for kind in working if kind != "local"), "")
    skipped = [f"{kind} is not available" for kind in reasons if kind not in working]
    first = "; ".join(skipped) or "first of transport.channels"
    text = f"on one host {working[0]}, between hosts {remote or 'none'} ({first}{why})"
    if not remote:
        return warning("channel choice", text, "add tcp to transport.channels for engines on other hosts")
    return ok("channel choice", text)


def _try_library(program: str) -> str:
    """Import the library and make what a channel needs of it, in a process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=_TRY_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"trying it hung for {_TRY_S:g} s"
    if "pdxfer-ok" in done.stdout:
        return ""
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1][:200] if lines else f"ended with exit code {done.returncode}"


def _try_plugin(kind: str) -> str:
    from pdxfer.core.errors import ConfigError
    from pdxfer.transport.kinds import endpoint_factories

    try:
        endpoint_factories([kind])
    except ConfigError as error:
        return str(error)
    return ""


def try_cma() -> str:
    """Read a sibling process's memory. Empty if that is allowed."""
    import numpy as np

    from pdxfer.core.errors import ChannelError
    from pdxfer.transport.cma import Reader
    from pdxfer.transport.vectors import iovecs

    sibling = subprocess.Popen(
        [sys.executable, "-c", _CMA_TARGET], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert sibling.stdin is not None and sibling.stdout is not None
    with sibling, sibling.stdin:
        words = sibling.stdout.readline().split()
        if len(words) != 2:
            return "the process to read from did not start"
        target = np.zeros(len(_CMA_BYTES), dtype=np.uint8)
        whole = np.array([[0, len(_CMA_BYTES)]], dtype=np.int64)
        try:
            Reader(int(words[0])).copy(iovecs(target.ctypes.data, whole), iovecs(int(words[1]), whole))
        except ChannelError as error:
            return str(error)
    return "" if target.tobytes() == _CMA_BYTES else "read other bytes than the process holds"


def _ucx(environ: Mapping[str, str]) -> Finding:
    found = {name: value for name, value in sorted(environ.items()) if name.startswith("UCX_")}
    text = (
        " ".join(f"{name}={value}" for name, value in found.items()) or "no UCX_* variables; our channel sets its own"
    )
    devices = rdma_devices()
    text += (
        f"; RDMA devices: {', '.join(devices)} (RDMA was not tried so far)"
        if devices
        else "; no RDMA devices: nixl uses TCP"
    )
    if "UCX_TLS" in found:
        return warning("ucx", text, "UCX_TLS overrides our choice; with cma or shared memory in it push is not fenced")
    return ok("ucx", text)


def _memlock() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if soft == resource.RLIM_INFINITY else f"at most {soft >> 20} MiB may be pinned"
    if soft != resource.RLIM_INFINITY and rdma_devices():
        return warning("pinned memory", text, "RDMA pins the KV cache: run with `ulimit -l unlimited`")
    return ok("pinned memory", text)


def _hugepages() -> Finding:
    try:
        text = Path("/proc/meminfo").read_text()
        total = int(next(line for line in text.splitlines() if line.startswith("HugePages_Total")).split()[1])
        transparent = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except (OSError, StopIteration, ValueError):
        return ok("hugepages", "the kernel does not tell")
    mode = transparent[transparent.find("[") + 1 : transparent.find("]")]
    return ok("hugepages", f"{total} reserved (none needed), transparent: {mode} (local asks for them)")
