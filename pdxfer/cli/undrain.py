"""`pdxfer undrain ENGINE`."""

from typing import Annotated

import typer

from pdxfer.cli.cluster import NODE_COLUMNS, TokenFile, Url, connect, node_row
from pdxfer.cli.options import AsJson, ConfigFiles, Sets, new_app, print_json, print_table

app = new_app()


@app.command()
def undrain(
    engine_id: Annotated[str, typer.Argument(help="As `pdxfer nodes` shows it.")],
    url: Url = "",
    token_file: TokenFile = "",
    config: ConfigFiles = None,
    set_: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Give a drained engine new requests again.

    Example: pdxfer undrain p0
    """
    node = connect(url, token_file, config, set_).undrain(engine_id)
    if as_json:
        print_json(node)
    else:
        print_table(NODE_COLUMNS, [node_row(node)])
