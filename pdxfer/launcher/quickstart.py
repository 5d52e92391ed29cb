"""`python -m pdxfer.launcher.quickstart`: model, router, one pair and proxy up; three requests both ways; down again.

launch/quickstart.sh calls it after the installation. Progress goes to stderr, answers and tables to stdout; the logs
of the processes go to files. Exit 0 if the KV really moved, 1 if not or if something failed, 2 for wrong settings.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.status import Status

from pdxfer.config import network
from pdxfer.config.load import load
from pdxfer.config.schema import Config
from pdxfer.core.errors import ConfigError, PdxferError
from pdxfer.launcher.demo_model import Stage, cache_dir, prepare_demo_model
from pdxfer.launcher.engine import Inputs, served_name
from pdxfer.launcher.machine import this_machine
from pdxfer.launcher.placement import place_engines
from pdxfer.launcher.plan import plan_all
from pdxfer.launcher.prepare import prepare
from pdxfer.launcher.quickstart_measure import measure
from pdxfer.launcher.quickstart_report import print_report
from pdxfer.launcher.run import run_directory
from pdxfer.launcher.supervise import Supervisor

_OURS = ("engine.prefix_caching=false", "router.missed_heartbeats=10")
"""Both arms are asked the same text: a cache would falsify the second. And a laptop may be busy: engines that get no
core for 1.5 s are not dead."""
_TICK_S = 1.0
_SHOWN_LINES = 15
_WORDS = 300
"""Of the prompt that --serve suggests."""


class Progress:
    """What is going on, as a spinner on a terminal and as lines elsewhere; and the supervisor's Output."""

    def __init__(self, console: Console, logs: Path) -> None:
        self._console, self.logs = console, logs
        self._status: Status | None = None
        self._last = ""
        logs.mkdir(parents=True, exist_ok=True)
        for old in logs.glob("*.log"):
            old.unlink()

    def say(self, text: str) -> None:
        """The step that runs now."""
        if text == self._last:
            return
        self._last = text
        if not self._console.is_terminal:
            self._console.print(text, style="dim", highlight=False)
        elif self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def done(self) -> None:
        """No step runs."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def line(self, name: str, text: str) -> None:
        with (self.logs / f"{name}.log").open("a", encoding="utf-8") as log:
            print(text, file=log)

    def note(self, text: str) -> None:
        self.line("pdxfer", text)
        self._console.print(text, highlight=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it and return the exit code."""
    options = _parser().parse_args(argv)
    console = Console(stderr=True)
    progress = Progress(console, cache_dir(os.environ) / "quickstart-logs")
    try:
        config = _configuration(options, progress)
        with run_directory(config) as file:
            return asyncio.run(_run(config, file, progress, options.serve))
    except PdxferError as error:
        progress.done()
        console.print(f"error: {error}", style="red", highlight=False, markup=False)
        console.print(f"logs: {progress.logs}", highlight=False, markup=False)
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        progress.done()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pdxfer.launcher.quickstart", description=__doc__)
    parser.add_argument("--serve", action="store_true", help="do not measure: leave the pair up")
    parser.add_argument("--gpus", type=int, default=-1, help="NVIDIA GPUs to use; default: those found")
    parser.add_argument("--config", default="", help="packaged config or file instead of the one that fits the GPUs")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="one setting")
    return parser


def config_name(num_gpus: int) -> str:
    """The packaged config that fits."""
    if num_gpus == 0:
        return "cpu-1p1d"
    return "gpu-1p1d" if num_gpus > 1 else "gpu-1p1d-one-gpu"


def _configuration(options: argparse.Namespace, progress: Progress) -> Config:
    num_gpus = options.gpus if options.gpus >= 0 else len(this_machine().gpus)
    name = options.config or config_name(num_gpus)
    config = load([name], [*_OURS, *options.set], os.environ).config
    progress.say(f"configuration {name}")

    def report(stage: Stage, done: int, total: int) -> None:
        progress.say(f"demo model: {stage.value}" + (f", {100 * done // total} %" if total else ""))

    return prepare(config, lambda: prepare_demo_model(report=report))


async def _run(config: Config, file: Path, progress: Progress, serve: bool) -> int:
    """Start, measure or serve, and take everything down again."""
    machine = this_machine()
    specs = plan_all(Inputs(config=config, config_file=str(file), machine=machine))
    decode = next(engine for engine in place_engines(config, machine) if engine.role == "decode")
    proxy_url = network.local_url(network.proxy_bind(config), config.proxy.port)
    engine_url = network.local_url(network.bind_address(config), decode.port)
    supervisor = Supervisor(specs, os.environ, progress, max_restarts=config.engine.max_restarts if serve else 0)
    work = asyncio.create_task(_work(supervisor, config, engine_url, proxy_url, progress, serve))

    def on_signal() -> None:
        if work.done():
            supervisor.force()
        work.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    try:
        return await work
    except asyncio.CancelledError:
        return 0 if serve else 1
    finally:
        progress.say("shutting down")
        await supervisor.stop()


async def _work(
    supervisor: Supervisor, config: Config, engine_url: str, proxy_url: str, progress: Progress, serve: bool
) -> int:
    waiting = asyncio.create_task(_tell_waiting(supervisor, progress))
    try:
        await supervisor.start()
    finally:
        waiting.cancel()
    console = Console()
    if serve:
        progress.done()
        console.print(
            f"OpenAI API at {proxy_url}/v1, status at {network.controller_url(config)}. Try it (prompts below "
            f"router.min_remote_tokens, {config.router.min_remote_tokens}, are decode's alone: this one is longer):",
            markup=False,
        )
        print(curl_line(proxy_url, served_name(config), config.router.min_remote_tokens))
        console.print("Ctrl-C ends it.")
        await supervisor.watch()
        return 0
    died = asyncio.create_task(supervisor.watch())
    measuring = asyncio.create_task(measure(engine_url, proxy_url, served_name(config), progress.say))
    try:
        await asyncio.wait([died, measuring], return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            died.result()
        measured = await measuring
    finally:
        died.cancel()
        measuring.cancel()
    progress.done()
    return 0 if print_report(console, measured) else 1


async def _tell_waiting(supervisor: Supervisor, progress: Progress) -> None:
    """Which processes are not up yet; engines take most of the time."""
    while True:
        progress.say("starting: waiting for " + ", ".join(supervisor.waiting_for))
        await asyncio.sleep(_TICK_S)


def curl_line(proxy_url: str, model: str, min_tokens: int) -> str:
    """A request to paste into a shell, with a prompt of at least so many tokens: the pair's, not decode's alone."""
    prompt = f"$(printf 'hello %.0s' $(seq {max(_WORDS, min_tokens)}))"
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "stream": True}
    data = json.dumps(body).replace('"', '\\"')
    return f"curl -N {proxy_url}/v1/chat/completions -H 'Content-Type: application/json' -d \"{data}\""


if __name__ == "__main__":
    sys.exit(main())
