"""`pdxfer bench router`: pairings per second on one core, and the wait for a pairing at a fixed rate.

The router runs in a process of its own, on one core; 32 prefill and 32 decode engines and a proxy are simulated in
this one, over real sockets. *lease*: Pair, Pairing, Ended. *transfer*: with Started, Grant and the five stamps too.
Heartbeats are spread over their 0.5 s; in the last run all members beat at the same time, the worst case.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from pdxfer.bench.report import Report, emit
from pdxfer.bench.router_load import Load
from pdxfer.router.server import RouterServer
from pdxfer.router.settings import RouterSettings
from pdxfer.wire.keys import ClientSecurity, load_client_security, load_server_security, new_keys

_WINDOW = 64
"""Questions on the way at once when measuring throughput."""
_READY_S = 60.0
_MAX_LAG_MS = 3.0
"""Timers are whole milliseconds: up to about 1 ms late is normal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for."""

    num_engines: int
    rate: float
    """Questions per second of the latency runs."""
    seconds: float
    """Length of each run."""
    use_keys: bool
    as_json: bool
    out: Path


def main(argv: Sequence[str]) -> int:
    """Run the bench; the exit code."""
    run(parse(argv), list(argv))
    return 0


def parse(argv: Sequence[str]) -> Options:
    """Flags → Options."""
    parser = argparse.ArgumentParser(
        prog="pdxfer bench router", description=__doc__, epilog="Example: pdxfer bench router --seconds 10 --keys",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--engines", type=int, default=64, help="simulated engines, half of each role (default 64)")
    parser.add_argument("--rate", type=float, default=500.0, help="questions per second for the latency (default 500)")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each run (default 10)")
    parser.add_argument("--keys", action="store_true", help="encrypt and authenticate with CURVE")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, default=Path("bench/out"), help="where router.json and router.png go")
    args = parser.parse_args(argv)
    if args.engines < 2 or args.rate <= 0 or args.seconds <= 0:
        parser.error("--engines must be at least 2, --rate and --seconds larger than 0")
    return Options(
        num_engines=args.engines, rate=args.rate, seconds=args.seconds, use_keys=args.keys, as_json=args.json,
        out=args.out,
    )  # fmt: skip


def run(options: Options, argv: list[str]) -> dict[str, Any]:
    """Measure, print, write; the printed object."""
    report = Report("router", argv)
    waits: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as keys_dir, _router(Path(keys_dir), options.use_keys) as (endpoint, pid, keys):
        load = Load(endpoint, keys, options.num_engines)
        load.join()
        _until_paired(load)
        for is_whole in (False, True):
            load.is_whole = is_whole
            name = "transfer" if is_whole else "lease"
            report.add(**_throughput(load, name, options, psutil.Process(pid)))
            waits[name], row = _latency(load, name, options, psutil.Process(pid))
            report.add(**row)
        load.beat_at_once()
        name = "transfer, beats at once"
        waits[name], row = _latency(load, name, options, psutil.Process(pid))
        report.add(**row)
        load.close()
    report.summary = {
        "pairings_per_s": report.results[0]["pairings_per_s"],
        "transfers_per_s": report.results[2]["pairings_per_s"],
        f"p99_ms_{options.num_engines}_engines": report.results[3]["p99_ms"],
        "p99_ms_beats_at_once": report.results[4]["p99_ms"],
    }
    worst_lag_ms = max(float(row.get("send_lag_p99_ms") or 0.0) for row in report.results)
    if worst_lag_ms > _MAX_LAG_MS:
        print(
            f"this machine was busy: questions were sent up to {worst_lag_ms:.0f} ms late (p99), so the waits show its "
            "scheduler, not the router; run it again when nothing else runs",
            file=sys.stderr,
        )
    emit(report, as_json=options.as_json, out_dir=options.out, draw=lambda axes: _draw(axes, waits, options))
    return report.to_dict()


def _throughput(load: Load, name: str, options: Options, router: psutil.Process) -> dict[str, Any]:
    """Closed loop: a window of questions, each answer sends the next."""
    load.on_answer = lambda request_id, now: load.ask()
    for _ in range(_WINDOW):
        load.ask()
    begin, cpu, answers = time.monotonic(), _cpu_s(router), load.num_answers
    while time.monotonic() - begin < options.seconds:
        load.turn(0.1)
    took, cpu, answers = time.monotonic() - begin, _cpu_s(router) - cpu, load.num_answers - answers
    load.on_answer = lambda request_id, now: None
    _settle(load)
    return {
        "run": f"{name}, {_WINDOW} at once", "num_engines": options.num_engines, "pairings_per_s": answers / took,
        "per_router_cpu_s": answers / cpu, "router_cores": cpu / took,
    }  # fmt: skip


def _latency(load: Load, name: str, options: Options, router: psutil.Process) -> tuple[list[float], dict[str, Any]]:
    """Open loop: questions at fixed times, whatever the answers do; milliseconds from sending to the answer."""
    sent: dict[str, float] = {}
    waits: list[float] = []
    lags: list[float] = []
    load.on_answer = lambda request_id, now: waits.append((now - sent.pop(request_id)) * 1e3)
    begin, cpu = time.monotonic(), _cpu_s(router)
    for number in range(int(options.rate * options.seconds)):
        due = begin + number / options.rate
        while (now := time.monotonic()) < due:
            load.turn(due - now)
        lags.append((now - due) * 1e3)
        sent[load.ask()] = now
        load.turn(0.0)
    took, cpu = time.monotonic() - begin, _cpu_s(router) - cpu
    _settle(load)
    load.on_answer = lambda request_id, now: None
    p50, p99, worst = (float(np.percentile(waits, q)) for q in (50, 99, 100))
    row = {
        "run": f"{name}, {options.rate:g}/s", "num_engines": options.num_engines, "pairings_per_s": len(waits) / took,
        "router_cores": cpu / took, "p50_ms": p50, "p99_ms": p99, "max_ms": worst,
        "send_lag_p99_ms": float(np.percentile(lags, 99)),
    }  # fmt: skip
    return waits, row


def _settle(load: Load) -> None:
    """Let what is on the way arrive."""
    quiet_since, seen = time.monotonic(), load.num_answers
    while time.monotonic() - quiet_since < 0.3:
        load.turn(0.05)
        if load.num_answers != seen:
            quiet_since, seen = time.monotonic(), load.num_answers


def _until_paired(load: Load) -> None:
    """The cluster has joined when questions are answered with pairs."""
    deadline = time.monotonic() + _READY_S
    while load.num_answers == 0:
        assert time.monotonic() < deadline, f"no pairing within {_READY_S:g} s"
        load.ask()
        load.turn(0.1)
    _settle(load)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def _router(keys_dir: Path, use_keys: bool) -> Iterator[tuple[str, int, ClientSecurity | None]]:
    """A router process on one core: its endpoint, pid, and the keys to reach it."""
    if use_keys:
        new_keys(keys_dir)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, keys_dir if use_keys else None), daemon=True)
    process.start()
    assert process.pid is not None
    if not ours.poll(_READY_S):
        raise AssertionError("the router's process did not start")
    cores = sorted(os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, cores[1:] or cores)
        yield ours.recv(), process.pid, load_client_security(keys_dir) if use_keys else None
    finally:
        os.sched_setaffinity(0, cores)
        ours.send("stop")
        process.join(10)
        process.kill()


def _serve(connection: Connection, keys_dir: Path | None) -> None:
    """The router's process."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    settings = RouterSettings(bind="tcp://127.0.0.1:*", message_rate=1e6)
    server = RouterServer(settings, load_server_security(keys_dir) if keys_dir else None)
    server.start()
    connection.send(server.endpoint)
    try:
        connection.recv()
    except EOFError:
        pass
    server.close()


def _draw(axes: Any, waits: dict[str, list[float]], options: Options) -> None:
    for name, values in waits.items():
        axes.plot(np.sort(values), np.linspace(0, 100, len(values)), label=name)
    axes.set(
        xscale="log", xlabel="wait for the pairing, ms", ylabel="% of requests",
        title=f"Router, {options.num_engines} engines, {options.rate:g} requests/s",
    )  # fmt: skip
    axes.axvline(2.0, color="grey", linestyle=":")
    axes.legend()
    axes.grid(alpha=0.3)
