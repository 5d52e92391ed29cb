"""One trace from proxy through router, prefill, transfer and decode, with the times that were stamped; and its cost."""

import json
import logging
import subprocess
import sys
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from observe_cost import FACTS, cost_s
from proxy_rig import COMPLETION, rig
from test_proxy_cluster import running_engine, until

from pdxfer.core.logs import JsonFormatter
from pdxfer.metrics import tracing
from pdxfer.metrics.spans import Spans, StageSpans
from pdxfer.metrics.tracing import Facts, Tracer
from pdxfer.proxy.app import Proxy
from pdxfer.proxy.router_link import RouterLink
from pdxfer.proxy.settings import ProxySettings
from pdxfer.router.server import RouterServer, RouterSettings

memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def spans_of(facts: Facts, headers: dict[str, str], sample: float = 1.0) -> tuple[dict[str, Any], dict[str, str]]:
    exporter = memory.InMemorySpanExporter()
    tracer = Tracer("", sample, exporter)
    trace = tracer.begin(headers, "chat", facts.arrival)
    sent = trace.headers()
    trace.end(facts)
    tracer._provider.force_flush()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    tracer.close()
    return spans, sent


def seconds(span: Any) -> tuple[float, float]:
    return span.start_time / 1e9, span.end_time / 1e9


def test_one_trace_with_the_right_parents_and_times() -> None:
    """Prefill and decode hang under the request, their stages under them; the client's trace goes on."""
    spans, sent = spans_of(FACTS, {"traceparent": PARENT})
    assert {span.context.trace_id for span in spans.values()} == {0x0AF7651916CD43DD8448EB211C80319C}
    parents = {span.context.span_id: name for name, span in spans.items()}
    assert {name: parents.get(span.parent.span_id, "client") for name, span in spans.items()} == {
        "chat": "client", "pair": "chat", "prefill": "chat", "queue": "prefill", "compute": "prefill",
        "decode": "chat", "transfer": "decode", "wait": "decode", "first token": "decode", "stream": "decode",
    }  # fmt: skip
    assert seconds(spans["chat"]) == pytest.approx((100.0, 102.0))
    assert seconds(spans["compute"]) == pytest.approx((100.05, 100.3))
    assert seconds(spans["transfer"]) == pytest.approx((100.06, 100.32))
    assert spans["transfer"].attributes["pdxfer.bytes"] == 10
    assert spans["compute"].attributes["pdxfer.where"] == "p0"
    assert sent["traceparent"].split("-")[1:3] == [PARENT.split("-")[1], f"{spans['chat'].context.span_id:016x}"]


def test_what_was_not_stamped_has_no_span() -> None:
    """A local request, and one that failed before its first byte."""
    facts = Facts(arrival=1.0, paired=None, first_byte=None, end=2.0, stamps={}, mode="none", outcome="unreachable",
                  request_id="r", transfer_id="", prefill="", decode="", reason="no router")  # fmt: skip
    spans, _ = spans_of(facts, {})
    assert list(spans) == ["chat"] and spans["chat"].status.description == "no router"


def test_the_clients_sampling_decision_counts() -> None:
    """Not sampled there: nothing here, and the legs are told so."""
    spans, sent = spans_of(FACTS, {"traceparent": PARENT[:-2] + "00"})
    assert spans == {} and sent["traceparent"].endswith("-00")
    assert spans_of(FACTS, {}, sample=0.0)[0] == {}
    assert len(spans_of(FACTS, {"traceparent": PARENT}, sample=0.0)[0]) == 10


async def test_the_proxy_sends_its_trace_to_a_collector_and_its_context_to_both_legs() -> None:
    """OTLP over HTTP to a real socket."""
    received: list[bytes] = []

    async def collect(request: web.Request) -> web.Response:
        received.append(await request.read())
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with rig(settings={"otlp_endpoint": url}) as r:
            status, _, _ = await r.post("/v1/completions", COMPLETION, {"traceparent": PARENT})
            assert status == 200
            await r.settled()
            legs = [engine.counts.seen[-1].headers["traceparent"] for engine in (r.prefill, r.decode)]
            assert legs[0] == legs[1] != PARENT and PARENT.split("-")[1] in legs[0]
            assert r.pairer.served[-1].outcome == "ok"
        assert any(b"stream" in body and b"pair" in body for body in received)
    finally:
        await runner.cleanup()


