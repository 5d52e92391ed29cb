"""`pdxfer bench NAME ...`: hands the rest of the line to pdxfer.bench.NAME.main."""

import importlib
from typing import Annotated

import typer

from pdxfer.cli.options import new_app
from pdxfer.core.errors import ConfigError

BENCHES = ("chaos", "codec", "reuse", "router", "store", "transfer", "ttft", "wire")
app = new_app()


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def bench(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            help="chaos, codec, reuse, router, store, transfer, ttft or wire; `bench NAME --help` has its options."
        ),
    ],
) -> None:
    """Measure codecs, reuse, router, store, transfer, time to first token, codecs on the wire; break a cluster (chaos).

    Example: pdxfer bench ttft --lens 1000,3500 --reps 5
    """
    if name in ("--help", "-h"):
        print(context.get_help())
        return
    if name not in BENCHES:
        raise ConfigError(f"no bench {name!r}; there are {', '.join(BENCHES)}")
    module = importlib.import_module(f"pdxfer.bench.{name}")
    raise typer.Exit(module.main(list(context.args)))
