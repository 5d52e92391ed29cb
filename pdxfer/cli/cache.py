"""`pdxfer cache VERB`: what the engines' stores hold, and what is done with it.

One command a verb, made from one table: their options are the fields of the REST request.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdxfer.cli.cluster import TokenFile, Url, connect
from pdxfer.cli.options import AsJson, ConfigFiles, Sets, new_app, print_json, print_table
from pdxfer.core.errors import ConfigError

if TYPE_CHECKING:
    from pdxfer.client.api import ControllerClient
    from pdxfer.client.operations import Operation

app = new_app()
_FINISH_S = 86400.0

VERBS = {
    "lookup": ("What of a prompt is stored where.", 'pdxfer cache lookup --text "You are a helpful assistant."'),
    "clear": ("Remove values: a prompt's, tenant's, tier's, old ones, or all.", "pdxfer cache clear --tier disk"),
    "pin": ("Never evict a prompt's values.", "pdxfer cache pin --text-file system.txt --ttl 86400"),
    "unpin": ("Let a prompt's values be evicted again.", "pdxfer cache unpin --text-file system.txt"),
    "move": ("Move values to another tier or node.", "pdxfer cache move --tier dram --to-tier disk --tenant a"),
    "copy": (
        "Copy values to another tier or node.",
        "pdxfer cache copy --text-file system.txt --from-engine p0 --engine p1 --to-tier dram",
    ),
    "compress": ("Store values under a codec.", "pdxfer cache compress --tier disk --codec zstd --everything"),
    "decompress": ("Store values raw again.", "pdxfer cache decompress --tier disk --everything"),
    "prefetch": ("Bring a prompt's values to memory.", "pdxfer cache prefetch --text-file system.txt"),
    "export": ("Write a prompt's values to a file on the node.", "pdxfer cache export --text hi --path /kv/a.pdxkv"),
    "import": ("Read such a file into the store.", "pdxfer cache import --path /kv/a.pdxkv"),
    "verify": ("Check all checksums.", "pdxfer cache verify --everything --repair"),
}


@app.callback()
def cache() -> None:
    """Look into the engines' stores, and change what they hold. Each reply is the verified effect, worker by worker.

    Example: pdxfer cache lookup --text "You are a helpful assistant."
    """


def _add(verb: str, text: str, example: str) -> None:
    def command(
        text_: Annotated[str, typer.Option("--text", help="The prompt, tokenised by an engine.")] = "",
        text_file: Annotated[str, typer.Option("--text-file", help="The same, from a file; - is stdin.")] = "",
        chat_file: Annotated[str, typer.Option("--chat-file", help="JSON list of chat messages.")] = "",
        tokens_file: Annotated[str, typer.Option("--tokens-file", help="JSON list of token ids.")] = "",
        model: Annotated[str, typer.Option(help="A model: its tokenizer; or a LoRA adapter: its KV.")] = "",
        salt: Annotated[str, typer.Option(help="cache_salt of the prompt.")] = "",
        engine: Annotated[
            list[str] | None, typer.Option(help="Only on this engine, or to it with --from-engine; may be repeated.")
        ] = None,
        tier: Annotated[str, typer.Option(help="Only this tier.")] = "",
        to_tier: Annotated[str, typer.Option(help="move, copy, prefetch: where to.")] = "",
        from_engine: Annotated[str, typer.Option(help="move, copy: out of this engine's tiers.")] = "",
        tenant: Annotated[str, typer.Option(help="Only this tenant's.")] = "",
        everything: Annotated[bool, typer.Option("--everything", help="All values.")] = False,
        older_than: Annotated[float, typer.Option(min=0, help="Only values older than so many seconds.")] = 0.0,
        codec: Annotated[str, typer.Option(help="compress: which.")] = "",
        ttl: Annotated[float, typer.Option(min=0, help="pin: for so many seconds; 0: until unpinned.")] = 0.0,
        path: Annotated[str, typer.Option(help="Absolute path of a .pdxkv file on the node.")] = "",
        repair: Annotated[bool, typer.Option("--repair", help="verify: repair or remove what is broken.")] = False,
        key: Annotated[str, typer.Option(help="Idempotency key: repeating the command does nothing twice.")] = "",
        no_wait: Annotated[bool, typer.Option("--no-wait", help="Only start it; see check-finish.")] = False,
        url: Url = "",
        token_file: TokenFile = "",
        config: ConfigFiles = None,
        set_: Sets = None,
        as_json: AsJson = False,
    ) -> None:
        given = {
            **_prompt(text_, text_file, chat_file, tokens_file), "model": model, "salt": salt, "engines": engine or [],
            "tier": tier, "to_tier": to_tier, "from_engine": from_engine, "tenant": tenant, "everything": everything,
            "older_than_s": older_than, "codec": codec, "ttl_s": ttl, "path": path, "repair": repair,
        }  # fmt: skip
        client = connect(url, token_file, config, set_)
        arguments = {name: value for name, value in given.items() if value not in ("", [], False, 0.0, None)}
        started = client.cache(verb, wait_s=0.0 if no_wait else 1.0, key=key, **arguments)  # type: ignore[arg-type]
        if not started.is_over and not no_wait:
            started = _finish(client, started.id)
        _show(started, as_json)

    command.__doc__ = f"{text}\n\n    Example: {example}\n    "
    app.command(verb)(command)


for _verb, (_text, _example) in VERBS.items():
    _add(_verb, _text, _example)


@app.command("check-finish")
def check_finish(
    op_id: Annotated[str, typer.Argument(help="As the verb printed it.")],
    timeout_s: Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait at most.")] = _FINISH_S,
    url: Url = "",
    token_file: TokenFile = "",
    config: ConfigFiles = None,
    set_: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Wait until an operation is over, and say what it did. Exit 1 if it failed anywhere.

    Example: pdxfer cache check-finish op-5f2c91d04be3a876 --timeout 60
    """
    _show(_finish(connect(url, token_file, config, set_), op_id, timeout_s), as_json)


