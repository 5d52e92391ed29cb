"""`pdxfer nodes`: the engines, and what can be changed about one while it runs."""

from enum import StrEnum
from typing import Annotated

import typer

from pdxfer.cli.cluster import NODE_COLUMNS, TokenFile, Url, connect, node_row
from pdxfer.cli.options import AsJson, ConfigFiles, Sets, new_app, print_json, print_table

app = new_app()

EngineId = Annotated[str, typer.Argument(help="As `pdxfer nodes` shows it.")]


class NewRole(StrEnum):
    """What an engine does."""

    prefill = "prefill"
    decode = "decode"
    both = "both"


class Level(StrEnum):
    """Least severe level logged."""

    debug = "DEBUG"
    info = "INFO"
    warning = "WARNING"
    error = "ERROR"


class Switch(StrEnum):
    """Of codecs on the wire."""

    on = "on"
    off = "off"


@app.callback(invoke_without_command=True)
def nodes(
    context: typer.Context,
    url: Url = "",
    token_file: TokenFile = "",
    config: ConfigFiles = None,
    set_: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Engines the router knows: state, load, free blocks, channels.

    Example: pdxfer nodes --json
    """
    if context.invoked_subcommand is not None:
        return
    found = connect(url, token_file, config, set_).nodes()
    if as_json:
        print_json(found)
    else:
        print_table(NODE_COLUMNS, [node_row(node) for node in found])


@app.command()
def health(
    url: Url = "", token_file: TokenFile = "", config: ConfigFiles = None, set_: Sets = None, as_json: AsJson = False
) -> None:
    """Each worker: allocator integrity, tiers, channels, lag. Exit 1 if something is wrong.

    Example: pdxfer nodes health
    """
    engines = connect(url, token_file, config, set_).health()
    is_well = bool(engines) and all(engine.ok for engine in engines)
    if as_json:
        print_json({"ok": is_well, "engines": engines})
        raise typer.Exit(0 if is_well else 1)
    rows = []
    for engine in engines:
        rows.append([engine.engine_id, "-", engine.state, f"{engine.lag_s:.2f}", "; ".join(engine.problems) or "ok"])
        for rank in engine.ranks:
            wrong = [*rank.problems, *(f"tier {tier} is away" for tier in rank.unreachable_tiers)]
            wrong += [f"no channel to {peer}: {reason}" for peer, reason in rank.closed_channels.items()]
            rows.append([engine.engine_id, str(rank.rank), "", f"{rank.lag_s:.2f}", "; ".join(wrong) or "ok"])
    print_table(["ENGINE", "RANK", "STATE", "LAG S", "HEALTH"], rows)
    raise typer.Exit(0 if is_well else 1)


@app.command()
def role(
    engine_id: EngineId,
    new: Annotated[NewRole, typer.Argument(help="From now on.")],
    url: Url = "",
    token_file: TokenFile = "",
    config: ConfigFiles = None,
    set_: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Have an engine that was started for both roles do one of them, or both again; running requests finish.

    Example: pdxfer nodes role e0 prefill
    """
    _show(connect(url, token_file, config, set_).set_role(engine_id, new.value), as_json)


@app.command()
def credit(
    engine_id: EngineId,
    blocks: Annotated[str, typer.Argument(help="KV blocks that may be promised at once, or `none`.")],
    url: Url = "",
    token_file: TokenFile = "",
    config: ConfigFiles = None,
    set_: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Bound what the router promises of an engine's KV blocks.

    Example: pdxfer nodes credit d0 2000
    """
    if blocks != "none" and not blocks.isdecimal():
        raise typer.BadParameter(f"{blocks!r} is neither a number nor `none`")
    limit = None if blocks == "none" else int(blocks)
    _show(connect(url, token_file, config, set_).set_credit(engine_id, limit), as_json)


@app.command()
def wire(
    engine_id: EngineId,
    state: Annotated[Switch, typer.Argument(help="From its next prompt on.")],
    url: Url = "",
    token_file: TokenFile = "",
    config: ConfigFiles = None,
    set_: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Let an engine send codec frames where that is faster, or everything raw.

    Example: pdxfer nodes wire p0 off
    """
    _show(connect(url, token_file, config, set_).set_wire(engine_id, state is Switch.on), as_json)


@app.command("log-level")
def log_level(
    level: Annotated[Level, typer.Argument(help="From now on.", case_sensitive=False)],
    engine_id: Annotated[str, typer.Option("--engine", help="An engine; else the router itself.")] = "",
    proxy_id: Annotated[str, typer.Option("--proxy", help="A proxy, as `pdxfer nodes proxies` shows it.")] = "",
    url: Url = "",
    token_file: TokenFile = "",
    config: ConfigFiles = None,
    set_: Sets = None,
) -> None:
    """Log more, or less, without a restart; returns when the process has confirmed it, an engine's all.

    Example: pdxfer nodes log-level DEBUG --engine d0
    """
    if engine_id and proxy_id:
        raise typer.BadParameter(f"--engine {engine_id} and --proxy {proxy_id}: name one of them")
    connect(url, token_file, config, set_).set_log_level(level.value, engine_id, proxy_id)
    print(f"{engine_id or proxy_id or 'router'} logs {level.value}")


@app.command()
def proxies(
    url: Url = "", token_file: TokenFile = "", config: ConfigFiles = None, set_: Sets = None, as_json: AsJson = False
) -> None:
    """Proxies the router knows, and what they log.

    Example: pdxfer nodes proxies
    """
    found = connect(url, token_file, config, set_).proxies()
    if as_json:
        print_json(found)
    else:
        rows = [[proxy.proxy_id, f"{proxy.silent_s:.1f}", proxy.log_level] for proxy in found]
        print_table(["PROXY", "SILENT S", "LOG LEVEL"], rows)


@app.command()
def policy(
    changes: Annotated[list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="Changes, if any.")] = None,
    url: Url = "",
    token_file: TokenFile = "",
    config: ConfigFiles = None,
    set_: Sets = None,
    as_json: AsJson = False,
) -> None:
    """The router's live settings; with NAME=VALUE, change them until its restart.

    Example: pdxfer nodes policy max_queue=2048 min_remote_tokens=512
    """
    new: dict[str, float] = {}
    for change in changes or []:
        name, _, value = change.partition("=")
        try:
            new[name] = int(value) if value.lstrip("-").isdecimal() else float(value)
        except ValueError:
            raise typer.BadParameter(f"{change!r}: write NAME=NUMBER, as in max_queue=2048") from None
    client = connect(url, token_file, config, set_)
    found = client.set_policy(**new) if new else client.policy()
    if as_json:
        print_json(found)
    else:
        print_table(["SETTING", "VALUE"], [[name, str(value)] for name, value in found.items()])


def _show(node: object, as_json: bool) -> None:
    if as_json:
        print_json(node)
    else:
        print_table(NODE_COLUMNS, [node_row(node)])  # type: ignore[arg-type]
