"""Spans that routers and engines make themselves, under the request's context that the proxy sent along.

    proxy: request ─┬─ router pair         router, asked → answered
                    ├─ engine prefill      prefill, first step → last
                    ├─ engine transfer     decode, granted → landed
                    ├─ engine wait         decode, landed → scheduled
                    └─ engine decode       decode, scheduled → over

Needs pip install pdxfer[otel]; made only where metrics.otlp_endpoint is set. Times are wall seconds of this process.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pdxfer.metrics.tracing import NS, load_opentelemetry, make_provider

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_MAX_TRANSFERS = 4096
"""Transfers followed at once; the oldest is forgotten."""
_ENDS = {
    "prefilled": ("engine prefill", "started"),
    "landed": ("engine transfer", "granted"),
    "scheduled": ("engine wait", "landed"),
}
"""Stage that ends a span → the span, and the stage that began it."""


class Spans:
    """Exports the spans of one process. A context that its sender did not sample makes none."""

    def __init__(self, where: str, endpoint: str, exporter: "SpanExporter | None" = None) -> None:
        """`where` names the process. Raises ConfigError if OpenTelemetry is not installed."""
        self._where = where
        self._trace: Any = load_opentelemetry(endpoint)
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._propagator: Any = TraceContextTextMapPropagator()
        self._provider: Any = make_provider(endpoint, 0.0, exporter, where)
        self._tracer: Any = self._provider.get_tracer("pdxfer")

    def add(self, traceparent: str, name: str, start: float, stop: float, attributes: Mapping[str, str]) -> None:
        """A span with both its ends known."""
        span = self._tracer.start_span(
            name,
            context=self._propagator.extract({"traceparent": traceparent}),
            start_time=int(start * NS),
            attributes={"pdxfer.where": self._where, **attributes},
        )
        span.end(end_time=int(max(start, stop) * NS))

    def close(self) -> None:
        """Send what waits, bounded in time."""
        self._provider.force_flush(2000)
        self._provider.shutdown()


class StageSpans:
    """An engine's spans, from the stages that it stamps. One thread."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._known: OrderedDict[str, tuple[str, dict[str, float]]] = OrderedDict()

    def begin(self, transfer_id: str, traceparent: str) -> None:
        """A leg of this transfer begins here; nothing is made of one without a context."""
        if traceparent:
            self._known[transfer_id] = (traceparent, {})
            while len(self._known) > _MAX_TRANSFERS:
                self._known.popitem(last=False)

    def stamp(self, transfer_id: str, stage: str, wall: float) -> None:
        """A stage was reached."""
        found = self._known.get(transfer_id)
        if found is None:
            return
        traceparent, stamps = found
        stamps[stage] = wall
        name, began = _ENDS.get(stage, ("", ""))
        if began in stamps:
            self._spans.add(traceparent, name, stamps[began], wall, {"pdxfer.transfer_id": transfer_id})
        if stage == "prefilled":
            del self._known[transfer_id]

    def over(self, transfer_id: str, wall: float) -> None:
        """Decode's request has ended."""
        traceparent, stamps = self._known.pop(transfer_id, ("", {}))
        if "scheduled" in stamps:
            attributes = {"pdxfer.transfer_id": transfer_id}
            self._spans.add(traceparent, "engine decode", stamps["scheduled"], wall, attributes)

    def close(self) -> None:
        """Send what waits."""
        self._spans.close()
