"""`pdxfer events`."""

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from pdxfer.cli.cluster import TokenFile, Url, connect
from pdxfer.cli.options import AsJson, ConfigFiles, Sets, new_app, print_json, print_table

if TYPE_CHECKING:
    from pdxfer.router.server import EventRecord

app = new_app()


@app.command()
def events(
    since: Annotated[int, typer.Option(min=0, help="Only events with a larger number.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what happens from now on.")] = False,
    url: Url = "",
    token_file: TokenFile = "",
    config: ConfigFiles = None,
    set_: Sets = None,
    as_json: AsJson = False,
) -> None:
    """What happened lately, oldest first: joins, losses, drains, fallbacks, broken channels, evictions.

    Example: pdxfer events --since 120

    Example: pdxfer events --follow --json | jq 'select(.kind == "fell_back")'
    """
    client = connect(url, token_file, config, set_)
    if follow:
        _follow(client.follow_events(since), as_json)
        return
    found = client.events(since)
    if as_json:
        print_json(found)
        return
    print_table(["NUMBER", "TIME", "KIND", "DETAIL"], [_row(event) for event in found])


def _follow(stream: "object", as_json: bool) -> None:
    import msgspec

    for event in stream:  # type: ignore[attr-defined]
        print(msgspec.json.encode(event).decode() if as_json else "  ".join(_row(event)), flush=True)


def _row(event: "EventRecord") -> list[str]:
    time = datetime.fromtimestamp(event.wall).strftime("%H:%M:%S")
    detail = " ".join(f"{key}={value}" for key, value in event.detail.items())
    return [str(event.number), time, event.kind, detail]
