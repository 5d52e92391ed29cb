"""Options and output that commands share."""

import json
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import typer
from typer.core import TyperCommand

from pdxfer.config.load import Loaded, load

ConfigFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        "-c",
        metavar="NAME|FILE",
        help="Packaged config (cpu-1p1d) or YAML file; later ones win.",
        show_default=False,
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="SECTION.KEY=VALUE", help="One setting; wins over files.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class _Command(TyperCommand):
    """A command whose usage errors name the value and what is allowed, without words of the library that checked it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


class _App(typer.Typer):
    """Commands of one file."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        return super().command(name, **{"cls": _Command, **options})


def new_app() -> typer.Typer:
    """An app as all commands use it; errors go to main.run."""
    return _App(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


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
