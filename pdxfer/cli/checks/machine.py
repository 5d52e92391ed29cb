"""Ports, memory, disk, descriptors, clock: what the machine has left for this configuration."""

import ctypes
import shutil
import tempfile
from pathlib import Path

import psutil

from pdxfer.cli.checks.finding import Finding, blocks, ok, warning
from pdxfer.config.flags import CONNECTOR
from pdxfer.config.network import bind_address, is_loopback
from pdxfer.config.schema import Config
from pdxfer.core.descriptors import attainable
from pdxfer.launcher.errors import LaunchError
from pdxfer.launcher.ready import check_ports, holders
from pdxfer.launcher.spec import ProcessSpec

_GIB = 1 << 30
_ENGINE_GIB = 2.0
"""Of one vLLM process group beside weights and KV, on CPU."""
_MIN_DISK_GIB = 2.0
_MIN_SHM_MIB = 256
_REQUEST_DESCRIPTORS = 3
"""The client's connection and one to each engine of the pair."""
_OTHER_DESCRIPTORS = 100
"""Of a proxy without requests: its sockets, ZMQ's, files."""
_TIME_ERROR = 5
"""adjtimex: the clock is not synchronised."""


def check_machine(config: Config, specs: list[ProcessSpec], num_engines: int, weights_bytes: int) -> list[Finding]:
    """Everything that can run out, and the clock."""
    return [*_ports(specs), _memory(config, num_engines, weights_bytes), *_disk(), _descriptors(config), _clock(config)]


def _ports(specs: list[ProcessSpec]) -> list[Finding]:
    taken, ours = [], []
    for spec in specs:
        try:
            check_ports([spec])
        except LaunchError as error:
            found = holders(spec)
            if found and all(map(_is_ours, found)):
                ours.append(f"{spec.name} (pid {', '.join(str(process.pid) for process in found)})")
            else:
                taken.append(blocks("ports", str(error), "stop what holds it, or choose another port"))
    if ours:
        text = f"a pdxfer that runs here already holds those of {', '.join(ours)}"
        taken.append(warning("ports", text, "see `pdxfer doctor --live`; a second one here needs other ports"))
    numbers = ", ".join(str(use.port) for spec in specs for use in spec.ports)
    return taken or [ok("ports", f"{numbers} are free")]


def _is_ours(process: psutil.Process) -> bool:
    """Whether it is one of our commands, a vLLM server with our connector, or the child of one."""
    try:
        commands = [one.cmdline() for one in (process, *process.parents())]
    except psutil.Error:
        return False
    return any(
        any(word.startswith("pdxfer.") or CONNECTOR in word for word in command)
        or any(Path(word).name == "pdxfer" for word in command[:2])
        for command in commands
    )


def _memory(config: Config, num_engines: int, weights_bytes: int) -> Finding:
    free = psutil.virtual_memory().available / _GIB
    if config.engine.kind == "fake":
        return ok("memory", f"{free:.1f} GiB free")
    each = weights_bytes / _GIB + config.engine.kv_cache_gib + _ENGINE_GIB
    need = each * num_engines
    text = f"{free:.1f} GiB free; {num_engines} engines need about {need:.1f} (weights, KV and {_ENGINE_GIB:g} each)"
    if free < need:
        return warning("memory", text, "lower engine.kv_cache_gib, take a smaller model, or stop something")
    return ok("memory", text)


def _disk() -> list[Finding]:
    temporary = tempfile.gettempdir()
    free = shutil.disk_usage(temporary).free / _GIB
    text = f"{free:.1f} GiB free in {temporary}"
    if free < _MIN_DISK_GIB:
        findings = [warning("disk", text, f"vLLM and torch write there: have {_MIN_DISK_GIB:g} GiB, or set TMPDIR")]
    else:
        findings = [ok("disk", text)]
    try:
        shared = shutil.disk_usage("/dev/shm").free / (1 << 20)
    except OSError:
        return [*findings, warning("shared memory", "no /dev/shm", "vLLM's processes talk through it: mount one")]
    text = f"{shared:.0f} MiB free in /dev/shm"
    if shared < _MIN_SHM_MIB:
        return [*findings, warning("shared memory", text, "containers: run with --shm-size=1g or --ipc=host")]
    return [*findings, ok("shared memory", text)]


def _descriptors(config: Config) -> Finding:
    """Of the process that needs most, the proxy."""
    have = attainable()
    need = config.proxy.max_in_flight * _REQUEST_DESCRIPTORS + _OTHER_DESCRIPTORS
    text = f"{have} a process; proxy.max_in_flight {config.proxy.max_in_flight} may need {need}"
    if have < need:
        fix = "raise the hard limit (ulimit -Hn, LimitNOFILE= of a systemd service), or lower proxy.max_in_flight"
        return warning("descriptors", text, fix)
    return ok("descriptors", text)


def _clock(config: Config) -> Finding:
    """Timelines between hosts are corrected by the router; a clock that runs free still drifts."""
    room = ctypes.create_string_buffer(512)
    state = ctypes.CDLL(None).adjtimex(room)
    text = {_TIME_ERROR: "not synchronised", -1: "the kernel does not tell"}.get(state, "synchronised")
    if state == _TIME_ERROR and not is_loopback(bind_address(config)):
        return warning("clock", text, "run an NTP client on every host: timelines span hosts")
    return ok("clock", text)
