"""Entry point: the table of commands, each imported only when it is called, and what exit codes mean.

0 ok    1 failed    2 wrong usage or configuration    3 the other side cannot be reached
"""

import importlib
import os
import sys
from collections.abc import Sequence

import typer

from pdxfer.core.errors import ConfigError, PdxferError, UnreachableError

COMMANDS = {
    "launch": "Start a router, engines, a proxy, or all of them on this host.",
    "model": "Prepare the demo model.",
    "config": "Show, check and describe the configuration.",
    "doctor": "Find out what would keep pdxfer from running here, and what to do.",
    "status": "Is the cluster ready, and if not, why.",
    "top": "The cluster live: nodes, KV moved, credits, hit rates, time to first token.",
    "nodes": "Engines the router knows: state, load, channels, health; role, credit and log level of one.",
    "events": "What happened lately: joins, losses, drains, fallbacks.",
    "cache": "Look into the engines' stores: lookup, clear, pin, move, compress, export, verify ...",
    "codec": "Codecs of stored and sent KV: list, calibrate, tables.",
    "drain": "Give an engine no new requests.",
    "undrain": "Give a drained engine new requests again.",
    "keys": "Make the keys of a cluster.",
    "completion": "Print a script that completes commands in bash, zsh or fish.",
    "bench": "Measure codecs, router, store, transfer or time to first token.",
}
"""Name → one line of help; `pdxfer.cli.<name>.app` is the command."""
_FAILED, _USAGE, _UNREACHABLE = 1, 2, 3


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        name = args[0] if args else ""
        if name in COMMANDS:
            _call(importlib.import_module(f"pdxfer.cli.{name}").app, args[1:], f"pdxfer {name}")
        else:
            _call(_overview(), args, "pdxfer")
    except PdxferError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        return _FAILED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else _FAILED if end.code else 0
    return 0


def exit_code(error: PdxferError) -> int:
    """What an error means to the shell."""
    if isinstance(error, ConfigError):
        return _USAGE
    return _UNREACHABLE if isinstance(error, UnreachableError) else _FAILED


def _call(app: typer.Typer, args: Sequence[str], name: str) -> None:
    app(args=list(args), prog_name=name)


def _overview() -> typer.Typer:
    """An app that only knows the names of the commands: for --help, and for wrong names."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

    @app.callback()
    def root() -> None:
        """One vLLM engine prefills, another decodes; their KV cache is streamed between them.

        Example: pdxfer launch --role all --config cpu-1p1d
        """

    for name, text in COMMANDS.items():
        app.command(name, help=text)(_nothing)
    return app


def _nothing() -> None:
    """Commands are run by `run`, never from here."""


if __name__ == "__main__":
    main()
