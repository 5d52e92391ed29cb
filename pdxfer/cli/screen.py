"""The cluster's summary as a rich renderable: what `pdxfer top` shows live, and `top --once` prints."""

import math
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdxfer.metrics.catalog import STAGES

if TYPE_CHECKING:
    from pdxfer.client.model import Summary, TtftBin
    from pdxfer.router.snapshot import EngineView

_STATE_STYLE = {"ready": "green", "draining": "yellow", "joining": "yellow", "suspect": "bold red"}
_STAGE_STYLE = {
    "queue": "bright_black", "prefill": "blue", "exposed_transfer": "dark_orange", "decode_wait": "magenta",
    "first_decode": "green",
}  # fmt: skip
_BAR = 12
_OTHER_LINES = 14
"""Lines that are not nodes."""
_BAD = ("suspect", "left", "mismatch", "lease_expired", "fell_back", "channel_broken", "tier_away")


def screen(summary: "Summary", height: int) -> RenderableType:
    """Everything on `height` lines: figures, nodes (the busiest, if there are too many), tiers, TTFT, events."""
    room = max(3, height - _OTHER_LINES - len(summary.tiers) - min(len(summary.reasons), 3))
    parts: list[RenderableType] = [_head(summary)]
    parts += [Text(f"  {reason}", style="yellow") for reason in summary.reasons[:3]]
    parts.append(_nodes(summary, room))
    if summary.tiers:
        parts.append(_tiers(summary))
    parts += [_stages(summary.ttft), _fallbacks(summary), *_events(summary, 4)]
    return Group(*parts)


def _head(summary: "Summary") -> Text:
    line = Text()
    line.append(" READY " if summary.ready else " NOT READY ", style="bold white on " + _good(summary.ready))
    line.append(f"  {len(summary.nodes)} engines  {summary.num_pairs} pairs   ")
    _figure(line, rate(summary.bytes_per_s), "moved")
    _figure(line, str(summary.num_leases), "in flight")
    _figure(line, str(summary.num_queued), "queued")
    line.append("\n TTFT  ")
    _figure(line, ms(summary.ttft_p50_ms), "p50")
    _figure(line, ms(summary.ttft_p99_ms), "p99")
    _figure(line, f"{summary.requests_per_s:.1f}/s", "requests")
    line.append("last minute", style="bright_black")
    return line


def _figure(line: Text, value: str, name: str) -> None:
    line.append(value, style="bold")
    line.append(f" {name}   ", style="bright_black")


def _nodes(summary: "Summary", room: int) -> Table:
    flows: dict[str, float] = defaultdict(float)
    for flow in summary.flows:
        flows[flow.prefill] += flow.bytes_per_s
        flows[flow.decode] += flow.bytes_per_s
    table = _table("ENGINE", "ROLE", "STATE", ">RUN", ">WAIT", ">FLYING", ">KV MOVED", "CREDIT IN BLOCKS")
    shown = sorted(summary.nodes, key=lambda node: _urgency(node, flows))[:room]
    for node in sorted(shown, key=lambda node: (node.role or "", _natural(node.engine_id))):
        free = node.credit_blocks / node.num_blocks if node.num_blocks else 0.0
        table.add_row(
            node.engine_id,
            node.role or "?",
            Text(node.state, style=_STATE_STYLE.get(node.state, "")),
            str(node.num_running),
            str(node.num_waiting),
            str(node.num_transfers),
            rate(flows[node.engine_id]),
            bar(free, "red" if free < 0.1 else "cyan") + Text(f" {node.credit_blocks}/{node.num_blocks}"),
        )
    if len(summary.nodes) > room:
        table.caption = f"{len(summary.nodes) - room} more engines: pdxfer nodes"
    return table


def _urgency(node: "EngineView", flows: dict[str, float]) -> tuple[bool, float, str]:
    """What to show first: trouble, then traffic."""
    return (node.state == "ready", -flows[node.engine_id] - node.num_running, node.engine_id)


