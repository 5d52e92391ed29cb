"""What a chaos run may be asked for, and what depends on how fast its engines are. Command line → Options."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DESCRIPTION = """\
A real cluster under load whose processes are killed, stopped and restarted, one after another.

Every request has a known right answer and a deadline. What is broken is decided by the seed; the launcher brings the
processes back. Exit 1 if an answer was wrong, hung, or failed for no reason, or if anything is left in an engine.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What depends on how fast an engine is."""

    rate: float
    """Requests per second."""
    num_prompts: int
    """Different ones."""
    max_chars: int
    """Of a prompt."""
    deadline_s: float
    """Of a request, at its client; the proxy's is a little less."""
    start_s: float
    """Until the cluster is up."""
    recover_s: float
    """Until it is whole after a fault: the launcher waits up to 36 s before it starts a process that died often."""
    leave_s: float
    """A client that leaves does so within this time."""
    disk_mib: int
    """Size of the disk tier's file system: less than what is kept."""
    num_light: int
    """Faults that end no engine come so many times while those that do come once, evenly spread."""
    num_at_once: int
    """References asked for at once; real engines compute them one by one, so that each is alone in its batch."""
    sets: tuple[str, ...]


PACES = {
    "fake": Pace(
        rate=5.0, num_prompts=24, max_chars=10_000, deadline_s=35.0, start_s=60.0, recover_s=90.0, num_at_once=8,
        leave_s=1.5, disk_mib=16, num_light=1,
        sets=("model.path=fake", "router.min_remote_tokens=16"),
    ),
    "vllm": Pace(
        rate=0.5, num_prompts=12, max_chars=2_500, deadline_s=125.0, start_s=400.0, recover_s=400.0, num_at_once=1,
        leave_s=8.0, disk_mib=256, num_light=2,
        sets=("model.dtype=float32", "router.min_remote_tokens=16", "proxy.pair_timeout_s=90"),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for."""

    engine: str
    num_faults: int
    min_requests: int
    """The load goes on until so many were sent, even if all faults are done."""
    seed: int
    rate: float
    num_prefill: int
    num_decode: int
    has_link: bool
    """Two sides, a link between them that is cut and throttled."""
    has_store: bool
    """Store process and disk tier, which are hurt too."""
    only: tuple[str, ...]
    """Texts; faults with none of them in their name are left out."""
    time_s: float
    """No fault begins later than this after the first, and no request is sent."""
    aborted: float
    """Part of the requests whose client leaves before the end."""
    sets: tuple[str, ...]
    as_json: bool
    out: Path


def parse(argv: Sequence[str]) -> Options:
    """Flags → Options."""
    parser = argparse.ArgumentParser(
        prog="pdxfer bench chaos", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Example: pdxfer bench chaos --engine fake --prefill 2 --decode 2 --faults 40",
    )  # fmt: skip
    parser.add_argument("--engine", choices=sorted(PACES), default="fake", help="kind of engine (default fake)")
    parser.add_argument("--faults", type=int, default=40, help="how many (default 40)")
    parser.add_argument("--requests", type=int, default=0, help="send at least so many")
    parser.add_argument("--seed", type=int, default=0, help="decides prompts and faults (default 0)")
    parser.add_argument("--rate", type=float, default=0.0, help="requests per second (fake 5, vllm 0.5)")
    parser.add_argument("--prefill", type=int, default=1, help="prefill engines (default 1)")
    parser.add_argument("--decode", type=int, default=1, help="decode engines (default 1)")
    parser.add_argument("--link", action="store_true", help="two network namespaces; cut and throttle the link (root)")
    parser.add_argument("--store", action="store_true", help="store process and disk tier; hurt and fill them (root)")
    parser.add_argument("--aborted", type=float, default=0.0, help="part of the clients that leave early (0 to 1)")
    parser.add_argument("--only", action="append", default=[], metavar="FAULT", help="as 'kill -9 d1', SIGSTOP, link")
    parser.add_argument("--time", type=float, default=float("inf"), help="seconds after which no fault begins")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="setting of pdxfer")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, default=Path("bench/out"), help="where chaos.json and chaos.log go")
    args = parser.parse_args(argv)
    if min(args.prefill, args.decode) < 1 or args.faults < 0 or args.rate < 0:
        parser.error("--prefill and --decode must be at least 1, --faults at least 0, --rate larger than 0")
    if not 0 <= args.aborted <= 1:
        parser.error("--aborted must be between 0 and 1")
    return Options(
        engine=args.engine, num_faults=args.faults, min_requests=args.requests, seed=args.seed,
        rate=args.rate or PACES[args.engine].rate, num_prefill=args.prefill, num_decode=args.decode,
        has_link=args.link, has_store=args.store, aborted=args.aborted, only=tuple(args.only),
        time_s=args.time, sets=tuple(args.set), as_json=args.json,
        out=args.out,
    )  # fmt: skip
