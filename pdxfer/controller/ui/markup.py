"""How numbers and texts become HTML: every text that came from elsewhere goes through `esc`."""

import html
from collections.abc import Iterable


def esc(text: object) -> str:
    """Safe inside elements and quoted attributes."""
    return html.escape(str(text), quote=True)


def size(num_bytes: float) -> str:
    """`1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 100 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def rate(bytes_per_s: float) -> str:
    """`1.25 GB/s`: decimal, as links are sold."""
    for unit in ("B/s", "kB/s", "MB/s"):
        if bytes_per_s < 1000:
            return f"{bytes_per_s:.0f} {unit}"
        bytes_per_s /= 1000
    return f"{bytes_per_s:.2f} GB/s" if bytes_per_s < 10 else f"{bytes_per_s:.1f} GB/s"


def ms(value: float | None) -> str:
    """`48 ms`, `1.25 s`, or a dash."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def percent(part: float | None) -> str:
    """`93 %`, or a dash."""
    return "–" if part is None else f"{part * 100:.0f} %"


def table(caption: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table whose cells are HTML already; its first column names the row."""
    head = "".join(f'<th scope="col">{esc(column)}</th>' for column in columns)
    body = ""
    for row in rows:
        name, *cells = row
        body += f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{esc(caption)}"><table>'
        f'<caption class="hidden">{esc(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody>'
        "</table></div>"
    )
