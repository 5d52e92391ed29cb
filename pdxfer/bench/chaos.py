"""`pdxfer bench chaos`: a real cluster under load whose processes are killed, stopped and restarted, one after another.

Every request has a known right answer and a deadline. What is broken is decided by the seed; the launcher brings the
processes back, and the next fault waits until the cluster is whole. Exit 1 if an answer was wrong, hung, or failed
for no reason, or if anything is left in an engine afterwards.
"""

import argparse
import asyncio
import random
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from pdxfer.bench import ttft_link
from pdxfer.bench.chaos_cluster import Cluster
from pdxfer.bench.chaos_disk import SmallDisk, small_disk
from pdxfer.bench.chaos_faults import DISK, LINK, PROXY, Fault, Happened, inject, plan_faults
from pdxfer.bench.chaos_judge import Judge, Reference
from pdxfer.bench.chaos_link import FaultyLink
from pdxfer.bench.chaos_load import Got, Load, Question, ask, questions
from pdxfer.bench.chaos_plan import SERVED_NAME, Plan
from pdxfer.bench.chaos_rows import complain, rows, summary
from pdxfer.bench.chaos_watch import Watch
from pdxfer.bench.report import Report, emit
from pdxfer.bench.ttft_errors import BenchError


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
    """Faults that end no engine come so many times while those that do come once."""
    num_at_once: int
    """References asked for at once; real engines compute them one by one, so that each is alone in its batch."""
    sets: tuple[str, ...]


_PROXY_MARGIN_S = 5.0
_IDLE_S = 30.0
_LINK_RATE = "10gbit"
_NUM_SALTS = 2
_PACES = {
    "fake": Pace(
        rate=5.0, num_prompts=24, max_chars=10_000, deadline_s=35.0, start_s=60.0, recover_s=90.0, num_at_once=8,
        leave_s=1.5, disk_mib=16, num_light=1,
        sets=("model.path=fake", "router.min_remote_tokens=16"),
    ),
    "vllm": Pace(
        rate=0.5, num_prompts=12, max_chars=5_000, deadline_s=125.0, start_s=400.0, recover_s=400.0, num_at_once=1,
        leave_s=8.0, disk_mib=256, num_light=3,
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


def main(argv: Sequence[str]) -> int:
    """Run the bench; the exit code."""
    options = parse(argv)
    pace = _PACES[options.engine]
    report = Report("chaos", list(argv))
    try:
        with ExitStack() as stack:
            link = stack.enter_context(ttft_link.link(_LINK_RATE)) if options.has_link else None
            disk = stack.enter_context(small_disk(pace.disk_mib << 20)) if options.has_store else None
            asyncio.run(run(options, report, link, disk))
    except BenchError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        print("chaos: told to stop", file=sys.stderr)
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
        rate=args.rate or _PACES[args.engine].rate, num_prefill=args.prefill, num_decode=args.decode,
        has_link=args.link, has_store=args.store, aborted=args.aborted, only=tuple(args.only),
        time_s=args.time, sets=tuple(args.set), as_json=args.json,
        out=args.out,
    )  # fmt: skip


async def run(
    options: Options, report: Report, link: ttft_link.LinkPlan | None = None, disk: SmallDisk | None = None
) -> dict[str, Any]:
    """Start, break, judge, stop; fills the report. Raises BenchError if the cluster does not come up or back."""
    pace = _PACES[options.engine]
    plan = Plan(
        engine=options.engine, num_prefill=options.num_prefill, num_decode=options.num_decode, link=link,
        store_dir=str(disk.path / "kv") if disk else "", disk_gib=pace.disk_mib / 1024,
        sets=(*pace.sets, f"proxy.request_timeout_s={pace.deadline_s - _PROXY_MARGIN_S:g}", *options.sets),
    )  # fmt: skip
    cluster = Cluster(plan, options.out / "chaos.log")
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _require_task().cancel)
    timeout, connector = aiohttp.ClientTimeout(total=None, sock_connect=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, trust_env=False) as session:
        try:
            cluster.start()
            await cluster.until_whole(session, pace.start_s)
            await Chaos(options, cluster, session, FaultyLink(link) if link else None, disk).run(report)
        finally:
            await cluster.stop()
    return report.to_dict()


