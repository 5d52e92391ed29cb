"""The cluster as SVG: prefill engines left, decode engines right, engines for both between them, and what flows.

Thin lines are open channels; thick ones move KV now. Beyond some size only flows are drawn, fastest first.
"""

import re
from dataclasses import dataclass

from pdxfer.client.model import FlowRate, Summary
from pdxfer.controller.ui.markup import esc, rate, table
from pdxfer.router.snapshot import EngineView

WIDTH = 960
_BOX = 268
_COLUMNS = {"prefill": 8, "both": (WIDTH - _BOX) // 2, "decode": WIDTH - _BOX - 8}
_MAX_IDLE_LINES = 128
_MAX_FLOW_LINES = 200
_NUM_LABELS = 6
_MANY = 40
"""Flows from which on they are drawn fainter."""
_TOP = 34


@dataclass(frozen=True, slots=True)
class _Place:
    x: float
    y: float
    height: float

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


def topology(summary: Summary) -> str:
    """The picture, and the same as a table."""
    if not summary.nodes:
        return (
            '<p class="empty">No engine has joined yet. Start one with <code>pdxfer launch --role prefill</code>.</p>'
        )
    places, height = _arrange(summary.nodes)
    lines = _idle_lines(summary, places) + _flow_lines(summary.flows, places)
    boxes = "".join(_box(node, places[node.engine_id]) for node in summary.nodes)
    heads = "".join(
        f'<text class="head" x="{x + _BOX / 2}" y="18" text-anchor="middle">{name}</text>'
        for name, x in _COLUMNS.items()
        if any(_column(node) == name for node in summary.nodes)
    )
    num_live = sum(flow.num_live for flow in summary.flows)
    label = (
        f"{len(summary.nodes)} engines, {summary.num_pairs} usable pairs, {num_live} transfers in flight, "
        f"{rate(summary.bytes_per_s)}"
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{esc(label)}">{heads}{lines}{boxes}</svg>'
        f'<details id="topology-table"><summary>Engines as a table</summary>{_as_table(summary.nodes)}</details>'
    )


def _column(node: EngineView) -> str:
    return node.role if node.role in ("prefill", "decode") else "both"


def _arrange(nodes: list[EngineView]) -> tuple[dict[str, _Place], float]:
    columns = {name: [n for n in nodes if _column(n) == name] for name in _COLUMNS}
    longest = max(len(column) for column in columns.values())
    step = 46 if longest <= 12 else 30 if longest <= 24 else 24
    places: dict[str, _Place] = {}
    for name, column in columns.items():
        offset = (longest - len(column)) * step / 2 if longest <= 12 else 0
        for index, node in enumerate(sorted(column, key=lambda n: _natural(n.engine_id))):
            places[node.engine_id] = _Place(_COLUMNS[name], _TOP + offset + index * step, step - 6)
    return places, _TOP + longest * step + 4


def _natural(name: str) -> list[tuple[int, str]]:
    """p2 before p10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def _box(node: EngineView, place: _Place) -> str:
    used = 1 - node.credit_blocks / node.num_blocks if node.num_blocks else 0.0
    detail = (
        f"{node.engine_id}: {node.role or 'unknown role'}, {node.state}; {node.num_running} running, "
        f"{node.num_waiting} waiting, {node.num_transfers} transfers; {node.credit_blocks} of {node.num_blocks} "
        f"KV blocks free; {node.url}"
    )
    text = f"{node.credit_blocks}/{node.num_blocks} free"
    if _column(node) == "prefill":
        text = f"{node.outstanding_tokens} tokens due"
    if node.state != "ready":
        text = node.state
    middle, bar = place.middle + 4, max(0.0, min(1.0, used)) * (_BOX - 2)
    name = node.engine_id if len(node.engine_id) <= 22 else node.engine_id[:21] + "…"
    return (
        f'<g class="node {esc(node.state)}"><title>{esc(detail)}</title>'
        f'<rect class="box" x="{place.x}" y="{place.y}" width="{_BOX}" height="{place.height}" rx="6"/>'
        f'<rect class="fill" x="{place.x + 1}" y="{place.y + place.height - 4}" width="{bar:.1f}" height="3" rx="1"/>'
        f'<circle cx="{place.x + 13}" cy="{place.middle}" r="4.5"/>'
        f'<text x="{place.x + 25}" y="{middle}">{esc(name)}</text>'
        f'<text class="side" x="{place.x + _BOX - 10}" y="{middle}" text-anchor="end">{esc(text)}</text></g>'
    )


def _idle_lines(summary: Summary, places: dict[str, _Place]) -> str:
    pairs = [(n.engine_id, peer) for n in summary.nodes for peer in sorted(n.channels) if peer in places]
    if len(pairs) > _MAX_IDLE_LINES:
        return ""
    return "".join(f'<path class="idle" d="{_curve(places[a], places[b])}"/>' for a, b in pairs)


def _flow_lines(flows: list[FlowRate], places: dict[str, _Place]) -> str:
    moving = [f for f in flows if (f.num_live or f.bytes_per_s > 0) and f.prefill in places and f.decode in places]
    fastest = max((flow.bytes_per_s for flow in moving), default=0.0) or 1.0
    lines, labels, kind = "", _Labels(), "flow" if len(moving) <= _MANY else "flow many"
    for flow in moving[:_MAX_FLOW_LINES]:
        source, target = places[flow.prefill], places[flow.decode]
        what = f"{flow.prefill} → {flow.decode}: {rate(flow.bytes_per_s)}, {flow.num_live} in flight, {flow.channel}"
        width = 1.5 + 4.5 * flow.bytes_per_s / fastest
        lines += (
            f'<path class="{kind}" stroke-width="{width:.1f}" d="{_curve(source, target)}">'
            f"<title>{esc(what)}</title></path>"
        )
        if flow.bytes_per_s > 0:
            labels.add(source, target, rate(flow.bytes_per_s))
    return lines + labels.svg


class _Labels:
    """Figures on the fastest flows, where one finds room; the others have theirs as a tooltip."""

    def __init__(self) -> None:
        self.svg = ""
        self._taken: list[tuple[float, float]] = []

    def add(self, source: _Place, target: _Place, text: str) -> None:
        """Write `text` on that line, unless that would cover another."""
        if len(self._taken) >= _NUM_LABELS:
            return
        for share in (0.2, 0.8, 0.35, 0.65, 0.5):
            x = source.x + _BOX + (target.x - source.x - _BOX) * share
            y = source.middle + (target.middle - source.middle) * share * share * (3 - 2 * share) - 5
            if all(abs(x - other_x) > 84 or abs(y - other_y) > 16 for other_x, other_y in self._taken):
                self._taken.append((x, y))
                self.svg += f'<text class="rate" x="{x:.0f}" y="{y:.0f}" text-anchor="middle">{esc(text)}</text>'
                return


def _curve(source: _Place, target: _Place) -> str:
    """From the right edge of one box to the left edge of another; around the right side within a column."""
    x1, y1, y2 = source.x + _BOX, source.middle, target.middle
    if target.x > source.x:
        x2 = target.x
        bend = (x2 - x1) / 2
        return f"M{x1:.0f} {y1:.0f} C{x1 + bend:.0f} {y1:.0f} {x2 - bend:.0f} {y2:.0f} {x2:.0f} {y2:.0f}"
    if target.x < source.x:
        x2 = target.x + _BOX
        return f"M{source.x:.0f} {y1:.0f} C{source.x - 30:.0f} {y1:.0f} {x2 + 30:.0f} {y2:.0f} {x2:.0f} {y2:.0f}"
    return f"M{x1:.0f} {y1:.0f} C{x1 + 40:.0f} {y1:.0f} {x1 + 40:.0f} {y2:.0f} {x1:.0f} {y2:.0f}"


def _as_table(nodes: list[EngineView]) -> str:
    rows = [
        [
            esc(node.engine_id),
            esc(node.role or "–"),
            f'<span class="state {esc(node.state)}">{esc(node.state)}</span>',
            str(node.num_running),
            str(node.num_waiting),
            str(node.num_transfers),
            f"{node.credit_blocks}/{node.num_blocks}",
            str(node.outstanding_tokens),
            esc(", ".join(f"{peer} {kind}" for peer, kind in sorted(node.channels.items())[:8]) or "–"),
        ]
        for node in nodes
    ]
    columns = "Engine,Role,State,Running,Waiting,Transfers,Free blocks,Prefill tokens due,Channels".split(",")
    return table("Engines", columns, rows)
