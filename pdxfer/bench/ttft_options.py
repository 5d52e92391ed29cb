"""What `pdxfer bench ttft` was asked to do: flags → Options, checked before anything is started. Pure but for a look
at the model directory."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pdxfer.core.errors import ConfigError

ARMS = ("one", "nixl-pull", "nixl-push", "nixl-pull-stock", "nixl-push-stock", "pdxfer")
DEMO_MODEL = Path("~/.cache/pdxfer/models/smollm2-135m-instruct")
MAX_MODEL_LEN = 4096
NUM_NEW_TOKENS = 16
"""Tokens of an answer whose time to first token is measured."""
NUM_COMPARED_TOKENS = 32
"""Greedy tokens compared in the float32 pass."""
_MIN_LEN = 129
"""A prompt of one block goes to the decode engine alone: nothing to measure."""
_MAX_LEN = MAX_MODEL_LEN - NUM_COMPARED_TOKENS
_RATES = {"1gbit", "2gbit", "5gbit", "10gbit"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run."""

    lens: tuple[int, ...] = (1000, 3500)
    """Prompt lengths in tokens."""
    reps: int = 5
    """Measured requests of each length and arm."""
    arms: tuple[str, ...] = ARMS
    link: str = ""
    """Rate of the link between two network namespaces, as tc writes it; empty: loopback."""
    rate: float = 0.0
    """Requests per second of the open-loop part; 0: none."""
    count: int = 40
    """Requests of the open-loop part of each arm."""
    model: Path = DEMO_MODEL
    out: Path = Path("bench/out")
    as_json: bool = False
    """Print one JSON object instead of a table."""
    sets: tuple[str, ...] = ()
    """Further settings of the pdxfer arm, SECTION.KEY=VALUE."""
    is_quick: bool = False
    """Leave out the float32 pass and the inter-token latencies."""

    @property
    def num_gaps_reps(self) -> int:
        """Long prompts sent while a stream runs."""
        return min(self.reps, 3)


def parse(argv: Sequence[str]) -> Options:
    """Options of a command line. Raises ConfigError for values that cannot work, SystemExit(2) for unknown flags."""
    given = _parser().parse_args(list(argv))
    options = Options(
        lens=tuple(dict.fromkeys(_ints("--lens", given.lens))),
        reps=given.reps,
        arms=_arms(given.arms),
        link=given.link,
        rate=given.rate,
        count=given.count,
        model=given.model.expanduser(),
        out=given.out,
        as_json=given.json,
        sets=tuple(given.set),
        is_quick=given.quick,
    )
    _check(options)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdxfer bench ttft",
        description="Time to first token of one engine, vLLM's own NIXL pairs and pdxfer, on equal terms.",
        epilog="example: pdxfer bench ttft --lens 1000,3500 --reps 5 --link 1gbit",
    )
    defaults = Options()
    parser.add_argument("--lens", default=",".join(map(str, defaults.lens)), help="prompt lengths in tokens")
    parser.add_argument("--reps", type=int, default=defaults.reps, help="measured requests of each length and arm")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"which of {', '.join(ARMS)}")
    parser.add_argument("--link", default="", help="1gbit: prefill and decode in two network namespaces (needs root)")
    parser.add_argument("--rate", type=float, default=0.0, help="also an open loop of this many requests per second")
    parser.add_argument("--count", type=int, default=defaults.count, help="requests of the open loop")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="directory of the model")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--out", type=Path, default=defaults.out, help="directory of the JSON file, figure and logs")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="setting of pdxfer")
    parser.add_argument("--quick", action="store_true", help="no float32 pass and no inter-token latencies")
    return parser


def _check(options: Options) -> None:
    for length in options.lens:
        if not _MIN_LEN <= length <= _MAX_LEN:
            raise ConfigError(f"--lens {length}: use {_MIN_LEN} to {_MAX_LEN} tokens")
    if options.reps < 1 or options.count < 1:
        raise ConfigError(f"--reps {options.reps} --count {options.count}: use at least 1")
    if options.rate < 0:
        raise ConfigError(f"--rate {options.rate:g}: use requests per second, as in --rate 0.5")
    if options.link and options.link not in _RATES:
        raise ConfigError(f"--link {options.link}: use one of {', '.join(sorted(_RATES))}")
    check_model(options.model)


def check_model(model: Path) -> None:
    """Raise ConfigError unless this is the directory of a model with its tokenizer."""
    for name in ("config.json", "tokenizer.json"):
        if not (model / name).is_file():
            raise ConfigError(
                f"no model in {model}: {name} is missing. "
                "Run `pdxfer model demo` to prepare the demo model, or give --model DIR"
            )


def _ints(flag: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} {text}: write numbers separated by commas, as in {flag} 1000,3500") from None


def _arms(text: str) -> tuple[str, ...]:
    """The arms asked for, in the order in which they run."""
    asked = [part.strip() for part in text.split(",") if part.strip()]
    for name in asked:
        if name not in ARMS:
            raise ConfigError(f"--arms {name}: known are {', '.join(ARMS)}")
    if not asked:
        raise ConfigError(f"--arms is empty: use some of {', '.join(ARMS)}")
    return tuple(name for name in ARMS if name in asked)
