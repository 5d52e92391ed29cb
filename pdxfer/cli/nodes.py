"""`pdxfer nodes`."""

from pdxfer.cli.cluster import NODE_COLUMNS, TokenFile, Url, connect, node_row
from pdxfer.cli.options import AsJson, ConfigFiles, Sets, new_app, print_json, print_table

app = new_app()


@app.command()
def nodes(
    url: Url = "", token_file: TokenFile = "", config: ConfigFiles = None, set_: Sets = None, as_json: AsJson = False
) -> None:
    """Engines the router knows: state, load, free blocks, channels.

    Example: pdxfer nodes --json
    """
    found = connect(url, token_file, config, set_).nodes()
    if as_json:
        print_json(found)
    else:
        print_table(NODE_COLUMNS, [node_row(node) for node in found])
