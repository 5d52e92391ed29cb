"""What a TTFT run leaves behind: table or JSON object on stdout, JSON file and figure in the output directory."""

from collections.abc import Mapping, Sequence
from typing import Any

from pdxfer.bench.report import Report, emit
from pdxfer.bench.ttft_options import Options
from pdxfer.bench.ttft_summary import Equality, Measured, rows, summary

_PLAIN = (str, int, float, bool, type(None))


class TtftReport(Report):
    """A report whose JSON also has every sample; the table shows the plain values."""

    def __init__(self, argv: Sequence[str]) -> None:
        super().__init__("ttft", list(argv))
        self._full: list[dict[str, Any]] = []

    def fill(self, options: Options, arms: Mapping[str, Measured], equality: Equality | None) -> None:
        """Take the figures of a run."""
        self._full = rows(arms, options)
        for row in self._full:
            self.add(**{key: value for key, value in row.items() if isinstance(value, _PLAIN)})
        self.summary |= summary(arms, options.lens, equality)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"results": self._full}


def publish(report: Report, options: Options, arms: Mapping[str, Measured]) -> None:
    """Print, and write the files."""
    emit(report, as_json=options.as_json, out_dir=options.out, draw=lambda axes: draw(axes, options, arms))


def draw(axes: Any, options: Options, arms: Mapping[str, Measured]) -> None:
    """Bars of the median TTFT in seconds, a group for each length, whiskers from the fastest to the slowest. Of arms
    that finished."""
    arms = {name: measured for name, measured in arms.items() if measured.answers.keys() >= set(options.lens)}
    if not arms:
        return
    width = 0.8 / len(arms)
    for place, (name, measured) in enumerate(arms.items()):
        samples = [[answer.ttft_s for answer in measured.answers[length]] for length in options.lens]
        medians = [measured.median_ttft_s(length) or 0.0 for length in options.lens]
        below = [median - min(values) for median, values in zip(medians, samples, strict=True)]
        above = [max(values) - median for median, values in zip(medians, samples, strict=True)]
        xs = [group + (place - (len(arms) - 1) / 2) * width for group in range(len(options.lens))]
        bars = axes.bar(xs, medians, width * 0.95, label=name, yerr=[below, above], capsize=2)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
    axes.set_xticks(range(len(options.lens)), [f"{length:,} tokens" for length in options.lens])
    axes.set_ylabel("time to first token, s (median)")
    where = f"over a {options.link} link" if options.link else "on one machine"
    axes.set_title(f"One engine and prefill/decode pairs {where}, one core an engine", fontsize=10)
    axes.legend(fontsize=8, ncols=min(3, len(arms)))
    axes.margins(y=0.15)
