"""The quickstart's output: both answers, the tables, whether the KV moved, and when a pair pays. Pure text."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pdxfer.launcher.quickstart_measure import Compared, Measured, Stream

_STAGES = ("queue", "prefill", "exposed_transfer", "decode_wait", "first_decode")
"""Of the pair's time to first token, in order."""
_SHOWN_CHARS = 300


def print_report(console: Console, measured: Measured) -> bool:
    """Print everything; False if KV did not move for a prompt that should have been paired."""
    for compared in measured.compared:
        _print_answers(console, compared)
    console.print(_ttft_table(measured.compared))
    console.print(
        "One engine: the decode engine asked directly, without transfer; plain vLLM on its share of the cores, while "
        "the prefill engine idles.",
        style="dim",
    )
    console.print(_stream_table(measured.stream_alone, measured.stream_pair))
    console.print(pays(measured))
    return _print_moved(console, measured.compared)


_DIFFERS = " (differs: in bfloat16 two computations of one prompt may part where two words are nearly as likely)"


def _print_answers(console: Console, compared: Compared) -> None:
    question = compared.question.prompt
    console.rule(f"{compared.question.name} ({compared.pair.num_prompt_tokens} tokens)")
    shown = question if len(question) <= 100 else f"{question[:60]} ... {question[-45:]}"
    console.print(f"[bold]asked[/bold]       {escape(' '.join(shown.split()))}")
    console.print(f"[bold]one engine[/bold]  {escape(_short(compared.alone.text))}")
    same = " (the same)" if compared.alone.text == compared.pair.text else _DIFFERS
    console.print(f"[bold]pair[/bold]        {escape(_short(compared.pair.text))}[dim]{same}[/dim]")


def _table(title: str) -> Table:
    """Narrow enough for 80 columns."""
    return Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")


def _ttft_table(rows: list[Compared]) -> Table:
    table = _table("time to first token, ms: one engine, the pair, and the pair's stages")
    table.add_column("request", no_wrap=True)
    for column in ("tokens", "one\nengine", "pair", *(stage.replace("_", "\n") for stage in _STAGES)):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        stages = [f"{row.pair.stages_ms[s]:.0f}" if s in row.pair.stages_ms else "-" for s in _STAGES]
        times = [f"{row.alone.ttft_ms:.0f}", f"{row.pair.ttft_ms:.0f}"]
        table.add_row(row.question.name, str(row.pair.num_prompt_tokens), *times, *stages)
    return table


def _stream_table(alone: Stream, pair: Stream) -> Table:
    table = _table("a running stream while 3,000 tokens are prefilled, ms")
    table.add_column("", min_width=24)
    for column in ("one engine", "pair"):
        table.add_column(column, justify="right")
    table.add_row("longest stall", f"{alone.longest_ms:.0f}", f"{pair.longest_ms:.0f}")
    table.add_row("median between tokens", f"{alone.median_ms:.1f}", f"{pair.median_ms:.1f}")
    table.add_row("the prompt's first token", f"{alone.prompt_ttft_ms:.0f}", f"{pair.prompt_ttft_ms:.0f}")
    return table


def pays(measured: Measured) -> str:
    """One sentence on when a pair pays, with this run's figures."""
    alone, pair, last = measured.stream_alone, measured.stream_pair, measured.compared[-1]
    cost = last.pair.ttft_ms / last.alone.ttft_ms
    if pair.longest_ms < alone.longest_ms:
        verdict = (
            f"A pair pays when answers are streaming while long prompts arrive: here the longest stall fell from "
            f"{alone.longest_ms:.0f} to {pair.longest_ms:.0f} ms"
        )
    else:
        verdict = (
            f"In this run the pair did not shorten the longest stall ({alone.longest_ms:.0f} ms against "
            f"{pair.longest_ms:.0f} ms); it pays only where answers stream while long prompts arrive"
        )
    return f"{verdict}, and a lone long prompt took {cost:.2f} times one engine's time to its first token."


def _print_moved(console: Console, rows: list[Compared]) -> bool:
    """Per request what moved, loudly if it should have and did not."""
    has_moved = True
    for row in rows:
        name, what = row.question.name, row.moved
        reason = what.reason or f"served as {row.pair.mode or 'unknown'}, transfer {what.outcome or 'unknown'}"
        if what.num_bytes and what.outcome == "delivered":
            console.print(
                f"[green]KV moved[/green]  {name}: {what.num_bytes / 1e6:.1f} MB in {what.num_units} units over "
                f"{what.channel}, {what.num_tokens} of {row.pair.num_prompt_tokens} tokens"
            )
        elif not row.question.is_paired:
            console.print(f"no transfer  {name}: {escape(reason)}; the decode engine took it alone")
        else:
            has_moved = False
            console.print(f"[bold red]KV DID NOT MOVE[/bold red]  {name}: {escape(reason)}")
    return has_moved


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]} ..."