def _tiers(summary: "Summary") -> Table:
    table = _table("TIER", "FILL", ">HITS 1 MIN", ">HITS", ">EVICTED", ">FAILED")
    for tier in summary.tiers:
        part = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else None
        fill = Text(size(tier.used_bytes)) if part is None else bar(part, "cyan") + Text(
            f" {size(tier.used_bytes)} of {size(tier.capacity_bytes)}"
        )  # fmt: skip
        name = Text(tier.kind)
        if tier.num_unreachable:
            name.append(f" {tier.num_unreachable} away", style="bold red")
        table.add_row(
            name, fill, percent(tier.recent_hit_rate), percent(tier.hit_rate), str(tier.evictions), str(tier.failures),
        )  # fmt: skip
    return table


def _stages(bins: "Sequence[TtftBin]") -> Text:
    """The newest stages as one bar."""
    newest = next((one for one in reversed(bins) if one.stages_ms), None)
    if newest is None:
        return Text("\n no paired request in the last ten minutes", style="bright_black")
    total = sum(newest.stages_ms.values()) or 1.0
    line = Text("\n ", overflow="ellipsis", no_wrap=True)
    for stage in STAGES:
        if stage in newest.stages_ms:
            cells = math.ceil(40 * newest.stages_ms[stage] / total)
            line.append("█" * cells, style=_STAGE_STYLE[stage])
    line.append(f"  {ms(total)}\n ")
    for stage in STAGES:
        if stage in newest.stages_ms:
            line.append("■ ", style=_STAGE_STYLE[stage])
            line.append(f"{stage.replace('_', ' ')} {ms(newest.stages_ms[stage])}  ", style="bright_black")
    return line


def _fallbacks(summary: "Summary") -> Text:
    shown = [f"{reason} {count}" for reason, count in list(summary.fallbacks.items())[:4]]
    return Text(f" fallbacks, 10 min: {'   '.join(shown) or 'none'}", style="bright_black", overflow="ellipsis")


def _events(summary: "Summary", count: int) -> list[Text]:
    lines = []
    for event in summary.events[:count]:
        line = Text(overflow="ellipsis", no_wrap=True)
        line.append(f" {datetime.fromtimestamp(event.wall):%H:%M:%S} ", style="bright_black")
        line.append(event.kind.replace("_", " "), style="bold red" if event.kind in _BAD else "bold")
        line.append("  " + " ".join(f"{key}={value}" for key, value in event.detail.items()))
        lines.append(line)
    return lines


def _table(*columns: str) -> Table:
    """Without frames; `>` before a name: numbers, to the right."""
    table = Table(
        box=None, pad_edge=True, header_style="bright_black", expand=False, padding=(0, 1), collapse_padding=True
    )
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    return table


def bar(part: float, style: str) -> Text:
    """A part of a whole."""
    cells = round(max(0.0, min(1.0, part)) * _BAR)
    return Text("━" * cells, style=style) + Text("━" * (_BAR - cells), style="grey30")


def _natural(name: str) -> tuple[str, int]:
    """p2 before p10."""
    head = name.rstrip("0123456789")
    return head, int(name[len(head) :] or 0)


def _good(ok: bool) -> str:
    return "green" if ok else "red"


def rate(bytes_per_s: float) -> str:
    """`1.25 GB/s`; a dash for nothing."""
    if bytes_per_s <= 0:
        return "–"
    power = min(3, int(math.log(max(bytes_per_s, 1), 1000)))
    return f"{bytes_per_s / 1000**power:.{2 if power == 3 else 0}f} {('B', 'kB', 'MB', 'GB')[power]}/s"


def size(num_bytes: float) -> str:
    """`1.5 GiB`."""
    power = min(4, int(math.log(num_bytes, 1024))) if num_bytes >= 1 else 0
    return f"{num_bytes / 1024**power:.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def ms(value: float | None) -> str:
    """`48 ms` or `1.25 s`; a dash for not known."""
    if value is None:
        return "–"
    return f"{value / 1000:.2f} s" if value >= 1000 else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def percent(part: float | None) -> str:
    """`93 %`; a dash for not known."""
    return "–" if part is None else f"{part * 100:.0f} %"
