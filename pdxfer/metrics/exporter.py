"""A MetricSet as the text that Prometheus scrapes. Each process serves it at /metrics with its own web stack."""

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from pdxfer.metrics.catalog import MetricSet

CONTENT_TYPE = CONTENT_TYPE_LATEST


def render(metrics: MetricSet) -> bytes:
    """All series of the process in the text format; send it with `CONTENT_TYPE`."""
    return generate_latest(metrics.registry)
