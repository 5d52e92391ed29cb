"""Options and output that commands share."""

import json
import os
import sys
from typing import Annotated

import msgspec
import typer

from pdxfer.config.load import Loaded, load

ConfigFiles = Annotated[
    list[str] | None,
    typer.Option("--config", "-c", help="Packaged config (cpu-1p1d) or YAML file; later ones win.", show_default=False),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="SECTION.KEY=VALUE", help="One setting; wins over files.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def new_app() -> typer.Typer:
    """An app as all commands use it; errors go to main.run."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def load_settings(
    files: list[str] | None, sets: list[str] | None, flags: dict[str, tuple[str, str]] | None = None
) -> Loaded:
    """The configuration of this command line and environment."""
    return load(files or [], sets or [], os.environ, flags)


def print_json(value: object) -> None:
    """Indented JSON on stdout."""
    print(json.dumps(msgspec.to_builtins(value), indent=2, ensure_ascii=False))


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    """Columns padded with spaces on stdout: readable, greppable, no frames."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    for row in [columns, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
