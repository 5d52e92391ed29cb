"""`pdxfer bench chaos`: a real cluster under load whose processes are killed, stopped and restarted, one after another.

Every request has a known right answer and a deadline. What is broken is decided by the seed; the launcher brings the
processes back, and the next fault waits until the cluster is whole. Exit 1 if an answer was wrong, hung, or failed
for no reason. The proxy is left alone: clients hold connections to it.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from pdxfer.bench.chaos_cluster import SERVED_NAME, Cluster
from pdxfer.bench.chaos_faults import Fault, Happened, inject, plan_faults
from pdxfer.bench.chaos_judge import Judge, Reference, Verdict
from pdxfer.bench.chaos_load import Got, Load, Question, ask, questions
from pdxfer.bench.chaos_rows import rows, summary
from pdxfer.bench.report import Report, emit
from pdxfer.bench.ttft_errors import BenchError


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What depends on how fast an engine is."""

    rate: float
    """Requests per second."""
    max_chars: int
    """Of a prompt."""
    deadline_s: float
    """Of a request, at its client; the proxy's is a little less."""
    start_s: float
    """Until the cluster is up."""
    recover_s: float
    """Until it is whole after a fault: the launcher waits up to 36 s before it starts a process that died often."""
    num_at_once: int
    """References asked for at once; real engines compute them one by one, so that each is alone in its batch."""
    sets: tuple[str, ...]