def _require_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


class Chaos:
    """One run on a cluster that is up."""

    def __init__(
        self, options: Options, cluster: Cluster, session: aiohttp.ClientSession, link: FaultyLink | None,
        disk: SmallDisk | None,
    ) -> None:  # fmt: skip
        self._options, self._pace = options, _PACES[options.engine]
        self._cluster, self._session, self._link, self._disk = cluster, session, link, disk
        self._pool = questions(options.seed, self._pace.max_chars, self._pace.num_prompts)
        self._watch = Watch(cluster, session)
        self._random = random.Random(options.seed)

    async def run(self, report: Report) -> None:
        """References, faults under load, verdicts."""
        references = await self._references()
        if self._link is not None:
            crossed = await self._watch.crossed(self._link, self._pool, self._pace.deadline_s)
            print(f"one request put {crossed:,} bytes on the link", file=sys.stderr)
        load = Load(self._send, self._pool, self._options.rate)
        options, happened = self._options, []
        loop = asyncio.get_running_loop()
        end = loop.time() + options.time_s
        targets, num_light = self._cluster.plan.targets, self._pace.num_light
        try:
            for fault in plan_faults(targets, options.num_faults, options.seed, num_light, options.only):
                if loop.time() >= end:
                    break
                happened.append(await self._break(fault))
                self._say(len(happened), happened[-1])
            await load.until_sent(options.min_requests, end)
            requests = await load.stop()
        finally:
            load.abort()
        await self._watch.look()
        await self._cluster.until_idle(self._session, _IDLE_S)
        is_decode_far = any(name.startswith("d") for name in self._cluster.plan.far)
        judge = Judge(references, happened, options.num_decode, self._rest_alone, is_decode_far=is_decode_far)
        judged = [(got, await judge.verdict(got)) for got in requests]
        complain(judged, happened)
        for row in rows(judged, happened):
            report.add(**row)
        report.summary = summary(judged, happened) | {"replayed": self._watch.num_replays}

    async def _break(self, fault: Fault) -> Happened:
        """One fault, and the wait until the cluster is whole again."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(fault.gap_s)
        is_process = fault.target not in (LINK, DISK)
        life = await self._cluster.life(self._session, fault.target) if is_process else None
        await self._watch.look()
        began = loop.time()
        if fault.target == LINK and self._link is not None:
            await self._link.inject(fault)
        elif fault.target == DISK and self._disk is not None:
            await self._disk.inject(fault)
        elif life is not None:
            await inject(fault, life.pid)
        ended = loop.time()
        await self._cluster.until_whole(self._session, self._pace.recover_s, life if fault.ends_process else None)
        if fault.target == PROXY and fault.ends_process:
            self._watch.proxy_is_new()
        return Happened(fault=fault, began=began, ended=ended, whole=loop.time())

    def _say(self, number: int, done: Happened) -> None:
        text = f"{number}/{self._options.num_faults} {done.fault}"
        print(f"{text}: whole after {done.recovery_s:.1f} s", file=sys.stderr)

    async def _send(self, question: Question, is_stream: bool, number: int) -> Got:
        """Through the proxy. Without a store each has a salt of its own, so that engines do not answer from what they
        kept; with one the same prompt comes back under the same few salts."""
        salt = number // len(self._pool) % _NUM_SALTS if self._options.has_store else number
        leaves = self._random.random() < self._options.aborted
        return await ask(
            self._session, self._cluster.proxy, question, self._pace.deadline_s, is_stream=is_stream,
            leave_s=self._random.uniform(0, self._pace.leave_s) if leaves else None, cache_salt=f"chaos-{salt}",
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

    async def _ask_alone(self, question: Question, **more: int) -> Got:
        got = await ask(
            self._session, self._cluster.url("d0"), question, self._pace.deadline_s, is_stream=False,
            cache_salt="alone", **more,
        )  # fmt: skip
        if got.failure:
            raise BenchError(f"one engine alone did not answer: {got.failure}")
        return got
