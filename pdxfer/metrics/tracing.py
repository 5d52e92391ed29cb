"""OpenTelemetry traces of requests (pip install pdxfer[otel]); imported only where metrics.otlp_endpoint is set.

One trace a request, opened when it arrives, so that both legs carry its context and the engines' own spans join it:

    request ─┬─ pair                          router
             ├─ prefill ── queue, compute     prefill engine
             └─ decode ─── transfer, wait, first token, stream

These spans are the proxy's view, with the times that the engines stamped, in the router's clock; router and engines
add spans of their own (spans.py). The client's traceparent is the parent, and its
sampling decision ours.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdxfer.core.errors import ConfigError
from pdxfer.core.install import pip_install

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

NS = 1_000_000_000
"""A second, as OpenTelemetry counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a request when it is over. Wall seconds; None where nothing was stamped."""

    arrival: float
    paired: float | None
    first_byte: float | None
    end: float
    stamps: Mapping[str, float]
    mode: str
    outcome: str
    request_id: str
    transfer_id: str
    prefill: str
    decode: str
    reason: str = ""
    channel: str = ""
    num_bytes: int = 0
    num_tokens: int = 0


class Tracer:
    """Makes the traces of one proxy. Spans leave in the background; one that cannot leave is dropped."""

    def __init__(self, endpoint: str, sample: float, exporter: "SpanExporter | None" = None) -> None:
        """Raises ConfigError if OpenTelemetry is not installed."""
        self._trace: Any = load_opentelemetry(endpoint)
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._propagator: Any = TraceContextTextMapPropagator()
        self._provider: Any = make_provider(endpoint, sample, exporter, "proxy")
        self._tracer: Any = self._provider.get_tracer("pdxfer")

    def begin(self, headers: Mapping[str, str], name: str, arrival: float) -> "Trace":
        """A request has arrived with these headers (names in lower case or as W3C writes them)."""
        carrier = {key.lower(): value for key, value in headers.items() if key.lower() in ("traceparent", "tracestate")}
        parent = self._propagator.extract(carrier)
        span = self._tracer.start_span(
            name, context=parent, kind=self._trace.SpanKind.SERVER, start_time=int(arrival * NS)
        )
        return Trace(self, span)

    def close(self) -> None:
        """Send what waits, bounded in time."""
        self._provider.force_flush(2000)
        self._provider.shutdown()


class Trace:
    """One request's trace while it runs."""

    def __init__(self, tracer: Tracer, span: Any) -> None:
        self._owner, self._span = tracer, span
        self._context = tracer._trace.set_span_in_context(span)

    def headers(self) -> dict[str, str]:
        """For both legs: their spans become children of ours."""
        carrier: dict[str, str] = {}
        self._owner._propagator.inject(carrier, context=self._context)
        return carrier

    def end(self, facts: Facts) -> None:
        """The request is over: add the spans of its stages, close the trace."""
        if not self._span.is_recording():
            return
        self._span.set_attributes(
            {
                "pdxfer.mode": facts.mode, "pdxfer.outcome": facts.outcome, "pdxfer.request_id": facts.request_id,
                "pdxfer.transfer_id": facts.transfer_id, "pdxfer.reason": facts.reason,
            }
        )  # fmt: skip
        if facts.outcome not in ("ok", "client_error"):
            self._span.set_status(self._owner._trace.StatusCode.ERROR, facts.reason or facts.outcome)
        stamps, end = facts.stamps, facts.end
        self._add("pair", "router", self._context, facts.arrival, facts.paired)
        prefilled, landed, scheduled = stamps.get("prefilled"), stamps.get("landed"), stamps.get("scheduled")
        if facts.prefill:
            leg = self._add("prefill", facts.prefill, self._context, facts.paired, prefilled)
            self._add("queue", facts.prefill, leg, facts.paired, stamps.get("started"))
            self._add("compute", facts.prefill, leg, stamps.get("started"), prefilled)
        leg = self._add("decode", facts.decode, self._context, facts.paired or facts.arrival, end)
        moved: dict[str, str | int] = {
            "pdxfer.bytes": facts.num_bytes,
            "pdxfer.tokens": facts.num_tokens,
            "pdxfer.channel": facts.channel,
        }
        self._add("transfer", facts.decode, leg, stamps.get("granted"), landed, moved)
        self._add("wait", facts.decode, leg, landed, scheduled)
        self._add("first token", facts.decode, leg, scheduled, facts.first_byte)
        self._add("stream", facts.decode, leg, facts.first_byte, end)
        self._span.end(end_time=int(end * NS))

    def _add(
        self, name: str, where: str, context: Any, start: float | None, stop: float | None,
        attributes: dict[str, str | int] | None = None,
    ) -> Any:  # fmt: skip
        """A span with both its ends known; returns the context for its children."""
        if start is None or stop is None or not where:
            return context
        span = self._owner._tracer.start_span(
            name, context=context, start_time=int(start * NS), attributes={"pdxfer.where": where, **(attributes or {})}
        )
        span.end(end_time=int(max(start, stop) * NS))
        return self._owner._trace.set_span_in_context(span)


def load_opentelemetry(endpoint: str) -> Any:
    """Its API. Raises ConfigError if it is not installed."""
    try:
        trace = importlib.import_module("opentelemetry.trace")
        importlib.import_module("opentelemetry.sdk.trace")
    except ImportError as error:
        raise ConfigError(
            f"metrics.otlp_endpoint is {endpoint}, but OpenTelemetry is not installed: {pip_install('otel')}, or "
            "leave the key empty"
        ) from error
    return trace


def make_provider(endpoint: str, sample: float, exporter: "SpanExporter | None", where: str) -> Any:
    """The parent's sampling decision counts; without a parent, `sample` of the traces are taken."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    resource = Resource.create({"service.name": "pdxfer", "service.instance.id": where})
    provider = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(sample)))
    provider.add_span_processor(BatchSpanProcessor(exporter or _exporter(endpoint)))
    return provider


def _exporter(endpoint: str) -> "SpanExporter":
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=5)
