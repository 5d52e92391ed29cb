"""The TTFT bench without engines: options, arms as data, figures, the link's commands, routes against small servers."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pdxfer.bench import ttft, ttft_link, ttft_measure
from pdxfer.bench.ttft_arms import Arm, Ports, Site, make_arm
from pdxfer.bench.ttft_errors import BenchError
from pdxfer.bench.ttft_link import LinkPlan
from pdxfer.bench.ttft_load import Answer, Client, Moved, open_loop, parse_event, poisson_arrivals
from pdxfer.bench.ttft_measure import Gaps, split_gaps
from pdxfer.bench.ttft_options import ARMS, Options, parse
from pdxfer.bench.ttft_report import TtftReport, publish
from pdxfer.bench.ttft_routes import NixlPull, NixlPush, Pdxfer, Plain, require_pair, with_timeline
from pdxfer.bench.ttft_run import with_arm
from pdxfer.bench.ttft_summary import Equality, Measured, exposed_fraction, percentile, rows, summary
from pdxfer.core.errors import ConfigError
from pdxfer.launcher.spec import ProcessSpec

PORTS = Ports(prefill=8100, decode=8200, proxy=8000, router=5570, controller=5580, prefill_side=5600, decode_side=5601)
PLAN = LinkPlan(rate="1gbit", tag="7")
CONFIG = {"num_hidden_layers": 30, "num_key_value_heads": 3, "num_attention_heads": 9, "hidden_size": 576}
WORDS = "the cat sat on a mat and looked at python modules which import names from other packages".split()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory with nothing but a config and a tokenizer of one id a word."""
    pytest.importorskip(
        "tokenizers", reason="the bench cuts prompts with the tokenizers package, which comes with vLLM"
    )
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: index + 1 for index, word in enumerate(WORDS)} | {"?": 0}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def answer(ttft_s: float, exposed_ms: float | None = None, num_bytes: int = 0, alone: str = "") -> Answer:
    stages = {} if exposed_ms is None else {"queue": 1.0, "exposed_transfer": exposed_ms}
    moved = Moved(num_bytes=num_bytes, num_units=3, channel="tcp") if num_bytes else None
    return Answer(
        request_id="r", times_s=(ttft_s, ttft_s + 1), text="", stages_ms=stages, moved=moved, alone_because=alone
    )


# ---- options ---------------------------------------------------------------------------------------------------------


