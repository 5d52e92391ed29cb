"""The chaos bench: its plan, its judge on made-up answers, and a small run on fake engines."""

import asyncio
import json
import re
import socket
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import aiohttp
import pytest

from pdxfer.bench import chaos
from pdxfer.bench.chaos_faults import Fault, Happened, Kind, kinds_of, may_meet, plan_faults
from pdxfer.bench.chaos_judge import Judge, Reference, Verdict
from pdxfer.bench.chaos_link import check_passed
from pdxfer.bench.chaos_load import Got, Question, ask, questions
from pdxfer.bench.chaos_plan import SERVED_NAME, Plan
from pdxfer.bench.chaos_rows import rows, summary
from pdxfer.bench.chaos_watch import Sum
from pdxfer.bench.ttft_errors import BenchError
from pdxfer.bench.ttft_link import LinkPlan, require_namespaces
from pdxfer.testing.fake_engine import FakeEngine, FakeEngineSettings

QUESTION = Question(prompt="p", num_tokens=3)
SUMMARY = [
    "requests", "faults", "wrong", "hung", "failed", "failed_unexplained", "aborted", "slowest_recovery_s",
    "slowest_answer_s",
]  # fmt: skip


def got(*pieces: str, failure: str = "", is_told: bool = True, began: float = 0.0, is_hung: bool = False) -> Got:
    return Got(
        question=QUESTION, is_stream=True, began=began, ended=began + 1, pieces=list(pieces), failure=failure,
        is_told=is_told, is_hung=is_hung,
    )  # fmt: skip


def happened(target: str, kind: Kind = Kind.kill, began: float = 0.5) -> Happened:
    return Happened(fault=Fault(kind=kind, target=target, gap_s=1), began=began, ended=began, whole=began + 2)


async def verdict(
    one: Got, *faults: Happened, num_decode: int = 2, reference: str = " a b c", rest: str = ""
) -> Verdict:
    """The verdict on one answer; `rest` is what one engine alone goes on with after " a"."""

    async def alone(question: Question, begun: str) -> str:
        return rest if begun == " a" else "?"

    return await Judge({"p": Reference(text=reference)}, faults, num_decode, alone).verdict(one)


def test_a_seed_fixes_the_faults_and_all_kinds_meet_all_targets() -> None:
    """Before any pair of kind and target comes again; stops last 0.5 to 4 s."""
    targets = ["router", "proxy", "p0", "d0", "link", "disk"]
    plan = list(plan_faults(targets, 40, 7))
    assert plan == list(plan_faults(targets, 40, 7)) != list(plan_faults(targets, 40, 8))
    pairs = {(kind, name) for name in targets for kind in kinds_of(name)}
    assert len(pairs) == 17 and {(f.kind, f.target) for f in islice(plan, 17)} == pairs
    assert all((0.5 <= f.pause_s <= 4.0) != f.ends_process for f in plan)


def test_faults_that_end_no_engine_may_come_more_often() -> None:
    """A real engine takes a minute to start."""
    plan = list(plan_faults(["router", "p0"], 14, 7, num_light=3))
    counts = Counter((f.kind, f.target) for f in plan)
    assert counts.pop((Kind.kill, "p0")) == counts.pop((Kind.restart, "p0")) == 1 and set(counts.values()) == {3}


def test_faults_that_end_an_engine_are_spread_over_the_run() -> None:
    """So that each has time to start again; the first comes first."""
    plan = list(plan_faults(["router", "proxy", "p0", "d0"], 40, 7, num_light=2, only=("kill", "SIGSTOP", "SIGTERM r")))
    at = [n for n, fault in enumerate(plan) if fault.ends_engine]
    assert at[0] == 0 and all(6 <= b - a <= 9 for a, b in zip(at, at[1:], strict=False)) and len(at) >= 4


def test_what_may_come_while_an_engine_starts_again() -> None:
    """Others of its role can serve, and no decode engine is lost beside a decode engine."""

    def met(down: str, *engines: str) -> set[str]:
        targets = ["router", "proxy", "store", "disk", "link", *engines]
        return {str(f) for f in plan_faults(targets, 80, 1) if may_meet(f, down, engines)}

    assert met("p0", "p0", "d0", "d1") == met("d0", "p0", "p1", "d0") == set()
    engines = ("p0", "p1", "d0", "d1")
    assert met("p0", *engines) > {"SIGSTOP p1", "SIGSTOP d0", "cut link", "kill -9 router", "full disk"}
    assert {"SIGSTOP p1", "kill -9 store"} < met("d1", *engines)
    assert not {"SIGSTOP d0", "cut link", "throttled link", "SIGSTOP d1", "kill -9 p0"} & met("d1", *engines)
    assert not {"SIGSTOP p0", "kill -9 p1", "SIGTERM d0"} & met("p0", *engines)


def test_a_counter_whose_process_began_again_is_added_to_what_it_was() -> None:
    found, sample = Sum(), re.compile(r"^n(\{.*\}) (\S+)", re.MULTILINE)
    for text in ('n{a="1"} 2.0\nn{a="2"} 1.0\n', 'n{a="2"} 3.0\n', 'n{a="1"} 1.0\nn{a="2"} 3.0\n'):
        found.see(sample, text)
    assert found.total == 2 + 3 + 1


