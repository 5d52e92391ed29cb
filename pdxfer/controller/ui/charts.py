"""Times as SVG: TTFT by stage over the last minutes, and the waterfall of one request."""

import math
from dataclasses import dataclass
from datetime import datetime

from pdxfer.client.model import RequestTimeline, TtftBin
from pdxfer.controller.history import BIN_S
from pdxfer.controller.ui.markup import esc, ms, size, table
from pdxfer.metrics.catalog import STAGES

PARTS = tuple(stage for stage in STAGES if stage != "ttft")
NAMES = {
    "queue": "queue",
    "prefill": "prefill",
    "exposed_transfer": "exposed transfer",
    "decode_wait": "decode wait",
    "first_decode": "first decode",
}
_WIDTH, _HEIGHT = 960.0, 260.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 10.0, 12.0, 28.0
_WINDOWS = (24, 60, 120)
"""Bins shown: two, five or ten minutes."""


def ttft_chart(bins: list[TtftBin]) -> str:
    """Stacked mean stages of paired requests, with p50 and p99 of all; and the same as a table."""
    if not any(one.num_paired or one.num_local for one in bins):
        return '<p class="empty">No request has ended in the last ten minutes.</p>'
    highest = max(max(sum(one.stages_ms.values()), one.p99_ms or 0.0) for one in bins)
    step = _nice(highest / 4)
    top = step * max(1, math.ceil(highest / step))
    scale = _Scale(top, next((count for count in _WINDOWS if count >= len(bins)), _WINDOWS[-1]))
    marks = _grid(step, scale) + _bars(bins, scale)
    lines = _line("p50", [one.p50_ms for one in bins], scale) + _line("p99", [one.p99_ms for one in bins], scale)
    newest = next(one for one in reversed(bins) if one.num_paired or one.num_local)
    label = f"Time to first token over the last {len(bins) * BIN_S / 60:.0f} minutes; latest p50 {ms(newest.p50_ms)}"
    legend = "".join(f'<li><span class="swatch {stage}"></span>{NAMES[stage]}</li>' for stage in PARTS)
    legend += '<li><span class="swatch line p50"></span>p50</li><li><span class="swatch line p99"></span>p99</li>'
    return (
        f'<ul class="legend" aria-hidden="true">{legend}</ul>'
        f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" aria-label="{esc(label)}">{marks}{lines}</svg>'
        f'<details id="ttft-table"><summary>TTFT as a table</summary>{_as_table(bins)}</details>'
    )


def waterfall(request: RequestTimeline) -> str:
    """Where one request's time went."""
    end = max(request.end, request.first_byte or 0.0, request.arrival + 1e-4)
    spans = _spans(request)
    height = 20 + 26 * len(spans) + 24
    span_s = end - request.arrival
    rows = ""
    for index, (stage, start, stop) in enumerate(spans):
        y = 10 + 26 * index
        x = 150 + 790 * (start - request.arrival) / span_s
        width = max(1.5, 790 * (stop - start) / span_s)
        text = f"{NAMES.get(stage, stage)}: {ms((stop - start) * 1000)}"
        near_end = x + width > 850
        rows += (
            f'<text x="140" y="{y + 14}" text-anchor="end">{esc(NAMES.get(stage, stage))}</text>'
            f'<rect class="bar {stage}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="18" rx="2">'
            f"<title>{esc(text)}</title></rect>"
            f'<text class="side" x="{x - 6 if near_end else x + width + 6:.1f}" y="{y + 14}" '
            f'text-anchor="{"end" if near_end else "start"}">{ms((stop - start) * 1000)}</text>'
        )
    axis = "".join(
        f'<text class="side" x="{150 + 790 * part:.0f}" y="{height - 6}" text-anchor="{anchor}">'
        f"{ms(span_s * part * 1000)}</text>"
        for part, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end"))
    )
    label = f"Timeline of request {request.request_id}: {ms(span_s * 1000)} from arrival to end"
    return f'{_facts(request)}<svg viewBox="0 0 960 {height}" role="img" aria-label="{esc(label)}">{rows}{axis}</svg>'


def _spans(request: RequestTimeline) -> list[tuple[str, float, float]]:
    spans, at = [], request.arrival
    for stage in PARTS:
        if stage in request.stages_ms:
            stop = at + request.stages_ms[stage] / 1000
            spans.append((stage, at, stop))
            at = stop
    if not spans and request.first_byte is not None:
        spans.append(("ttft", request.arrival, request.first_byte))
    if request.first_byte is not None:
        spans.append(("stream", request.first_byte, max(request.end, request.first_byte)))
    return spans or [("unfinished", request.arrival, request.end)]