@app.command()
def cancel(
    op_id: Annotated[str, typer.Argument(help="As the verb printed it.")],
    url: Url = "",
    token_file: TokenFile = "",
    config: ConfigFiles = None,
    set_: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Stop an operation; what it did by then is in the answer.

    Example: pdxfer cache cancel op-5f2c91d04be3a876
    """
    _show(connect(url, token_file, config, set_).cancel(op_id), as_json)


@app.command()
def operations(
    url: Url = "", token_file: TokenFile = "", config: ConfigFiles = None, set_: Sets = None, as_json: AsJson = False
) -> None:
    """Operations that run, and the last that ended, newest first.

    Example: pdxfer cache operations --json
    """
    found = connect(url, token_file, config, set_).operations()
    if as_json:
        print_json(found)
    else:
        rows = [[op.id, op.verb, op.state, f"{op.done}/{op.total or '?'}", str(len(op.parts))] for op in found]
        print_table(["OPERATION", "VERB", "STATE", "DONE", "WORKERS"], rows)


def _prompt(text: str, text_file: str, chat_file: str, tokens_file: str) -> dict[str, Any]:
    try:
        if text_file:
            text = sys.stdin.read() if text_file == "-" else Path(text_file).read_text(encoding="utf-8")
        return {
            "text": text or None,
            "messages": json.loads(Path(chat_file).read_text(encoding="utf-8")) if chat_file else None,
            "tokens": json.loads(Path(tokens_file).read_text(encoding="utf-8")) if tokens_file else None,
        }
    except (OSError, ValueError) as error:
        raise ConfigError(f"the prompt cannot be read: {error}") from error


def _finish(client: "ControllerClient", op_id: str, timeout_s: float = _FINISH_S) -> "Operation":
    """With a progress bar on a terminal's stderr."""
    if not sys.stderr.isatty():
        return client.finish(op_id, timeout_s)
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(op_id, total=None)

        def on_progress(now: "Operation") -> None:
            progress.update(task, completed=now.done, total=now.total or None, description=f"{now.verb} {now.state}")

        return client.finish(op_id, timeout_s, on_progress)


def _show(operation: "Operation", as_json: bool) -> None:
    """Exit 1 unless it is done everywhere (or runs on, as asked)."""
    if as_json:
        print_json(operation)
    else:
        print(f"{operation.verb} {operation.id}: {operation.state}")
        for part in operation.parts:
            _print_result(f"{part.engine_id}/{part.rank}", part.result)
    for where, why in operation.errors.items():
        print(f"{where}: {why}", file=sys.stderr)
    raise typer.Exit(0 if operation.state in ("done", "running") else 1)


def _print_result(where: str, result: dict[str, Any] | None) -> None:
    """A result as one table a list, one line for everything else."""
    if result is None:
        return
    plain = {name: value for name, value in result.items() if not isinstance(value, list | dict)}
    if plain:
        print(f"{where}  {_pairs(plain)}")
    for value in result.values():
        for row in value if isinstance(value, list) else [value] if isinstance(value, dict) else []:
            print(f"{where}  {_pairs({k: v for k, v in row.items() if not isinstance(v, list)})}")


def _pairs(values: dict[str, Any]) -> str:
    return "  ".join(f"{name}={value}" for name, value in values.items() if value not in ("", {}))