def test_only_the_faults_asked_for() -> None:
    plan = [*plan_faults(["router", "d0", "link"], 9, 7, only=("kill -9 d0", "SIGSTOP", "link"))]
    kinds = {str(fault) for fault in plan}
    assert kinds >= {"kill -9 d0", "SIGSTOP d0", "SIGSTOP router", "cut link"} and "kill -9 router" not in kinds
    assert [*plan_faults(["router"], 9, 7, only=("link",))] == []


def test_prompts_differ_and_are_the_same_for_a_seed() -> None:
    pool = questions(3, 5000)
    assert len({question.prompt for question in pool}) == len(pool) and pool == questions(3, 5000)


async def test_a_client_tries_again_where_nobody_listens() -> None:
    """Until its deadline, or until it leaves."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{port}"
        left = await ask(session, url, QUESTION, 30.0, is_stream=True, leave_s=0.01)
        assert left.has_left and not left.is_hung
        waiting = asyncio.create_task(ask(session, url, QUESTION, 30.0, is_stream=True))
        async with FakeEngine(FakeEngineSettings(port=port, served_names=(SERVED_NAME,))):
            assert not (await waiting).failure


@pytest.mark.parametrize(
    ("one", "faults", "expected"),
    [
        (got(" a", " b", " c"), [], Verdict.right),
        (got(" a", " b"), [], Verdict.wrong),
        (got(" a", " x", " c"), [], Verdict.wrong),
        (got(" x", failure="error event", began=0), [happened("d0")], Verdict.wrong),
        (got(" a", is_hung=True, failure="nothing ended it"), [happened("d0")], Verdict.hung),
        (got(" a", failure="error event"), [happened("d0")], Verdict.failed),
        (got(" a", failure="error event"), [happened("p0")], Verdict.unexplained),
        (got(" a", failure="error event"), [happened("d0", Kind.pause)], Verdict.unexplained),
        (got(" a", failure="error event"), [happened("d0", began=5)], Verdict.unexplained),
        (got(" a", failure="connection reset", is_told=False), [happened("d0")], Verdict.unexplained),
        (got(failure="503 busy"), [happened("d0")], Verdict.unexplained),
    ],
)  # fmt: skip
async def test_the_verdict(one: Got, faults: Sequence[Happened], expected: Verdict) -> None:
    """With two decode engines only a begun stream of a killed one may fail, and only if it is told."""
    assert await verdict(one, *faults) is expected


async def test_without_another_decode_engine_every_failure_is_explained() -> None:
    assert await verdict(got(failure="503 busy"), happened("d0"), num_decode=1) is Verdict.failed
    assert await verdict(got(failure="503 busy"), happened("router"), num_decode=1) is Verdict.unexplained


@pytest.mark.parametrize(
    ("one", "kind", "expected"),
    [
        (got(" a", failure="reset", is_told=False), Kind.kill, Verdict.failed),
        (got(failure="disconnected", is_told=False, began=1), Kind.restart, Verdict.failed),
        (got(failure="503 busy", began=1), Kind.kill, Verdict.failed),
        (got(" a", failure="reset", is_told=False), Kind.restart, Verdict.unexplained),
        (got(" a", failure="500 internal"), Kind.kill, Verdict.unexplained),
        (got(" a", failure="reset", is_told=False), Kind.pause, Verdict.unexplained),
        (got(" x", failure="reset", is_told=False), Kind.kill, Verdict.wrong),
    ],
)  # fmt: skip
async def test_a_dead_proxy_explains_a_cut_connection_and_nothing_else(one: Got, kind: Kind, expected: Verdict) -> None:
    """One told to leave finishes what it has begun."""
    assert await verdict(one, happened("proxy", kind)) is expected


async def test_a_client_that_leaves_must_have_been_told_the_right_beginning() -> None:
    for text, expected in ((" a", Verdict.left), (" x", Verdict.wrong)):
        one = got(text, failure="its client left")
        one.has_left = True
        assert await verdict(one) is expected


def test_a_fault_of_the_link_that_does_nothing_is_an_error() -> None:
    """The kernel's counters of the hurt sides: nothing may pass a cut, a throttled side sends no faster than it may."""
    cut, slow = (Fault(kind=kind, target="link", gap_s=0, pause_s=1) for kind in (Kind.cut, Kind.slow))
    check_passed(cut, [0, 0], 1.0)
    check_passed(slow, [2_500_000, 0], 1.0)
    for fault, passed in ((cut, [0, 1]), (slow, [9_000_000, 0])):
        with pytest.raises(BenchError, match="did not work"):
            check_passed(fault, passed, 1.0)


