"""What the commands that ask the controller share: its address and token, and how engines are printed."""

from typing import TYPE_CHECKING, Annotated

import typer

from pdxfer.cli.options import load_settings

if TYPE_CHECKING:
    from pdxfer.client.api import ControllerClient
    from pdxfer.router.snapshot import EngineView

Url = Annotated[
    str,
    typer.Option(
        "--url", metavar="URL", help="Controller, http://HOST:PORT; else from the configuration.", show_default=False
    ),
]
TokenFile = Annotated[
    str, typer.Option("--token-file", metavar="FILE", help="File with the cluster's token.", show_default=False)
]
NODE_COLUMNS = ["ENGINE", "ROLE", "STATE", "RUNNING", "WAITING", "TRANSFERS", "FREE BLOCKS", "CHANNELS", "URL"]


def connect(url: str, token_file: str, files: list[str] | None, sets: list[str] | None) -> "ControllerClient":
    """A client of the controller that the options and the configuration name."""
    from pdxfer.client.api import ControllerClient
    from pdxfer.config.network import controller_url
    from pdxfer.config.token import read_token

    flags = {"--token-file": ("security.token_file", token_file)} if token_file else {}
    config = load_settings(files, sets, flags).config
    return ControllerClient(url or controller_url(config), read_token(config.security.token_file))


def node_row(node: "EngineView") -> list[str]:
    """Cells of one engine, under NODE_COLUMNS."""
    channels = ", ".join(f"{peer}:{kind}" for peer, kind in sorted(node.channels.items()))
    return [
        node.engine_id,
        node.role or "?",
        node.state,
        str(node.num_running),
        str(node.num_waiting),
        str(node.num_transfers),
        f"{node.credit_blocks}/{node.num_blocks}",
        channels or "-",
        node.url,
    ]
