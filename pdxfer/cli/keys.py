"""`pdxfer keys`: CURVE keys of a cluster. Errors are ConfigError; main turns them into one line and exit code 2."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def keys() -> None:
    """Keys that encrypt and authenticate the control plane."""


@app.command()
def new(directory: Annotated[Path, typer.Argument(help="Where to write them; made if missing.")]) -> None:
    """Write a fresh set: server and client pair.

    Example: pdxfer keys new ~/.pdxfer/keys

    The router's host needs server.key and client.pub; hosts of engines and proxies need server.pub, client.key and
    client.pub. Set security.keys_dir to the directory on each. Existing keys are never overwritten.
    """
    from pdxfer.wire.keys import new_keys

    for path in new_keys(directory):
        typer.echo(path)
