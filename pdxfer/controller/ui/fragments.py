"""One frame of the page: the summary as a fragment of HTML for each of its sections, by the section's id."""

from datetime import datetime

from pdxfer.client.model import Summary, TierTotal
from pdxfer.controller.ui.charts import ttft_chart
from pdxfer.controller.ui.markup import esc, ms, percent, rate, size, table
from pdxfer.controller.ui.topology import topology
from pdxfer.router.server import EventRecord

_BAD = ("suspect", "left", "mismatch", "lease_expired", "fell_back", "channel_broken", "tier_away")
_SHOWN_REASONS = 12


def fragments(summary: Summary) -> dict[str, str]:
    """Section id → its content."""
    return {
        "state": _state(summary),
        "figures": _figures(summary),
        "topology": topology(summary),
        "ttft": ttft_chart(summary.ttft),
        "tiers": _tiers(summary.tiers),
        "fallbacks": _fallbacks(summary.fallbacks),
        "events": _events(summary.events, summary.events_per_s),
    }


def _state(summary: Summary) -> str:
    if summary.ready:
        return '<span class="badge good">ready</span>'
    reasons = "".join(f"<li>{esc(reason)}</li>" for reason in summary.reasons[:8])
    return f'<span class="badge bad">not ready</span><ul class="reasons">{reasons}</ul>'


def _figures(summary: Summary) -> str:
    figures = [
        ("Engines", str(len(summary.nodes))),
        ("Pairs", str(summary.num_pairs)),
        ("KV moved", rate(summary.bytes_per_s)),
        ("In flight", str(summary.num_leases)),
        ("Queued", str(summary.num_queued)),
        ("Requests", f"{summary.requests_per_s:.1f}/s"),
        ("TTFT p50", ms(summary.ttft_p50_ms)),
        ("TTFT p99", ms(summary.ttft_p99_ms)),
    ]
    return "".join(f"<div><dt>{name}</dt><dd>{esc(value)}</dd></div>" for name, value in figures)


def _tiers(tiers: list[TierTotal]) -> str:
    if not tiers:
        return '<p class="empty">No store: set <code>store.enabled</code> to keep KV for reuse.</p>'
    rows = []
    for tier in tiers:
        part = min(1.0, tier.used_bytes / tier.capacity_bytes) if tier.capacity_bytes else None
        fill = size(tier.used_bytes)
        if part is not None:
            fill = (
                f'<svg class="meter" viewBox="0 0 100 8" role="img" aria-label="{percent(part)} full">'
                f'<rect class="track" width="100" height="8" rx="2"/>'
                f'<rect class="level" width="{part * 100:.1f}" height="8" rx="2"/></svg>'
                f"{size(tier.used_bytes)} of {size(tier.capacity_bytes)}"
            )
        away = f' <span class="badge bad">{tier.num_unreachable} away</span>' if tier.num_unreachable else ""
        rows.append(
            [
                esc(tier.kind) + away, fill, percent(tier.recent_hit_rate), percent(tier.hit_rate),
                str(tier.num_values), size(tier.pinned_bytes), str(tier.evictions), str(tier.failures),
            ]
        )  # fmt: skip
    columns = ["Tier", "Fill", "Hit rate, 1 min", "Hit rate", "Values", "Pinned", "Evictions", "Failures"]
    return table("Tiers", columns, rows)


def _fallbacks(reasons: dict[str, int]) -> str:
    if not reasons:
        return '<p class="empty">None in the last ten minutes.</p>'
    rows = [[esc(reason), str(count)] for reason, count in list(reasons.items())[:_SHOWN_REASONS]]
    return table("Fallbacks by reason", ["Reason", "Requests"], rows)


def _events(events: list[EventRecord], per_s: float) -> str:
    if not events:
        return '<p class="empty">Nothing has happened yet.</p>'
    items = ""
    for event in events:
        time = datetime.fromtimestamp(event.wall)
        detail = " ".join(f"{esc(k)}=<b>{esc(v)}</b>" for k, v in event.detail.items() if k != "times")
        times = f' <span class="times">×{esc(event.detail["times"])}</span>' if "times" in event.detail else ""
        mark = "bad" if event.kind in _BAD else "plain"
        items += (
            f'<li><time datetime="{time.isoformat(timespec="seconds")}">{time:%H:%M:%S}</time> '
            f'<span class="kind {mark}">{esc(event.kind.replace("_", " "))}</span> {detail}{times}</li>'
        )
    busy = f'<p class="note">{per_s:.0f} events a second; equal ones are folded.</p>' if per_s >= 5 else ""
    return f"{busy}<ol>{items}</ol>"