def _facts(request: RequestTimeline) -> str:
    engines = f"{request.prefill} → {request.decode}" if request.prefill else request.decode or "–"
    moved = f"{size(request.num_bytes)}, {request.num_tokens} tokens by {request.channel}" if request.channel else "–"
    facts = [
        ("Request", request.request_id),
        ("Outcome", f"{request.outcome} ({request.mode})"),
        ("Engines", engines),
        ("Moved", moved),
        ("TTFT", ms(request.stages_ms.get("ttft"))),
        ("Arrived", datetime.fromtimestamp(request.arrival).strftime("%H:%M:%S")),
    ]
    if request.reason:
        facts.append(("Reason", request.reason))
    return f'<dl class="facts">{"".join(f"<div><dt>{k}</dt><dd>{esc(v)}</dd></div>" for k, v in facts)}</dl>'


@dataclass(frozen=True, slots=True)
class _Scale:
    """Milliseconds and bins to the picture's units."""

    top: float
    num_bins: int

    def x(self, slot: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * slot / self.num_bins

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / self.top


def _grid(step: float, scale: _Scale) -> str:
    drawn = ""
    for index in range(round(scale.top / step) + 1):
        y = scale.y(index * step)
        drawn += (
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="side" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{ms(index * step)}</text>'
        )
    minutes = round(scale.num_bins * BIN_S / 60)
    for minute in range(0, minutes + 1, 2 if minutes > 5 else 1):
        x = scale.x(scale.num_bins - minute * 60 / BIN_S)
        text, anchor = ("now", "end") if minute == 0 else (f"−{minute} min", "start" if minute == minutes else "middle")
        drawn += f'<text class="side" x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="{anchor}">{text}</text>'
    return drawn


def _bars(bins: list[TtftBin], scale: _Scale) -> str:
    drawn = ""
    shown = bins[-scale.num_bins :]
    for slot, one in enumerate(shown, scale.num_bins - len(shown)):
        at = 0.0
        for stage in PARTS:
            value = one.stages_ms.get(stage, 0.0)
            if value <= 0:
                continue
            bottom, top = scale.y(at), scale.y(at + value)
            drawn += (
                f'<rect class="bar {stage}" x="{scale.x(slot):.1f}" y="{top:.1f}" '
                f'width="{scale.x(1) - scale.x(0) - 1:.1f}" height="{bottom - top:.1f}">'
                f"<title>{NAMES[stage]} {ms(value)}, {one.num_paired} requests</title></rect>"
            )
            at += value
    return drawn


def _line(name: str, values: list[float | None], scale: _Scale) -> str:
    """A polyline that breaks where nothing is known; lone points are dots."""
    pieces: list[list[tuple[float, float]]] = [[]]
    shown = values[-scale.num_bins :]
    for slot, value in enumerate(shown, scale.num_bins - len(shown)):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((scale.x(slot + 0.5), scale.y(value)))
    drawn = ""
    for piece in pieces:
        if len(piece) == 1:
            drawn += f'<circle class="dot {name}" cx="{piece[0][0]:.1f}" cy="{piece[0][1]:.1f}" r="2.5"/>'
        elif piece:
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in piece)
            drawn += f'<polyline class="line {name}" points="{points}"/>'
    return drawn


def _nice(value: float) -> float:
    """1, 2 or 5 times a power of ten, not below `value`."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next((power * factor for factor in (1, 2, 5) if power * factor >= value), 10 * power)


def _as_table(bins: list[TtftBin]) -> str:
    rows = [
        [
            datetime.fromtimestamp(one.wall).strftime("%H:%M:%S"),
            str(one.num_paired),
            str(one.num_local),
            str(one.num_failed),
            *(ms(one.stages_ms.get(stage)) for stage in PARTS),
            ms(one.p50_ms),
            ms(one.p99_ms),
        ]
        for one in reversed(bins)
        if one.num_paired or one.num_local
    ]
    columns = ["Time", "Paired", "Local", "Failed", *(NAMES[stage] for stage in PARTS), "p50", "p99"]
    return table("Time to first token by stage", columns, rows)
