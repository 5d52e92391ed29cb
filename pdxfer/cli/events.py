"""`pdxfer events`."""

from datetime import datetime
from typing import Annotated

import typer

from pdxfer.cli.cluster import TokenFile, Url, connect
from pdxfer.cli.options import AsJson, ConfigFiles, Sets, new_app, print_json, print_table

app = new_app()


@app.command()
def events(
    since: Annotated[int, typer.Option(min=0, help="Only events with a larger number.")] = 0,
    url: Url = "",
    token_file: TokenFile = "",
    config: ConfigFiles = None,
    set_: Sets = None,
    as_json: AsJson = False,
) -> None:
    """What happened lately, oldest first: joins, losses, drains, refusals.

    Example: pdxfer events --since 120
    """
    found = connect(url, token_file, config, set_).events(since)
    if as_json:
        print_json(found)
        return
    rows = []
    for event in found:
        time = datetime.fromtimestamp(event.wall).strftime("%H:%M:%S")
        detail = " ".join(f"{key}={value}" for key, value in event.detail.items())
        rows.append([str(event.number), time, event.kind, detail])
    print_table(["NUMBER", "TIME", "KIND", "DETAIL"], rows)
