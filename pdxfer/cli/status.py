"""`pdxfer status`."""

import typer

from pdxfer.cli.cluster import NODE_COLUMNS, TokenFile, Url, connect, node_row
from pdxfer.cli.options import AsJson, ConfigFiles, Sets, new_app, print_json, print_table

app = new_app()


@app.command()
def status(
    url: Url = "", token_file: TokenFile = "", config: ConfigFiles = None, set_: Sets = None, as_json: AsJson = False
) -> None:
    """Is the cluster ready, and if not, why. Exit 0 ready, 1 not ready, 3 no controller.

    Example: pdxfer status --url http://127.0.0.1:5580
    """
    client = connect(url, token_file, config, set_)
    ready, nodes = client.ready(), client.nodes()
    if as_json:
        print_json({"ready": ready.ready, "reasons": ready.reasons, "nodes": nodes})
    else:
        print("ready" if ready.ready else "not ready")
        for reason in ready.reasons:
            print(f"  {reason}")
        if nodes:
            print_table(NODE_COLUMNS, [node_row(node) for node in nodes])
    raise typer.Exit(0 if ready.ready else 1)
