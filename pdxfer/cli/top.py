"""`pdxfer top`."""

import sys
from typing import Annotated

import typer

from pdxfer.cli.cluster import TokenFile, Url, connect
from pdxfer.cli.options import AsJson, ConfigFiles, Sets, new_app, print_json, say

app = new_app()


@app.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="Print one screen and leave.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.2, max=60, help="Seconds between two looks.")] = 1.0,
    url: Url = "",
    token_file: TokenFile = "",
    config: ConfigFiles = None,
    set_: Sets = None,
    as_json: AsJson = False,
) -> None:
    """The cluster live: nodes, KV moved, transfers in flight, credits, hit rates by tier, time to first token.

    Example: pdxfer top --once

    --json prints one summary and leaves. Ctrl-C leaves.
    """
    client = connect(url, token_file, config, set_)
    summary = client.summary()
    if as_json:
        print_json(summary)
        return
    from rich.console import Console

    from pdxfer.cli.screen import screen

    console = Console()
    if once or not sys.stdout.isatty():
        console.print(screen(summary, 1000))
        return
    import threading

    from rich.live import Live

    from pdxfer.core.errors import UnreachableError

    never = threading.Event()
    with Live(screen(summary, console.size.height), console=console, screen=True, auto_refresh=False) as live:
        while not never.wait(interval_s):
            try:
                live.update(screen(client.summary(), console.size.height), refresh=True)
            except UnreachableError as error:
                live.console.bell()
                say(str(error))
