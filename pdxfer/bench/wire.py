"""`pdxfer bench wire`: what codecs on the wire do to time to first token, on a slow link and on a fast one.

Pairs of fake engines, KV of the demo model's shape, prefill as fast as --prefill-tokens-per-s says: raw; `auto` with
lossless codecs; `auto` with int8 allowed as well; on request `always`, lossless whatever the link. Prompts go to all
arms by turns, so each turn is a pair with raw. Prints a table (or one JSON object) with an interval and a verdict.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdxfer.bench.report import Report, emit
from pdxfer.bench.ttft_arms import Site
from pdxfer.bench.ttft_link import link
from pdxfer.bench.ttft_load import Answer, Client, completion
from pdxfer.bench.verdict import MIN_PAIRS, interval, verdict
from pdxfer.bench.wire_cluster import KV_BYTES_PER_TOKEN, MODEL, Pair, Work, running
from pdxfer.config.store import CodecConfig
from pdxfer.core.errors import ConfigError, PdxferError

ARMS = {
    "raw": CodecConfig(wire="off"),
    "lossless": CodecConfig(wire="auto"),
    "wire": CodecConfig(wire="auto", allow=["lossless", "int8"]),
    "always": CodecConfig(wire="lossless"),
}
BARS = {"fast": 1.03, "1gbit": 0.75}
"""What the adaptive wire has to reach, in parts of raw: it must not cost on a fast link, and pay on a slow one."""
REPS = {"fast": MIN_PAIRS}
"""Prompts an arm where not 11: a bar near 1 takes more."""
_VOCABULARY = 50_000
_NUM_OUT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run."""

    links: tuple[str, ...]
    num_tokens: int
    arms: tuple[str, ...]
    reps: int
    """0: as many as the link's bar needs."""
    warmups: int
    prefill_tokens_per_s: float
    out: Path
    as_json: bool


def parse(argv: Sequence[str]) -> Options:
    """Options of a command line. ConfigError for values that cannot work."""
    parser = argparse.ArgumentParser(
        prog="pdxfer bench wire",
        description="Time to first token with and without codecs on the wire, on fake engines.",
        epilog="example: pdxfer bench wire --links 1gbit,fast --reps 31",
    )
    parser.add_argument("--links", default="1gbit,fast", help="rates as tc writes them (root), and `fast`: loopback")
    parser.add_argument("--len", type=int, default=3500, dest="num_tokens", help="tokens of a prompt")
    parser.add_argument("--arms", default="raw,lossless,wire", help=f"of {', '.join(ARMS)}; raw is among them")
    parser.add_argument("--reps", type=int, default=0, help="prompts an arm; default 20 on the fast link, else 11")
    parser.add_argument("--warmups", type=int, default=3, help="prompts an arm before that are not counted")
    parser.add_argument("--prefill-tokens-per-s", type=float, default=20_000.0)
    parser.add_argument("--out", type=Path, default=Path("bench/out"), help="directory of the JSON file and logs")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    given = parser.parse_args(list(argv))
    links = tuple(text.strip() for text in given.links.split(",") if text.strip())
    arms = tuple(text.strip() for text in given.arms.split(",") if text.strip())
    if not set(arms) <= set(ARMS) or "raw" not in arms:
        raise ConfigError(f"--arms {given.arms}: raw and others of {', '.join(ARMS)}")
    if not links or given.reps < 0 or given.num_tokens < 256 or given.prefill_tokens_per_s <= 0:
        raise ConfigError("bench wire needs a link, 256 tokens and a prefill rate above 0; --reps 0 takes the default")
    return Options(
        links=links,
        num_tokens=given.num_tokens,
        arms=arms,
        reps=given.reps,
        warmups=given.warmups,
        prefill_tokens_per_s=given.prefill_tokens_per_s,
        out=given.out,
        as_json=given.json,
    )


def main(argv: Sequence[str]) -> int:
    """Run it. Exit code 1 when it cannot give figures."""
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    report = Report("wire", list(argv))
    try:
        for name in options.links:
            with _site(name) as site:
                reps = options.reps or REPS.get(name, 11)
                _add(report, name, asyncio.run(_measure(site, options, reps)))
    except PdxferError as error:
        print(f"bench wire: {error}", file=sys.stderr)
        return 1
    emit(report, as_json=options.as_json, out_dir=options.out)
    return 0


@contextlib.contextmanager
def _site(name: str) -> Iterator[Site]:
    if name == "fast":
        yield Site()
        return
    with link(name) as plan:
        yield plan.site


@dataclass(slots=True)
class _Figures:
    """One arm on one link."""

    arm: str
    ttft_s: list[float]
    num_frames: int = 0
    saved_bytes: int = 0


async def _measure(site: Site, options: Options, reps: int) -> list[_Figures]:
    """All arms by turns, one request at a time."""
    work = Work(num_tokens=options.num_tokens, prefill_tokens_per_s=options.prefill_tokens_per_s, out=options.out)
    figures = [_Figures(arm, []) for arm in options.arms]
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client())
        pairs = [await stack.enter_async_context(running(arm, ARMS[arm], site, work)) for arm in options.arms]
        for turn in range(-options.warmups, reps):
            order = list(zip(figures, pairs, strict=True))
            random.Random(turn).shuffle(order)
            for found, pair in order:
                answer = await _ask(client, pair, turn, options.num_tokens)
                if turn >= 0:
                    found.ttft_s.append(answer.ttft_s)
        await asyncio.sleep(1.0)  # two heartbeats: the engines' counts
        for found, pair in zip(figures, pairs, strict=True):
            found.num_frames, found.saved_bytes = pair.counts("wire_frames"), pair.counts("wire_saved_bytes")
    return figures


async def _ask(client: Client, pair: Pair, turn: int, num_tokens: int) -> Answer:
    """One prompt that no engine has seen; the same for every arm."""
    source = random.Random(1000 + turn)
    prompt = [source.randrange(_VOCABULARY) for _ in range(num_tokens)]
    return await client.stream(f"{pair.url}/v1/completions", completion(MODEL, prompt, _NUM_OUT), f"w{turn}")


def _add(report: Report, name: str, figures: Sequence[_Figures]) -> None:
    raw = next(found for found in figures if found.arm == "raw")
    for found in figures:
        ratios = sorted(ours / theirs for ours, theirs in zip(found.ttft_s, raw.ttft_s, strict=True))
        bounds = interval(ratios)
        report.add(
            link=name,
            arm=found.arm,
            ttft_ms=round(statistics.median(found.ttft_s) * 1000, 1),
            vs_raw=round(statistics.median(ratios), 3),
            vs_raw_low=round(bounds.low, 3),
            vs_raw_high=round(bounds.high, 3),
            pairs=len(ratios),
            frames=found.num_frames,
            saved_mib=round(found.saved_bytes / (1 << 20), 1),
        )
        if found.arm != "raw":
            report.summary[f"{found.arm}_vs_raw_{name}"] = round(statistics.median(ratios), 3)
            report.summary[f"{found.arm}_vs_raw_{name}_95"] = f"{bounds.low:.3f}..{bounds.high:.3f}"
        if found.arm == "wire" and name in BARS:
            report.summary[f"wire_at_most_{BARS[name]:g}_{name}"] = verdict(ratios, BARS[name])
    report.summary["kv_bytes_per_token"] = KV_BYTES_PER_TOKEN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