_PROXY_MARGIN_S = 5.0
_IDLE_S = 30.0
_PACES = {
    "fake": Pace(
        rate=5.0, max_chars=10_000, deadline_s=35.0, start_s=60.0, recover_s=90.0, num_at_once=8,
        sets=("model.path=fake", "router.min_remote_tokens=16"),
    ),
    "vllm": Pace(
        rate=0.5, max_chars=5_000, deadline_s=125.0, start_s=400.0, recover_s=400.0, num_at_once=1,
        sets=("model.dtype=float32", "router.min_remote_tokens=16"),
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
    sets: tuple[str, ...]
    as_json: bool
    out: Path


def main(argv: Sequence[str]) -> int:
    """Run the bench; the exit code."""
    options = parse(argv)
    report = Report("chaos", list(argv))
    try:
        asyncio.run(run(options, report))
    except BenchError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 1
    emit(report, as_json=options.as_json, out_dir=options.out)
    return 1 if any(report.summary[key] for key in ("wrong", "hung", "failed_unexplained")) else 0


def parse(argv: Sequence[str]) -> Options:
    """Flags → Options."""
    parser = argparse.ArgumentParser(
        prog="pdxfer bench chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Example: pdxfer bench chaos --engine fake --prefill 2 --decode 2 --faults 40",
    )  # fmt: skip
    parser.add_argument("--engine", choices=sorted(_PACES), default="fake", help="kind of engine (default fake)")
    parser.add_argument("--faults", type=int, default=40, help="how many (default 40)")
    parser.add_argument("--requests", type=int, default=0, help="send at least so many")
    parser.add_argument("--seed", type=int, default=0, help="decides prompts and faults (default 0)")
    parser.add_argument("--rate", type=float, default=0.0, help="requests per second (fake 5, vllm 0.5)")
    parser.add_argument("--prefill", type=int, default=1, help="prefill engines (default 1)")
    parser.add_argument("--decode", type=int, default=1, help="decode engines (default 1)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="setting of pdxfer")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, default=Path("bench/out"), help="where chaos.json and chaos.log go")
    args = parser.parse_args(argv)
    if min(args.faults, args.prefill, args.decode) < 1 or args.rate < 0:
        parser.error("--faults, --prefill and --decode must be at least 1, --rate larger than 0")
    return Options(
        engine=args.engine, num_faults=args.faults, min_requests=args.requests, seed=args.seed,
        rate=args.rate or _PACES[args.engine].rate, num_prefill=args.prefill, num_decode=args.decode,
        sets=tuple(args.set), as_json=args.json, out=args.out,
    )  # fmt: skip


async def run(options: Options, report: Report) -> dict[str, Any]:
    """Start, break, judge, stop; fills the report. Raises BenchError if the cluster does not come up or back."""
    pace = _PACES[options.engine]
    proxy_s = pace.deadline_s - _PROXY_MARGIN_S
    cluster = Cluster(
        engine=options.engine, num_prefill=options.num_prefill, num_decode=options.num_decode,
        log=options.out / "chaos.log", sets=(*pace.sets, f"proxy.request_timeout_s={proxy_s:g}", *options.sets),
    )  # fmt: skip
    timeout, connector = aiohttp.ClientTimeout(total=None, sock_connect=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, trust_env=False) as session:
        try:
            cluster.start()
            await cluster.until_whole(session, pace.start_s)
            await Chaos(options, pace, cluster, session).run(report)
        finally:
            await cluster.stop()
    return report.to_dict()


class Chaos:
    """One run on a cluster that is up."""

    def __init__(self, options: Options, pace: Pace, cluster: Cluster, session: aiohttp.ClientSession) -> None:
        self._options, self._pace, self._cluster, self._session = options, pace, cluster, session
        self._pool = questions(options.seed, pace.max_chars)

    async def run(self, report: Report) -> None:
        """References, faults under load, verdicts."""
        references = await self._references()
        load = Load(self._send, self._pool, self._options.rate)
        happened = []
        try:
            for fault in plan_faults(self._cluster.targets, self._options.num_faults, self._options.seed):
                happened.append(await self._break(fault))
                self._say(len(happened), happened[-1])
            await load.until_sent(self._options.min_requests)
            requests = await load.stop()
        finally:
            load.abort()
        await self._cluster.until_idle(self._session, _IDLE_S)
        judge = Judge(references, happened, self._options.num_decode, self._rest_alone)
        judged = [(got, await judge.verdict(got)) for got in requests]
        for got, verdict in judged:
            if verdict is not Verdict.right:
                faults = ", ".join(
                    f"{h.fault.kind} {h.fault.target}" for h in happened if h.touches(got.began, got.ended)
                )
                print(f"{verdict}: {got.failure or repr(got.text)} (met: {faults})", file=sys.stderr)
        for row in rows(judged, happened):
            report.add(**row)
        report.summary = summary(judged, happened)

    async def _break(self, fault: Fault) -> Happened:
        """One fault, and the wait until the cluster is whole again."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(fault.gap_s)
        life = await self._cluster.life(self._session, fault.target)
        began = loop.time()
        await inject(fault, life.pid)
        ended = loop.time()
        await self._cluster.until_whole(self._session, self._pace.recover_s, life if fault.ends_process else None)
        return Happened(fault=fault, began=began, ended=ended, whole=loop.time())

    def _say(self, number: int, done: Happened) -> None:
        text = f"{number}/{self._options.num_faults} {done.fault.kind} {done.fault.target}"
        print(f"{text}: whole after {done.recovery_s:.1f} s", file=sys.stderr)

    async def _send(self, question: Question, is_stream: bool, number: int) -> Got:
        """Through the proxy, with a salt of its own: engines must not answer from what they kept."""
        return await ask(
            self._session, self._cluster.proxy, question, self._pace.deadline_s, is_stream=is_stream,
            cache_salt=f"chaos-{number}",
        )  # fmt: skip

    async def _references(self) -> dict[str, Reference]:
        """What one engine alone says to each prompt. Raises BenchError if it does not answer."""
        free = asyncio.Semaphore(self._pace.num_at_once)

        async def one(question: Question) -> Reference:
            async with free:
                return Reference.of(await self._ask_alone(question, logprobs=2))

        answers = await asyncio.gather(*map(one, self._pool))
        return {question.prompt: answer for question, answer in zip(self._pool, answers, strict=True)}

    async def _rest_alone(self, question: Question, begun: str) -> str:
        """What one engine alone says after `begun`."""
        body = {"model": SERVED_NAME, "prompt": begun, "add_special_tokens": False}
        url = self._cluster.url("d0") + "/tokenize"
        async with asyncio.timeout(self._pace.deadline_s), self._session.post(url, json=body) as response:
            num_begun = int((await response.json())["count"])
        if num_begun >= question.num_tokens:
            return ""
        rest = Question(prompt=question.prompt + begun, num_tokens=question.num_tokens - num_begun)
        return (await self._ask_alone(rest)).text

    async def _ask_alone(self, question: Question, **more: object) -> Got:
        got = await ask(
            self._session, self._cluster.url("d0"), question, self._pace.deadline_s, is_stream=False,
            cache_salt="alone", **more,
        )  # fmt: skip
        if got.failure:
            raise BenchError(f"one engine alone did not answer: {got.failure}")
        return got
