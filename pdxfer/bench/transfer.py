"""`pdxfer bench transfer`: paged KV between two processes over each channel, beside what the machine can do without us.

One measurement moves whole prompts, chunk by chunk, from random blocks to random blocks, until the receiver knows that
all bytes are in place (its clock is ours): one prompt over an idle channel, where waking both sides counts, and several
that follow each other, which is the channel's rate (`nixl_vs_raw` and its like are of these). Arms take turns within
one run, every second round backwards, so that they share the machine's moods; ratios are taken round by round, their
median is given and, beside it, their quartiles.
*memcpy* copies the same runs inside one process; *socket* sends them by sendmsg/recvmsg_into with nothing around;
*nixl raw* posts them with NIXL's own API, as one big descriptor or as the same descriptors, under the same settings.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pdxfer.bench.report import Report, emit
from pdxfer.bench.transfer_arms import Arms
from pdxfer.bench.transfer_rig import SHAPES, Shape, open_target

Times = dict[tuple[str, str], list[float]]
"""(shape, arm) → seconds of each round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for."""

    reps: int
    shapes: tuple[Shape, ...]
    kinds: tuple[str, ...]
    as_json: bool
    out: Path


def main(argv: Sequence[str]) -> int:
    """Run the bench; the exit code."""
    run(parse(argv), list(argv))
    return 0


def parse(argv: Sequence[str]) -> Options:
    """Flags → Options."""
    parser = argparse.ArgumentParser(
        prog="pdxfer bench transfer", description=__doc__, epilog="Example: pdxfer bench transfer --reps 9",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--reps", type=int, default=7, help="measurements an arm (default 7)")
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)} (default all)")
    parser.add_argument("--prompts", default="1,4", help="prompts of one measurement, in a row (default 1,4)")
    parser.add_argument("--channels", default="tcp,local,nixl", help="kinds to measure (default all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, default=Path("bench/out"), help="where transfer.json and .png go")
    args = parser.parse_args(argv)
    names, counts = args.shapes.split(","), args.prompts.split(",")
    if args.reps < 1 or not set(names) <= set(SHAPES) or not all(n.isdigit() and int(n) for n in counts):
        parser.error(f"--reps and --prompts must be at least 1, --shapes of {', '.join(SHAPES)}")
    return Options(
        reps=args.reps, shapes=tuple(replace(SHAPES[s], num_prompts=int(n)) for s in names for n in counts),
        kinds=tuple(args.channels.split(",")), as_json=args.json, out=args.out,
    )  # fmt: skip


def run(options: Options, argv: list[str]) -> dict[str, Any]:
    """Measure, print, write; the printed object."""
    report = Report("transfer", argv)
    times: Times = {}
    for shape in options.shapes:
        with open_target(shape, options.kinds) as target, Arms(shape, options.kinds, target) as arms:
            found = _measure(arms, options.reps)
        times |= {(shape.name, arm): seconds for arm, seconds in found.items()}
        for arm, seconds in found.items():
            report.add(
                shape=shape.title, arm=arm, gb_per_s=shape.moved_bytes / statistics.median(seconds) / 1e9,
                best_gb_per_s=shape.moved_bytes / min(seconds) / 1e9, median_ms=statistics.median(seconds) * 1e3,
                vs_memcpy=statistics.median(ratios(seconds, found["memcpy"])),
            )  # fmt: skip
    report.summary = summary(times, options.shapes)
    emit(report, as_json=options.as_json, out_dir=options.out, draw=lambda axes: _draw(axes, report.results))
    return report.to_dict()


def _measure(arms: Arms, reps: int) -> dict[str, list[float]]:
    """Seconds of each arm; the first round warms up and checks every byte."""
    times: dict[str, list[float]] = {name: [] for name in arms.names}
    for name in arms.names:
        arms.check(name)
    for rep in range(reps):
        for name in arms.names[:: -1 if rep % 2 else 1]:
            times[name].append(arms.time(name))
        print(f"{arms.shape.title}: round {rep + 1} of {reps}", file=sys.stderr)
    return times


def ratios(seconds: Sequence[float], reference: Sequence[float]) -> list[float]:
    """How fast an arm was in each round, as a multiple of the reference in that round."""
    return [theirs / ours for ours, theirs in zip(seconds, reference, strict=True)]


def summary(times: Times, shapes: Sequence[Shape]) -> dict[str, Any]:
    """Median ratios to each channel's reference, every shape's with quartiles; the smallest of those with the most
    prompts in a row."""
    found: dict[str, Any] = {}
    most = max(shape.num_prompts for shape in shapes)

    def compare(name: str, arm: str, reference: str) -> dict[Shape, float]:
        medians = {}
        for shape in shapes:
            ours, theirs = times.get((shape.name, arm)), times.get((shape.name, reference))
            if ours and theirs:
                rounds = ratios(ours, theirs)
                low, medians[shape], high = np.percentile(rounds, [25, 50, 75]).tolist()
                found[f"{name}_{shape.name}"] = medians[shape]
                found[f"{name}_{shape.name}_quartiles"] = f"{low:.2f}..{high:.2f}"
        return {shape: ratio for shape, ratio in medians.items() if shape.num_prompts == most}

    one_big = compare("nixl_vs_one_descriptor", "nixl", "nixl raw, one descriptor")
    same = compare("nixl_vs_same_descriptors", "nixl", "nixl raw, same descriptors")
    nixl = [ratio for shape, ratio in one_big.items() if shape.block_bytes >= 65536]
    nixl += [ratio for shape, ratio in same.items() if shape.block_bytes < 65536]
    smallest = {
        "nixl_vs_raw": min(nixl, default=None),
        "tcp_vs_socket": min(compare("tcp_vs_socket", "tcp", "socket").values(), default=None),
        "local_vs_memcpy": min(compare("local_vs_memcpy", "local", "memcpy").values(), default=None),
    }
    return smallest | found


def _draw(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    labels = [f"{row['arm']} ({row['shape']})" for row in rows]
    axes.barh(labels[::-1], [row["gb_per_s"] for row in reversed(rows)])
    axes.set_xlabel("GB/s, median")
    axes.set_title("Paged KV between two processes on one host")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
