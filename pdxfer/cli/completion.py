"""`pdxfer completion`: a script that completes commands and options in a shell; completing itself starts no Python."""

import importlib
from enum import StrEnum
from typing import Annotated

import typer

from pdxfer.cli.options import new_app

app = new_app()

_BASH = """_pdxfer() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} path= word
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    [[ $word == -* ]] || case "$path $word" in {known}) path="$path $word";; esac
  done
  local words
  case "$path" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  [[ ${{#COMPREPLY[@]}} -gt 0 || $current == -* ]] || COMPREPLY=($(compgen -f -- "$current"))
}}
complete -o filenames -F _pdxfer pdxfer
"""


class Shell(StrEnum):
    """Shells that can be completed in."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


@app.command()
def completion(shell: Annotated[Shell, typer.Argument(help="Whose script to print.")]) -> None:
    """Print a completion script.

    Example: pdxfer completion bash > ~/.local/share/bash-completion/completions/pdxfer

    Example: pdxfer completion fish > ~/.config/fish/completions/pdxfer.fish
    """
    tree = _tree()
    if shell is Shell.fish:
        print(_fish(tree))
        return
    if shell is Shell.zsh:
        print("autoload -U +X bashcompinit && bashcompinit")
    known = "|".join(f'"{path}"' for path in tree if path)
    cases = "\n".join(f'    "{path}") words="{" ".join(words)}";;' for path, words in tree.items())
    print(_BASH.format(known=known, cases=cases))


def _tree() -> dict[str, list[str]]:
    """` cache lookup` → what may follow: commands below it, and its options."""
    from pdxfer.cli.main import COMMANDS

    found = {"": [*COMMANDS, "--help"]}
    for name in COMMANDS:
        command = typer.main.get_command(importlib.import_module(f"pdxfer.cli.{name}").app)
        _add(found, f" {name}", command)
    return found


def _add(found: dict[str, list[str]], path: str, command: object) -> None:
    below: dict[str, object] = getattr(command, "commands", {})
    options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]  # type: ignore[attr-defined]
    found[path] = [*below, *options, "--help"]
    for name, one in below.items():
        _add(found, f"{path} {name}", one)


def _fish(tree: dict[str, list[str]]) -> str:
    lines = ["complete -c pdxfer -f"]
    for path, words in tree.items():
        names = path.split()
        test = " ; and ".join(f"__fish_seen_subcommand_from {name}" for name in names) or "__fish_use_subcommand"
        for word in words:
            what = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c pdxfer -n '{test}' {what}")
    return "\n".join(lines)