async def test_one_trace_runs_through_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Router, prefill and decode make spans of their own, over real sockets, under the request's span of the proxy."""
    exporters: list[Any] = []

    def exporter(_: str) -> Any:
        exporters.append(memory.InMemorySpanExporter())
        return exporters[-1]

    monkeypatch.setattr(tracing, "_exporter", exporter)
    where = "http://collector"
    spans = Spans("router", where)
    settings = RouterSettings(bind="tcp://127.0.0.1:0", min_remote_tokens=64, missed_heartbeats=20)
    router = RouterServer(settings, spans=spans)
    router.start()
    proxy = Proxy(
        ProxySettings(port=0, otlp_endpoint=where),
        lambda on_message: RouterLink(endpoint=router.endpoint, proxy_id="x0", security=None, on_message=on_message),
    )
    flags = {"otlp-endpoint": where}
    try:
        async with (
            running_engine("prefill", "p0", router.endpoint, **flags),
            running_engine("decode", "d0", router.endpoint, **flags),
            aiohttp.ClientSession() as http,
        ):
            await proxy.start()
            await until(lambda: router.snapshot().is_ready and router.snapshot().num_proxies)
            url = f"http://127.0.0.1:{proxy.port}/v1/completions"
            body = {"model": "fake", "prompt": "word " * 300, "max_tokens": 3}
            async with http.post(url, json=body, headers={"traceparent": PARENT}) as answer:
                assert answer.status == 200 and "mode=pair" in answer.headers["x-pdxfer-timeline"]
            await proxy.stop()
    finally:
        await proxy.stop()
        router.close()
        spans.close()
    found = {span.name: span for one in exporters for span in one.get_finished_spans()}
    request = found["completions"]
    assert {span.context.trace_id for span in found.values()} == {request.context.trace_id}
    own = {name: span for name, span in found.items() if name.startswith(("router", "engine"))}
    assert {name: span.attributes["pdxfer.where"] for name, span in own.items()} == {
        "router pair": "router", "engine prefill": "p0",
        "engine transfer": "d0", "engine wait": "d0", "engine decode": "d0",
    }  # fmt: skip
    assert {span.parent.span_id for span in own.values()} == {request.context.span_id}
    assert len({span.attributes["pdxfer.transfer_id"] for span in own.values()}) == 1
    for span in own.values():
        assert request.start_time <= span.start_time <= span.end_time <= request.end_time + 10**9
    assert own["router pair"].attributes["pdxfer.answer"] == "pairing"


def test_a_context_that_is_none_makes_no_span() -> None:
    """Garbage, not sampled, or unknown: nothing, and nothing fails; what is followed is bounded."""
    exporter = memory.InMemorySpanExporter()
    stages = StageSpans(Spans("d0", "", exporter))
    for number, context in enumerate(["", "garbage", PARENT[:-2] + "00"]):
        stages.begin(f"t-{number}", context)
        for stage in ("granted", "landed", "scheduled"):
            stages.stamp(f"t-{number}", stage, 1.0)
        stages.over(f"t-{number}", 2.0)
    stages.stamp("nobody", "landed", 1.0)
    for number in range(5000):
        stages.begin(f"u-{number}", PARENT)
    assert len(stages._known) == 4096
    stages._spans._provider.force_flush()
    assert exporter.get_finished_spans() == ()
    stages.close()


@pytest.mark.slow
def test_nothing_of_opentelemetry_is_imported_without_an_endpoint() -> None:
    """The proxy's module alone does not need the extra."""
    code = (
        "import pdxfer.proxy.app, pdxfer.controller.app, pdxfer.testing.fake_main, sys;"
        "print(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "False", done.stderr


def test_json_logs_name_the_transfer() -> None:
    """As a field of its own, to search by."""
    record = logging.LogRecord("pdxfer.x", 30, "f", 1, "%s leg of %s failed", ("prefill", "t-0123456789abcdef"), None)
    assert json.loads(JsonFormatter().format(record))["transfer_id"] == "t-0123456789abcdef"
    record = logging.LogRecord("pdxfer.x", 30, "f", 1, "no transfer here", (), None)
    assert "transfer_id" not in json.loads(JsonFormatter().format(record))


def test_what_is_recorded_of_a_request_costs_little(capsys: pytest.CaptureFixture[str]) -> None:
    """tests/e2e/test_observe.py compares it with a real prefill; this is a bound that no machine should miss."""
    cost_ms = 1000 * cost_s()
    with capsys.disabled():
        print(f" {cost_ms:.3f} ms CPU a request ", end="")
    assert cost_ms < 5
