"""CPU of all metric, report and trace calls that one paired request makes: in proxy, router and both engines."""

import time

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pdxfer.controller.history import Requests
from pdxfer.controller.metrics import RouterMetrics
from pdxfer.metrics.catalog import MetricSet
from pdxfer.metrics.spans import Spans, StageSpans
from pdxfer.metrics.tracing import Facts, Tracer
from pdxfer.proxy.timeline import Entry
from pdxfer.router.events import Observed
from pdxfer.router.pair_spans import PairSpans
from pdxfer.wire.messages import EngineRef, Local, Pair, Served
from pdxfer.wire.version import Decoder, encode

FACTS = Facts(
    arrival=100.0, paired=100.01, first_byte=100.5, end=102.0, mode="pair", outcome="ok", request_id="r-1",
    transfer_id="t-1", prefill="p0", decode="d0", channel="tcp", num_bytes=10, num_tokens=5,
    stamps={"started": 100.05, "prefilled": 100.3, "granted": 100.06, "landed": 100.32, "scheduled": 100.35},
)  # fmt: skip


def cost_s(count: int = 300) -> float:
    """Seconds of CPU a request, with every request traced."""
    tracer = Tracer("", 1.0, InMemorySpanExporter())
    metrics, router, requests = MetricSet("proxy"), RouterMetrics(), Requests()
    spans = Spans("d0", "", InMemorySpanExporter())
    stages, pairs, engine = StageSpans(spans), PairSpans(spans), EngineRef(engine_id="d0", url="http://d0")
    decoder = Decoder(Served)
    start = time.process_time()
    for number in range(count):
        entry = Entry(request_id=f"r-{number}", tenant="", endpoint="chat", arrival=100.0, mode="pair", outcome="ok",
                      prefill="p0", decode="d0", transfer_id="t-1", first_byte=100.5, end=102.0, paired=100.01,
                      stamps=dict(FACTS.stamps))  # fmt: skip
        trace = tracer.begin({}, "chat", 100.0)
        context = trace.headers()["traceparent"]
        pairs.asked(b"x", Pair(request_id="r", num_tokens=5, deadline_s=1.0, traceparent=context), 100.0)
        pairs.answered((b"x",), Local(request_id="r", decode=engine, reason="short"), 100.01)
        for leg in (("started", "prefilled"), ("granted", "landed", "scheduled")):
            stages.begin("t-1", context)
            for stage in leg:
                stages.stamp("t-1", stage, FACTS.stamps[stage])
        stages.over("t-1", 102.0)
        metrics.set("pdxfer_proxy_in_flight_requests", 1)
        for stage, ms in entry.timeline().stages_ms().items():
            metrics.observe("pdxfer_proxy_stage_seconds", ms / 1000, mode="pair", stage=stage)
        entry.timeline().header()
        report = decoder.decode(encode(entry.served()))
        metrics.inc("pdxfer_proxy_transfers_total", outcome="delivered")
        metrics.inc("pdxfer_proxy_transfer_bytes_total", 1000)
        metrics.set("pdxfer_proxy_in_flight_requests", 0)
        metrics.inc("pdxfer_proxy_requests_total", endpoint="chat", mode="pair", outcome="ok")
        trace.end(entry.facts())
        router.on_router(Observed("", report))
        requests.add(report)
    spent = time.process_time() - start
    tracer.close()
    spans.close()
    return spent / count