def test_with_a_link_the_last_engines_are_on_the_far_side() -> None:
    """Commands of both sides, run inside their namespaces; the only decode engine stays near."""
    link = LinkPlan(rate="1gbit", tag="t", prefill_host="127.0.0.1", decode_host="127.0.0.2")
    for num, far in ((1, {"p0"}), (2, {"p1", "d1"})):
        plan = Plan(engine="fake", num_prefill=num, num_decode=num, sets=(), link=link)
        near, *others = plan.commands()
        assert plan.far == far and len(others) == len(far) and near[:4] == ["ip", "netns", "exec", "pdxt-p"]
        assert all(other[:4] == ["ip", "netns", "exec", "pdxt-d"] for other in others)
        assert "link" in plan.targets and "disk" not in plan.targets


async def test_a_continued_stream_is_right_if_an_engine_alone_goes_on_like_that() -> None:
    """And only after a decode engine was lost."""
    one = got(" a", " y", " z")
    assert await verdict(one, happened("d0"), rest=" y z") is Verdict.right
    assert await verdict(one, happened("d0"), rest=" y q") is Verdict.wrong
    assert await verdict(one, happened("p0"), rest=" y z") is Verdict.wrong


def test_a_tie_may_fall_either_way() -> None:
    """The two best tokens within float32's noise; a difference anywhere else is wrong."""
    reference = Reference(text=" a b c", ends=(2, 4, 6), gaps=(5.0, 1e-6, 5.0))
    assert reference.agrees(" a x", is_whole=True) and not reference.agrees(" x b c", is_whole=True)
    assert not reference.agrees(" a b x", is_whole=True)


def test_the_table_puts_a_request_to_the_last_fault_before_its_end() -> None:
    """Quiet requests and the sum have lines of their own."""
    faults = [happened("d0", began=0.5), happened("router", began=0.8)]
    judged = [(got(" a b c"), Verdict.right), (got(" x", began=9), Verdict.wrong)]
    found = {row["fault"]: row for row in rows(judged, faults)}
    assert {name: row["requests"] for name, row in found.items()} == {
        "kill -9 decode": 0, "kill -9 router": 1, "none": 1, "all": 2,
    }  # fmt: skip
    assert list(summary(judged, faults)) == SUMMARY and summary(judged, faults)["wrong"] == 1


def can_make_namespaces() -> bool:
    try:
        require_namespaces()
    except BenchError:
        return False
    return True


def check(tmp_path: Path, capsys: pytest.CaptureFixture[str], *args: str) -> None:
    """A run with --json keeps the promise and prints the object that others read."""
    code = chaos.main([*args, "--json", "--out", str(tmp_path)])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    printed = json.loads(captured.out)
    assert list(printed["summary"]) == [*SUMMARY, "replayed", "resumed"] and printed == json.loads(
        (tmp_path / "chaos.json").read_text()
    )
    assert printed["summary"]["wrong"] == printed["summary"]["hung"] == printed["summary"]["failed_unexplained"] == 0
    assert printed["summary"]["faults"] == int(args[args.index("--faults") + 1])


def test_a_cluster_that_does_not_answer_ends_the_run_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question beside the load: to the proxy's metrics, to an engine alone."""

    async def silent(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(chaos, "run", silent)
    assert chaos.main(["--engine", "fake", "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "the cluster did not answer (TimeoutError" in told and told.count("\n") == 1


@pytest.mark.slow
def test_a_small_run_on_fake_engines_keeps_its_promise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Router, prefill and decode processes are hurt under load: nothing wrong, hung or failed without a reason."""
    check(tmp_path, capsys, "--engine", "fake", "--prefill", "1", "--decode", "2", "--faults", "3", "--seed", "3")


@pytest.mark.slow
@pytest.mark.skipif(not can_make_namespaces(), reason="needs root, network namespaces and tmpfs")
def test_a_cut_link_a_full_disk_and_clients_that_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Engines on both sides of a link, and a store: the link, the disk, the store and the proxy are hurt. The same
    promise, and nothing is left in an engine."""
    more = ("--prefill", "1", "--decode", "2", "--link", "--store", "--aborted", "0.2")
    check(tmp_path, capsys, "--engine", "fake", *more, "--faults", "6", "--seed", "3832")


@pytest.mark.full
def test_forty_faults_on_fake_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--engine", "fake", "--prefill", "2", "--decode", "2", "--faults", "40", "--requests", "300")
    check(tmp_path, capsys, *args, *(("--link", "--store", "--aborted", "0.2") if can_make_namespaces() else ()))


@pytest.mark.full
@pytest.mark.vllm
def test_forty_faults_and_300_requests_on_real_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The promise: 0 wrong, 0 hung, 0 failed but those whose only decode engine was down. Every engine is killed."""
    args = ("--engine", "vllm", "--prefill", "2", "--decode", "2", "--faults", "40", "--requests", "300")
    sets = ("--rate", "0.7", "--aborted", "0.1", "--seed", "1", "--set", "engine.kv_cache_gib=0.5")
    only = [
        word for name in ("kill -9", "SIGSTOP", "router", "proxy", "store", "link", "disk") for word in ("--only", name)
    ]
    check(tmp_path, capsys, *args, *sets, *only, *(("--link", "--store") if can_make_namespaces() else ()))
