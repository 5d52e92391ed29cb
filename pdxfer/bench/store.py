"""`pdxfer bench store`: each tier's put and get beside what the same machine does without us, by size of chunk.

One pass writes (reads) `--mib` MiB of frames, `--depth` at once; arms take turns within one run, so that they share the
machine's moods; medians are given. *dram* is the whole path of a save and a load (frame, checksum, copy), beside memcpy
+ xxh3 of the same bytes on one thread, and memcpy alone. *disk* is beside pread/pwrite with O_DIRECT of the same depth
into a file of the same size, from plain memory (the reference) and from huge pages as ours. Servers are beside a raw
client on one socket that speaks their protocol (store_raw.py), and beside `--depth` of those in a thread each. Latency:
one value at a time.
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdxfer.bench.report import Report, emit
from pdxfer.bench.store_arms import Arm, Load
from pdxfer.bench.store_refs import open_arms

KIB = 1024
SIZES = {"96KiB": 96 * KIB, "512KiB": 512 * KIB, "2MiB": 2048 * KIB, "8MiB": 8192 * KIB}
LATENCIES = 32
"""Single values timed for a latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for."""

    tiers: dict[str, str]
    """Name → URL."""
    sizes: tuple[str, ...]
    reps: int
    depth: int
    mib: int
    as_json: bool
    out: Path


def main(argv: Sequence[str]) -> int:
    """Run the bench; the exit code: 1 if a tier could not be measured."""
    return 1 if "failed" in asyncio.run(run(parse(argv), list(argv)))["summary"] else 0


def parse(argv: Sequence[str]) -> Options:
    """Flags → Options."""
    parser = argparse.ArgumentParser(
        prog="pdxfer bench store", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Example: pdxfer bench store --dir /var/tmp --tier redis=redis://127.0.0.1:6379",
    )  # fmt: skip
    parser.add_argument("--dir", type=Path, default=Path("."), help="filesystem of the disk tier (default here)")
    parser.add_argument("--tier", action="append", default=[], metavar="NAME=URL", help="a further tier; repeat")
    parser.add_argument("--only", default="", help="names to measure, with commas (default all)")
    parser.add_argument("--sizes", default=",".join(SIZES), help=f"of {', '.join(SIZES)} (default all)")
    parser.add_argument("--reps", type=int, default=5, help="passes an arm (default 5)")
    parser.add_argument("--depth", type=int, default=4, help="values at once (default 4)")
    parser.add_argument("--mib", type=int, default=64, help="MiB a pass (default 64)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, default=Path("bench/out"), help="where store.json and .png go")
    args = parser.parse_args(argv)
    tiers = {"dram": "dram:", "disk": f"file://{args.dir.resolve()}"}
    for pair in args.tier:
        name, _, url = pair.partition("=")
        if not url:
            parser.error(f"--tier {pair!r} is not NAME=URL")
        tiers[name] = url
    if args.only:
        tiers = {name: url for name, url in tiers.items() if name in args.only.split(",")}
    sizes = tuple(args.sizes.split(","))
    if min(args.reps, args.depth, args.mib) < 1 or not set(sizes) <= set(SIZES) or not tiers:
        parser.error(f"--reps, --depth and --mib are at least 1, --sizes of {', '.join(SIZES)}, --only of known tiers")
    return Options(
        tiers=tiers, sizes=sizes, reps=args.reps, depth=args.depth, mib=args.mib, as_json=args.json, out=args.out
    )


async def run(options: Options, argv: list[str]) -> dict[str, Any]:
    """Measure, print, write; the printed object."""
    report = Report("store", argv)
    rates: dict[tuple[str, str, str, str], float] = {}
    for tier, url in options.tiers.items():
        for size in options.sizes:
            load = Load(size=SIZES[size], count=max(4, (options.mib << 20) // SIZES[size]), depth=options.depth)
            try:
                async with open_arms(tier, url, load) as arms:
                    await _measure(report, rates, arms, load, tier, size, options.reps)
            except Exception as error:  # a server that gives up must not cost the figures of the others
                print(f"{tier} {size}: failed: {type(error).__name__}: {str(error).splitlines()[:1]}", file=sys.stderr)
                report.summary["failed"] = f"{tier} {size}"
    report.summary |= _summary(rates, options)
    emit(report, as_json=options.as_json, out_dir=options.out, draw=lambda axes: _draw(axes, rates))
    return report.to_dict()


async def _measure(
    report: Report,
    rates: dict[tuple[str, str, str, str], float],
    arms: Sequence[Arm],
    load: Load,
    tier: str,
    size: str,
    reps: int,
) -> None:
    """All arms of one tier and size, in turns; the first round warms up and checks every byte."""
    times: dict[tuple[str, str], list[float]] = {}
    for arm in arms:
        await arm.check()
    for _ in range(reps):
        for arm in arms:
            for verb, took in (("put", await arm.put_all()), ("get", await arm.get_all())):
                times.setdefault((arm.name, verb), []).append(took)
    latency = {(arm.name, verb): ms for arm in arms for verb, ms in (await _latency(arm)).items()}
    for (name, verb), seconds in times.items():
        rate = load.num_bytes / statistics.median(seconds) / 1e9
        rates[tier, size, name, verb] = rate
        report.add(
            tier=tier, chunk=size, arm=name, verb=verb, gb_per_s=rate,
            best_gb_per_s=load.num_bytes / min(seconds) / 1e9, latency_ms=latency[name, verb],
        )  # fmt: skip
    print(f"{tier} {size}: {reps} rounds of {', '.join(arm.name for arm in arms)}", file=sys.stderr)


async def _latency(arm: Arm) -> dict[str, float]:
    puts, gets = [], []
    for index in range(min(LATENCIES, arm.load.count)):
        puts.append(await arm.put_one(index))
        gets.append(await arm.get_one(index))
    return {"put": statistics.median(puts) * 1e3, "get": statistics.median(gets) * 1e3}


def _summary(rates: dict[tuple[str, str, str, str], float], options: Options) -> dict[str, Any]:
    """`<tier>_put_rel`, `<tier>_get_rel`: ours over the reference at the largest size; and at each size."""
    found: dict[str, Any] = {}
    for tier in options.tiers:
        for verb in ("put", "get"):
            by_size = {
                size: rates[tier, size, "pdxfer", verb] / rates[tier, size, "reference", verb]
                for size in options.sizes
                if (tier, size, "reference", verb) in rates
            }
            found[f"{tier}_{verb}_rel"] = by_size.get(max(options.sizes, key=SIZES.__getitem__))
            found |= {f"{tier}_{verb}_rel_{size}": value for size, value in by_size.items()}
    return found


def _draw(axes: Any, rates: dict[tuple[str, str, str, str], float]) -> None:
    labels = [f"{tier} {verb} {size}: {arm}" for tier, size, arm, verb in rates]
    axes.barh(labels[::-1], list(rates.values())[::-1])
    axes.tick_params(axis="y", labelsize=5)
    axes.set_xlabel("GB/s, median")
    axes.set_title("Tiers of the store beside what the machine does without them")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
