"""`pdxfer codec`: which codecs there are, tables of a model, and how those are made. Tables' digests go to stdout."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdxfer.cli.options import AsJson, ConfigFiles, Sets, load_settings, new_app, print_json, print_table, say
from pdxfer.core.errors import ConfigError

if TYPE_CHECKING:
    from pdxfer.codec.calibrate_model import Report
    from pdxfer.codec.tables import TableFolder

app = new_app()

ModelDir = Annotated[Path, typer.Option("--model", help="Directory of the model, as engines are given it.")]


@app.callback(epilog="Example: pdxfer codec list")
def codec() -> None:
    """Codecs of stored and sent KV."""


@app.command("list", epilog="Example: pdxfer codec list")
def list_codecs(as_json: AsJson = False) -> None:
    """The codecs there are, and why one cannot be used here."""
    from pdxfer.codec.registry import codec as get_codec
    from pdxfer.codec.registry import names

    rows = []
    for name in names():
        try:
            found = get_codec(name)
            kind = "bytes" if found.opaque else "values"
            rows.append([name, "lossless" if found.lossless else "lossy", kind, "ok"])
        except ConfigError as error:
            rows.append([name, "", "", str(error)])
    if as_json:
        print_json([dict(zip(("codec", "kind", "takes", "state"), row, strict=True)) for row in rows])
    else:
        print_table(["CODEC", "KIND", "TAKES", "STATE"], rows)


@app.command(epilog="Example: pdxfer codec tables --model ~/.cache/pdxfer/models/smollm2-135m-instruct")
def tables(model: ModelDir, files: ConfigFiles = None, sets: Sets = None, as_json: AsJson = False) -> None:
    """Calibrated tables of a model."""
    from pdxfer.codec.tables import TableFile, TablesError

    rows = []
    for path in _folder(model, files, sets).files():
        name = path.name.partition("-")[0]
        try:
            found = TableFile.from_bytes(path.read_bytes(), name)
            level = found.facts.get("level", "all")
            rows.append([name, str(level), found.digest.hex(), str(path.stat().st_size), "ok"])
        except TablesError as error:
            rows.append([name, "", "", str(path.stat().st_size), str(error)])
    if as_json:
        print_json([dict(zip(("codec", "level", "digest", "bytes", "state"), row, strict=True)) for row in rows])
    else:
        print_table(["CODEC", "LEVEL", "DIGEST", "BYTES", "STATE"], rows)


@app.command(epilog="Example: pdxfer codec calibrate --model /models/llama --text notes.txt --text code.py")
def calibrate(
    model: ModelDir,
    text: Annotated[list[Path], typer.Option("--text", help="UTF-8 file like what will be served; give several.")],
    windows: Annotated[int, typer.Option(min=2, max=1000, help="Windows of 2,048 tokens at most.")] = 7,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Ranks of the engines that will use the tables.")] = 1,
    files: ConfigFiles = None,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Learn the tables of klt and cachegen from text. Minutes on a CPU for a small model; needs torch, transformers.

    They are stored under `codec.tables_dir` by the digest of the model's weights; older ones stay readable.
    """
    folder = _folder(model, files, sets)
    contents = [_read(path) for path in text]
    from pdxfer.codec.calibrate_model import LoadedModel, Windows
    from pdxfer.codec.calibrate_model import calibrate as make

    with _progress() as report:
        report("model", 0, 1)
        made = make(LoadedModel(model), contents, Windows(count=windows), report, tensor_parallel)
    paths = [folder.put(tables) for tables in made]
    if as_json:
        print_json(
            [{"codec": t.codec, "digest": t.digest.hex(), "path": str(p)} for t, p in zip(made, paths, strict=True)]
        )
    else:
        for path in paths:
            print(path)


def _folder(model: Path, files: list[str] | None, sets: list[str] | None) -> "TableFolder":
    from pdxfer.codec.tables import TableFolder

    return TableFolder(Path(load_settings(files, sets).config.codec.tables_dir), model_key(model))


def model_key(model: Path) -> str:
    """Name of a model's tables: the digest of its weights."""
    from pdxfer.connector.identity import digest_weights

    key = digest_weights(model.expanduser())
    if not key:
        raise ConfigError(f"{model} has no weight files (*.safetensors, *.bin, *.gguf, *.pt)")
    return key


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"calibration text {path} cannot be read: {error}") from error


@contextmanager
def _progress() -> Iterator["Report"]:
    """One bar on a terminal, a line per kind of step elsewhere; both on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("calibrate: {task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    said: set[str] = set()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task("model", total=None)

        def show(what: str, done: int, total: int) -> None:
            bars.update(task, description=what, completed=done, total=total)
            if not console.is_terminal and what not in said:
                said.add(what)
                say(f"calibrate: {what} ({done} of {total})")

        yield show
