"""`pdxfer bench chaos`: a real cluster under load whose processes are killed, stopped and restarted, one after another.

Every request has a known right answer and a deadline. What is broken is decided by the seed; the launcher brings the
processes back (chaos_campaign.py). Exit 1 if an answer was wrong, hung, or failed for no reason, or if anything is left
in an engine afterwards.
"""

import asyncio
import random
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import aiohttp

from pdxfer.bench import ttft_link
from pdxfer.bench.chaos_campaign import Campaign
from pdxfer.bench.chaos_cluster import Cluster
from pdxfer.bench.chaos_disk import SmallDisk, small_disk
from pdxfer.bench.chaos_faults import plan_faults
from pdxfer.bench.chaos_judge import Judge, Reference
from pdxfer.bench.chaos_link import FaultyLink
from pdxfer.bench.chaos_load import Got, Load, Question, ask, questions
from pdxfer.bench.chaos_options import PACES, Options, parse
from pdxfer.bench.chaos_plan import SERVED_NAME, Plan
from pdxfer.bench.chaos_rows import complain, rows, summary
from pdxfer.bench.chaos_watch import Watch
from pdxfer.bench.report import Report, emit
from pdxfer.bench.ttft_errors import BenchError

_PROXY_MARGIN_S = 5.0
_IDLE_S = 30.0
_LINK_RATE = "10gbit"
_NUM_SALTS = 2


def main(argv: Sequence[str]) -> int:
    """Run the bench; the exit code."""
    options = parse(argv)
    pace = PACES[options.engine]
    report = Report("chaos", list(argv))
    try:
        with ExitStack() as stack:
            link = stack.enter_context(ttft_link.link(_LINK_RATE)) if options.has_link else None
            disk = stack.enter_context(small_disk(pace.disk_mib << 20)) if options.has_store else None
            asyncio.run(run(options, report, link, disk))
    except BenchError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 1
    except (TimeoutError, aiohttp.ClientError) as error:  # of a question to a cluster that should be whole
        log = options.out / "chaos.log"
        print(f"chaos: the cluster did not answer ({type(error).__name__} {error}); see {log}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        print("chaos: told to stop", file=sys.stderr)
        return 1
    emit(report, as_json=options.as_json, out_dir=options.out)
    return 1 if any(report.summary[key] for key in ("wrong", "hung", "failed_unexplained")) else 0


async def run(
    options: Options, report: Report, link: ttft_link.LinkPlan | None = None, disk: SmallDisk | None = None
) -> dict[str, Any]:
    """Start, break, judge, stop; fills the report. Raises BenchError if the cluster does not come up or back."""
    pace = PACES[options.engine]
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
        self._options, self._pace = options, PACES[options.engine]
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
        options, plan = self._options, self._cluster.plan
        campaign = Campaign(self._cluster, self._session, self._watch, self._link, self._disk, self._pace.recover_s)
        end = asyncio.get_running_loop().time() + options.time_s
        try:
            faults = plan_faults(plan.targets, options.num_faults, options.seed, self._pace.num_light, options.only)
            happened = await campaign.run(list(faults), end)
            await load.until_sent(options.min_requests, end)
            requests = await load.stop()
        finally:
            load.abort()
        await self._watch.look()
        await self._cluster.until_idle(self._session, _IDLE_S)
        is_decode_far = any(name.startswith("d") for name in plan.far)
        judge = Judge(references, happened, options.num_decode, self._rest_alone, is_decode_far=is_decode_far)
        judged = [(got, await judge.verdict(got)) for got in requests]
        complain(judged, happened)
        for row in rows(judged, happened):
            report.add(**row)
        report.summary = summary(judged, happened) | self._watch.counts

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