def test_arms_run_in_one_order_whatever_the_command_line_says(model: Path) -> None:
    options = parse(["--arms", "pdxfer, one", "--lens", "1000,3500,1000", "--model", str(model)])
    assert options.arms == ("one", "pdxfer")
    assert options.lens == (1000, 3500)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--lens", "100"], ["--lens 100", "129 to"]),
        (["--lens", "5000"], ["--lens 5000"]),
        (["--lens", "1k"], ["--lens 1k", "numbers"]),
        (["--reps", "0"], ["--reps 0"]),
        (["--rate", "-1"], ["--rate -1"]),
        (["--link", "1banana"], ["1banana", "1gbit"]),
        (["--arms", "ours"], ["ours", "nixl-pull"]),
        (["--arms", ","], ["--arms"]),
    ],
)
def test_a_value_that_cannot_work_is_one_line_before_anything_starts(
    model: Path, argv: list[str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        parse([*argv, "--model", str(model)])
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_a_missing_model_names_the_command_that_prepares_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pdxfer model demo"):
        parse(["--model", str(tmp_path)])


# ---- arms ------------------------------------------------------------------------------------------------------------


def arm(name: str, site: Site | None = None, **more: Any) -> Arm:
    return make_arm(name, model=Path("/m"), site=site or Site(), ports=PORTS, **more)


def after(spec: ProcessSpec, flag: str) -> str:
    return spec.argv[spec.argv.index(flag) + 1]


def test_every_engine_has_one_core_and_the_same_flags() -> None:
    """A pair has twice the cores of one engine, each engine the same one."""
    engines = [spec for name in ARMS if name != "pdxfer" for spec in arm(name).processes]
    assert {spec.env["VLLM_CPU_OMP_THREADS_BIND"] for spec in engines} == {"0", "1"}
    for spec in engines:
        assert spec.env["VLLM_CPU_OMP_THREADS_BIND"] == ("1" if spec.name == "decode" else "0")
        assert spec.env["VLLM_CPU_KVCACHE_SPACE"] == "1"
        assert after(spec, "--dtype") == "bfloat16"
        assert after(spec, "--max-num-batched-tokens") == "2048"
        assert "--no-enable-prefix-caching" in spec.argv and "--enforce-eager" in spec.argv


def test_pdxfer_gets_the_numbers_of_the_other_arms() -> None:
    (spec,) = arm("pdxfer", dtype="float32", sets=["transport.layerwise=false"]).processes
    sets = [value for flag, value in zip(spec.argv, spec.argv[1:], strict=False) if flag == "--set"]
    assert {"engine.prefix_caching=false", "engine.max_num_batched_tokens=2048", "model.dtype=float32"} <= set(sets)
    assert {'topology.prefill=[{port: 8100, cpus: "0"}]', 'topology.decode=[{port: 8200, cpus: "1"}]'} <= set(sets)
    assert sets[-1] == "transport.layerwise=false"


def test_settings_of_the_shell_do_not_reach_the_engines() -> None:
    shell = {"PATH": "/bin", "PDXFER_ROUTER__PORT": "1", "VLLM_LOGGING_LEVEL": "DEBUG", "UCX_TLS": "all"}
    for name in ARMS:
        for spec in arm(name).processes:
            seen = spec.environment(dict(shell))
            assert seen["PATH"] == "/bin"
            assert not {"PDXFER_ROUTER__PORT", "VLLM_LOGGING_LEVEL", "UCX_TLS"} & set(seen)


def test_only_the_stock_pairs_keep_the_connector_s_pinning() -> None:
    for kind in ("nixl-pull", "nixl-push"):
        unpinned = [Path(spec.env["PYTHONPATH"]) for spec in arm(kind).processes]
        assert all((path / "sitecustomize.py").is_file() for path in unpinned)
        assert not any("PYTHONPATH" in spec.env for spec in arm(f"{kind}-stock").processes)


def test_the_unpinning_reaches_the_platform_class_and_nothing_else(tmp_path: Path) -> None:
    """The real sitecustomize, in a Python that has a small vllm.platforms.cpu."""
    package = tmp_path / "vllm" / "platforms"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "cpu.py").write_text(
        "class CpuPlatform:\n    @classmethod\n    def discover_numa_topology(cls): return [[0, 1]]\n"
    )
    unpin = arm("nixl-pull").processes[0].env["PYTHONPATH"]
    code = "from vllm.platforms.cpu import CpuPlatform; print(CpuPlatform.discover_numa_topology())"
    env = os.environ | {"PYTHONPATH": f"{unpin}:{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_over_a_link_each_side_runs_in_its_namespace_and_nothing_goes_around_it() -> None:
    site = PLAN.site
    for name in ARMS:
        for spec in arm(name, site).processes:
            where = "pdx7-d" if spec.name == "decode" else "pdx7-p"
            assert spec.argv[:4] == ("ip", "netns", "exec", where)
    for name in ("nixl-pull", "nixl-push-stock"):
        assert {spec.env["UCX_TLS"] for spec in arm(name, site).processes} == {"tcp"}
    for spec in arm("pdxfer", site).processes:
        assert "transport.channels=nixl,tcp" in spec.argv
        assert 'engine.env={"UCX_TLS": "tcp"}' in spec.argv


def test_free_ports_are_all_different() -> None:
    ports = Ports.free()
    numbers = [getattr(ports, name) for name in Ports.__dataclass_fields__]
    assert len(set(numbers)) == len(numbers) and min(numbers) > 0


# ---- link ------------------------------------------------------------------------------------------------------------


def test_the_link_is_rate_limited_in_both_directions() -> None:
    lines = [" ".join(command) for command in PLAN.up()]
    assert lines[:3] == [
        "ip netns add pdx7-p",
        "ip netns add pdx7-d",
        "ip link add pdx7-p netns pdx7-p type veth peer name pdx7-d netns pdx7-d",
    ]
    limits = [line for line in lines if line.startswith("tc ")]
    assert [line.split()[2] for line in limits] == ["pdx7-p", "pdx7-d"]
    assert all("tbf rate 1gbit burst 256kb latency 20ms" in line for line in limits)
    assert PLAN.down() == [["ip", "netns", "del", "pdx7-p"], ["ip", "netns", "del", "pdx7-d"]]


def test_device_names_fit_the_kernel_s_limit() -> None:
    assert len(LinkPlan(rate="1gbit", tag=str(1 << 22)).prefill_side) <= 15


def test_the_run_fails_when_the_counter_did_not_grow_by_the_kv() -> None:
    text = json.dumps([{"stats64": {"rx": {"bytes": 5}, "tx": {"bytes": 1_000}}}])
    before = ttft_link.parse_counter(text)
    assert ttft_link.require_crossed("pdxfer", before, 3_500, 2_500) == 2_500
    with pytest.raises(BenchError, match=r"pdxfer: only 2,499 bytes crossed the link.* 2,500 bytes"):
        ttft_link.require_crossed("pdxfer", before, 3_499, 2_500)


def test_kv_of_a_token_follows_from_the_model_s_shape() -> None:
    assert ttft_link.kv_bytes_per_token(CONFIG) == 30 * 2 * 3 * 64 * 2
    assert ttft_link.kv_bytes_per_token({**CONFIG, "head_dim": 32}) == 30 * 2 * 3 * 32 * 2


def test_a_link_without_root_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(BenchError, match="needs root"), ttft_link.link("1gbit"):
        pass


def test_a_link_without_iproute2_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BenchError, match="iproute2"), ttft_link.link("1gbit"):
        pass


def test_a_plain_socket_is_timed_over_loopback() -> None:
    assert 0 < ttft_link.socket_seconds(None, 1 << 20) < 30


@pytest.mark.netns
def test_a_real_link_carries_and_counts_at_its_rate() -> None:
    """5 MB over 1 Gbit/s take at least 38 ms, and the counter has seen them."""
    try:
        ttft_link.require_namespaces()
    except BenchError as error:
        pytest.skip(str(error))
    with ttft_link.link("1gbit") as plan:
        before = ttft_link.sent_bytes(plan)
        seconds = ttft_link.socket_seconds(plan, 5_000_000)
        assert ttft_link.require_crossed("socket", before, ttft_link.sent_bytes(plan), 5_000_000) < 6_000_000
    assert 0.036 < seconds < 10
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert plan.prefill_side not in left and plan.decode_side not in left


# ---- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("percent", "value"), [(50, 5), (90, 9), (99, 10), (100, 10), (1, 1)])
def test_percentiles_are_samples_by_nearest_rank(percent: float, value: int) -> None:
    assert percentile(list(range(10, 0, -1)), percent) == value


def run_of(**medians: float) -> dict[str, Measured]:
    """Arms whose median TTFT at 1,000 and 3,500 tokens is as given, and four times that."""
    return {
        name.replace("_", "-"): Measured(
            answers={n: [answer(k * s) for s in (0.5, 1.0, 9.0)] for n, k in ((1000, median), (3500, 4 * median))}
        )
        for name, median in medians.items()
    }


def test_the_summary_has_the_promised_keys_and_ratios_of_medians() -> None:
    arms = run_of(one=1.0, nixl_pull=2.0, nixl_push=4.0, nixl_pull_stock=8.0, nixl_push_stock=10.0, pdxfer=1.1)
    arms["pdxfer"].answers[3500] = [answer(1.0, exposed_ms=ms, num_bytes=100) for ms in (20.0, 10.0, 900.0)]
    arms["pdxfer"].socket_s[3500] = 0.1
    arms["pdxfer"].gaps = Gaps(idle_s=(0.1,), busy_s=(0.11, 0.2, 0.12))
    arms["one"].gaps = Gaps(idle_s=(0.1,), busy_s=(1.0,))
    figures = summary(arms, (1000, 3500), Equality(num_equal=9, num_total=10))
    expected = {
        "vs_one_engine_1000": 1.1,
        "vs_one_engine_3500": 0.25,
        "vs_nixl_pull_3500": 0.125,
        "vs_nixl_push_3500": 0.0625,
        "vs_nixl_pull_3500_stock": 0.0312,
        "vs_nixl_push_3500_stock": 0.025,
        "exposed_fraction_3500": 0.2,
        "outputs_equal": 9,
        "outputs_total": 10,
        "itl_under_prefill": 1.2,
        "itl_under_prefill_one_engine": 10.0,
        "longest_stall_s": 0.2,
    }
    assert {key: figures[key] for key in expected} == pytest.approx(expected)
    assert figures["exposed_fraction_1000"] is None


def test_what_was_not_measured_is_none_not_a_number() -> None:
    figures = summary(run_of(one=1.0), (1000,), None)
    assert set(figures.values()) == {None}
    assert exposed_fraction(Measured(), 1000) is None


def test_gaps_that_touch_a_prefill_belong_to_it() -> None:
    gaps = split_gaps([0.0, 1.0, 2.0, 5.0, 6.0, 7.0], [(2.5, 5.5)])
    assert gaps.idle_s == (1.0, 1.0, 1.0)
    assert gaps.busy_s == (3.0, 1.0)
    assert (gaps.ratio, gaps.longest_stall_s) == (2.0, 3.0)


def test_gaps_need_both_kinds() -> None:
    with pytest.raises(BenchError, match="0 busy gaps"):
        split_gaps([0.0, 1.0], [])


def test_rows_hold_every_sample_and_the_table_only_plain_values(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Options(lens=(1000,), arms=("one", "pdxfer"), rate=2.0, out=tmp_path / "out", as_json=True, model=model)
    ours = Measured(answers={1000: [answer(0.2, exposed_ms=3.0, num_bytes=1 << 20), answer(0.4, 5.0, 1 << 20)]})
    ours.at_rate = [answer(0.3), answer(0.5, alone="busy")]
    ours.socket_s[1000], ours.link_bytes[1000] = 0.008, 4 << 20
    arms = {"one": Measured(answers={1000: [answer(0.1)]}), "pdxfer": ours}
    report = TtftReport(["--lens", "1000"])
    report.fill(options, arms, None)
    publish(report, options, arms)
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out" / "ttft.json").read_text())
    assert set(printed) == {"command", "machine", "versions", "results", "summary"}
    assert printed["summary"]["exposed_fraction_1000"] == 0.5
    one, pair, rate = printed["results"]
    assert one["all_ms"] == [100.0]
    assert (pair["all_ms"], pair["all_exposed_ms"]) == ([200.0, 400.0], [3.0, 5.0])
    assert (pair["kv_mib"], pair["link_mib"], pair["socket_ms"], pair["channel"]) == (1.0, 2.0, 8.0, "tcp")
    assert (rate["median_ms"], rate["p99_ms"], rate["alone"]) == (400.0, 500.0, 1)
    assert all(not isinstance(value, list | dict) for row in report.results for value in row.values())
    assert rows(arms, options) == printed["results"]
    if (tmp_path / "out" / "ttft.png").exists():
        assert (tmp_path / "out" / "ttft.png").read_bytes().startswith(b"\x89PNG")


# ---- load ------------------------------------------------------------------------------------------------------------


def test_arrivals_are_the_same_for_every_arm_and_have_the_rate() -> None:
    times = poisson_arrivals(2.0, 4000)
    assert times == poisson_arrivals(2.0, 4000)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(2000, rel=0.1)


async def test_the_open_loop_does_not_wait_for_answers() -> None:
    """The first request is answered only when the last has been sent."""
    sent = [asyncio.Event() for _ in range(3)]

    async def send(index: int) -> Answer:
        sent[index].set()
        await asyncio.wait_for(sent[2].wait(), 10)
        return answer(float(index))

    assert [found.ttft_s for found in await open_loop([0.0, 0.001, 0.002], send)] == [0.0, 1.0, 2.0]


async def test_one_failed_request_ends_the_open_loop() -> None:
    async def send(index: int) -> Answer:
        raise BenchError(f"request {index} failed")

    with pytest.raises(BenchError, match="request 0 failed"):
        await asyncio.wait_for(open_loop([0.0, 3600.0], send), 10)


def test_only_events_with_a_choice_carry_a_token() -> None:
    assert parse_event(b'data: {"choices": [{"text": "a"}]}\n', "u") == "a"
    assert parse_event(b'data: {"choices": [{"text": ""}]}\n', "u") == ""
    for line in (b"\n", b": comment\n", b"data: [DONE]\n", b'data: {"choices": [], "usage": {}}\n'):
        assert parse_event(line, "u") is None


@pytest.mark.parametrize(
    "line", [b'data: {"error": {"message": "boom"}}', b'data: {"choices": [{"text": "", "finish_reason": "error"}]}']
)
def test_a_failure_inside_a_stream_is_no_token(line: bytes) -> None:
    with pytest.raises(BenchError, match="u .*stream"):
        parse_event(line, "u")


# ---- routes ----------------------------------------------------------------------------------------------------------


class Server:
    """Answers completions with three tokens, remembers what it was sent."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.status = 200
        self.gate: Callable[[], Awaitable[None]] | None = None
        self.timelines: list[dict[str, Any]] = []
        self.url = ""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.ids.append(request.headers["X-Request-Id"])
        if self.gate is not None:
            await self.gate()
        if self.status != 200:
            return web.json_response({"error": {"message": "no room"}}, status=self.status)
        if not body.get("stream"):
            answer = {"choices": [{"text": "a b c"}], "kv_transfer_params": {"remote_block_ids": [[1, 2]]}}
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for text in ("a", " b", " c"):
            await response.write(f"data: {json.dumps({'choices': [{'text': text}]})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def timeline(self, request: web.Request) -> web.Response:
        found = self.timelines.pop(0)
        return web.json_response(found) if found else web.json_response({}, status=404)


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[Server]:
    app = web.Application()
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_get("/v1/pdxfer/timeline/{id}", server.timeline)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()


async def test_pull_gives_decode_what_prefill_answered() -> None:
    async with serving(Server()) as prefill, serving(Server()) as decode, Client() as client:
        found = await NixlPull(client, prefill.url, decode.url).stream([5, 6], 3)
    assert found.text == "a b c" and len(found.times_s) == 3
    assert prefill.ids == decode.ids
    assert prefill.bodies[0]["max_tokens"] == 1 and prefill.bodies[0]["kv_transfer_params"]["do_remote_decode"]
    assert decode.bodies[0]["kv_transfer_params"] == {"remote_block_ids": [[1, 2]]}
    assert decode.bodies[0]["prompt"] == [5, 6] and decode.bodies[0]["max_tokens"] == 3


async def test_push_sends_both_legs_at_once() -> None:
    """Each leg is answered only when the other has come in."""
    both = asyncio.Barrier(2)

    async def gate() -> None:
        await asyncio.wait_for(both.wait(), 10)

    prefill, decode = Server(), Server()
    prefill.gate = decode.gate = gate
    async with serving(prefill), serving(decode), Client() as client:
        found = await NixlPush(client, prefill.url, decode.url, "10.0.0.1", 5600).stream([5, 6], 3)
    params = decode.bodies[0]["kv_transfer_params"]
    assert found.text == "a b c"
    assert params["remote_request_id"] == f"cmpl-{prefill.ids[0]}-0"
    assert (params["remote_engine_id"], params["remote_host"], params["remote_port"]) == ("P0", "10.0.0.1", 5600)


async def test_a_failed_prefill_leg_of_push_ends_the_request() -> None:
    """Decode would wait for its KV for minutes."""
    never = asyncio.Event()
    prefill, decode = Server(), Server()
    prefill.status = 500

    async def gate() -> None:
        await never.wait()

    decode.gate = gate
    async with serving(prefill), serving(decode), Client() as client:
        try:
            with pytest.raises(BenchError, match="answered 500: .*no room"):
                await asyncio.wait_for(NixlPush(client, prefill.url, decode.url, "h", 1).stream([5], 3), 10)
        finally:
            never.set()


async def test_a_server_that_is_not_there_is_named() -> None:
    async with Client() as client:
        with pytest.raises(BenchError, match=r"http://127\.0\.0\.1:1/v1/completions"):
            await Plain(client, "http://127.0.0.1:1").stream([5], 3)


def timeline(outcome: str = "delivered") -> dict[str, Any]:
    transfer = {"outcome": outcome, "reason": "link down", "num_bytes": 9, "num_units": 2, "channel": "tcp"}
    stamps = {"prefilled": 100.0, "landed": 99.75}
    return {
        "mode": "pair",
        "reason": "",
        "stages_ms": {"exposed_transfer": 4.0},
        "stamps": stamps,
        "transfer": transfer,
    }


async def test_our_proxy_says_where_the_time_went_once_the_transfer_has_settled() -> None:
    server = Server()
    server.timelines = [{}, timeline() | {"transfer": None}, timeline()]
    async with serving(server), Client() as client:
        found = await Pdxfer(client, server.url).stream([5], 3)
    assert found.stages_ms == {"exposed_transfer": 4.0}
    assert found.landed_after_ms == -250.0
    assert found.moved == Moved(num_bytes=9, num_units=2, channel="tcp")


def test_landed_kv_counts_also_where_the_account_of_it_was_lost() -> None:
    found = with_timeline(answer(1.0), timeline() | {"transfer": None})
    assert require_pair(found).moved is None and found.landed_after_ms == -250.0


def test_an_answer_that_no_pair_served_is_not_measured() -> None:
    alone = with_timeline(answer(1.0), {"mode": "local", "reason": "no_prefill", "stages_ms": {}, "transfer": None})
    with pytest.raises(BenchError, match="one engine alone: no_prefill"):
        require_pair(alone)
    with pytest.raises(BenchError, match="failed: link down"):
        with_timeline(answer(1.0), timeline("failed"))


async def test_equality_compares_the_pair_with_decode_alone() -> None:
    pair, alone = Server(), Server()
    async with serving(pair), serving(alone), Client() as client:
        route = Plain(client, pair.url)
        assert await ttft_measure.count_equal(client, route, alone.url, [[1, 2], [3]]) == (2, [])
    assert [body["prompt"] for body in alone.bodies] == [[1, 2], [3]]
    assert all("kv_transfer_params" not in body and body["max_tokens"] == 32 for body in alone.bodies)


# ---- whole runs ------------------------------------------------------------------------------------------------------


async def test_an_engine_that_dies_is_one_line_with_its_error_and_log(tmp_path: Path) -> None:
    code = "raise RuntimeError('no memory for KV')"
    spec = ProcessSpec(
        name="one", argv=(sys.executable, "-c", code), ready_url="http://127.0.0.1:1/health", ready_timeout_s=30
    )

    async def work() -> None:
        raise AssertionError("it is never ready")

    with pytest.raises(BenchError) as error:
        await with_arm(Arm(name="one", processes=(spec,)), tmp_path, work)
    assert "RuntimeError: no memory for KV" in str(error.value)
    log = tmp_path / "one-one.log"
    assert str(log) in str(error.value) and "no memory for KV" in log.read_text()


FAKE = ["--arms", "pdxfer", "--lens", "300,600", "--reps", "2", "--set", "engine.kind=fake"]


@pytest.mark.slow
def test_a_whole_run_with_engines_that_compute_nothing(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Router, two engines and proxy are started and taken down; bytes move; one JSON object is all of stdout."""
    argv = [*FAKE, "--quick", "--rate", "50", "--count", "4", "--model", str(model), "--out", str(tmp_path), "--json"]
    assert ttft.main(argv) == 0
    printed = json.loads(capfd.readouterr().out)
    measures = [(row["measure"], row["tokens"], row["count"]) for row in printed["results"]]
    assert measures == [("ttft", 300, 2), ("ttft", 600, 2), ("ttft at 50/s", None, 4)]
    assert printed["summary"]["exposed_fraction_600"] is not None
    assert all(row["kv_mib"] > 0 for row in printed["results"][:2])
    assert (tmp_path / "ttft.json").is_file()
    assert "all processes have left" in (tmp_path / "logs" / "pdxfer-pdxfer.log").read_text()


@pytest.mark.parametrize(("failing", "others"), [("one", []), ("nixl-pull", ["pdxfer"]), ("pdxfer", ["nixl-pull"])])
def test_an_arm_that_fails_costs_no_figures_of_others(
    failing: str,
    others: list[str],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What came before it is printed; after a peer that fails the run goes on, and says which did not finish."""

    async def measure(name: str, options: object, prompts: object, plan: object, measured: Measured) -> None:
        if name == failing:
            raise BenchError(f"{name}: an engine died")
        measured.answers[1000] = [answer(0.1)]

    monkeypatch.setattr(ttft, "_measure", measure)
    argv = ["--arms", "one,nixl-pull,pdxfer", "--lens", "1000", "--quick", "--model", str(model)]
    argv += ["--out", str(tmp_path), "--json"]
    if failing == "nixl-pull":
        assert ttft.main(argv) == 0
    else:
        with pytest.raises(BenchError, match="an engine died"):
            ttft.main(argv)
    said = capsys.readouterr().out
    if failing == "one":
        assert not said
        return
    printed = json.loads(said)
    assert [row["arm"] for row in printed["results"]] == ["one", *others]
    assert printed["summary"].get("did_not_finish") == ("nixl-pull" if failing == "nixl-pull" else None)
    assert printed == json.loads((tmp_path / "ttft.json").read_text())


@pytest.mark.slow
def test_sigterm_takes_the_engines_down(model: Path, tmp_path: Path) -> None:
    argv = [*FAKE, "--count", "9", "--rate", "0.001", "--quick", "--model", str(model), "--out", str(tmp_path)]
    code = "import sys; from pdxfer.bench.ttft import main; sys.exit(main(sys.argv[1:]))"
    run = subprocess.Popen([sys.executable, "-c", code, *argv], stderr=subprocess.PIPE, text=True)
    assert run.stderr is not None
    try:
        for line in run.stderr:
            if "600 tokens, median" in line:
                break
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 143
        assert "all processes have left" in (tmp_path / "logs" / "pdxfer-pdxfer.log").read_text()
    finally:
        run.kill()
        run.stderr.close()
