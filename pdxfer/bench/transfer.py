"""`pdxfer bench transfer`: paged KV between two processes over each channel, beside what the machine can do without us.

One measurement moves a whole prompt, chunk by chunk, from random blocks to random blocks, until the receiver has said
that all of it is in place. Arms take turns within one run, so that they share the machine's moods; medians are given.
*memcpy* copies the same runs inside one process; *socket* sends them by sendmsg/recvmsg_into with nothing around;
*nixl raw* posts them with NIXL's own API, as one big descriptor or as the same descriptors, under the same settings.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdxfer.bench.report import Report, emit
from pdxfer.bench.transfer_arms import Arms
from pdxfer.bench.transfer_rig import SHAPES, Shape, open_target


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
    parser.add_argument("--channels", default="tcp,local,nixl", help="kinds to measure (default all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, default=Path("bench/out"), help="where transfer.json and .png go")
    args = parser.parse_args(argv)
    names = args.shapes.split(",")
    if args.reps < 1 or not set(names) <= set(SHAPES):
        parser.error(f"--reps must be at least 1, --shapes of {', '.join(SHAPES)}")
    return Options(
        reps=args.reps, shapes=tuple(SHAPES[n] for n in names), kinds=tuple(args.channels.split(",")),
        as_json=args.json, out=args.out,
    )  # fmt: skip


def run(options: Options, argv: list[str]) -> dict[str, Any]:
    """Measure, print, write; the printed object."""
    report = Report("transfer", argv)
    rates: dict[tuple[str, str], float] = {}
    for shape in options.shapes:
        with open_target(shape, options.kinds) as target, Arms(shape, options.kinds, target) as arms:
            times = _measure(arms, options.reps)
        for arm, seconds in times.items():
            rates[shape.name, arm] = shape.total_bytes / statistics.median(seconds) / 1e9
        for arm, seconds in times.items():
            report.add(
                shape=shape.title, arm=arm, gb_per_s=rates[shape.name, arm],
                best_gb_per_s=shape.total_bytes / min(seconds) / 1e9, median_ms=statistics.median(seconds) * 1e3,
                vs_memcpy=rates[shape.name, arm] / rates[shape.name, "memcpy"],
            )  # fmt: skip
    report.summary = _summary(rates, options.shapes)
    emit(report, as_json=options.as_json, out_dir=options.out, draw=lambda axes: _draw(axes, rates))
    return report.to_dict()


def _measure(arms: Arms, reps: int) -> dict[str, list[float]]:
    """Seconds of each arm; the first round warms up and checks every byte."""
    times: dict[str, list[float]] = {name: [] for name in arms.names}
    for name in arms.names:
        arms.check(name)
    for rep in range(reps):
        for name in arms.names:
            times[name].append(arms.time(name))
        print(f"{arms.shape.title}: round {rep + 1} of {reps}", file=sys.stderr)
    return times


def _summary(rates: dict[tuple[str, str], float], shapes: Sequence[Shape]) -> dict[str, Any]:
    def ratios(arm: str, reference: str) -> dict[str, float]:
        pairs = ((s.name, rates.get((s.name, arm)), rates.get((s.name, reference))) for s in shapes)
        return {name: a / b for name, a, b in pairs if a and b}

    one_big = {k: v for k, v in ratios("nixl", "nixl raw, one descriptor").items() if SHAPES[k].block_bytes >= 65536}
    same = {k: v for k, v in ratios("nixl", "nixl raw, same descriptors").items() if SHAPES[k].block_bytes < 65536}
    found: dict[str, Any] = {
        "nixl_vs_raw": min([*one_big.values(), *same.values()], default=None),
        "tcp_vs_socket": min(ratios("tcp", "socket").values(), default=None),
        "local_vs_memcpy": min(ratios("local", "memcpy").values(), default=None),
    }
    found |= {f"nixl_vs_one_descriptor_{name}": value for name, value in one_big.items()}
    same_all = ratios("nixl", "nixl raw, same descriptors")
    return found | {f"nixl_vs_same_descriptors_{name}": value for name, value in same_all.items()}


def _draw(axes: Any, rates: dict[tuple[str, str], float]) -> None:
    labels = [f"{arm} ({shape})" for shape, arm in rates]
    axes.barh(labels[::-1], list(rates.values())[::-1])
    axes.set_xlabel("GB/s, median")
    axes.set_title("Paged KV between two processes on one host")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
