"""How a request ended, as the label of pdxfer_proxy_requests_total. Counted once a request, whatever happens."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pdxfer.core.clock import Clock
from pdxfer.metrics.catalog import MetricSet
from pdxfer.proxy.errors import ApiError
from pdxfer.proxy.stream import ClientGone, StreamBroken
from pdxfer.proxy.timeline import Entry

_BY_CODE = {
    "overloaded": "overloaded",
    "draining": "overloaded",
    "busy": "busy",
    "unreachable": "unreachable",
    "timeout": "timeout",
}


@contextmanager
def accounted(entry: Entry, metrics: MetricSet, clock: Clock) -> Iterator[None]:
    """Note the end and the outcome of `entry`; the block sets `entry.outcome` itself when it answers."""
    try:
        yield
    except ApiError as error:
        entry.outcome = of_error(error)
        raise
    except (ClientGone, asyncio.CancelledError):
        entry.outcome = "disconnected"
        raise
    except StreamBroken:
        entry.outcome = "broken"
        raise
    except Exception:
        entry.outcome = "internal"
        raise
    finally:
        entry.end = clock.wall()
        metrics.inc("pdxfer_proxy_requests_total", endpoint=entry.endpoint, mode=entry.mode, outcome=entry.outcome)


def of_error(error: ApiError) -> str:
    """Outcome of a refusal."""
    return _BY_CODE.get(error.code, of_status(error.status))


def of_status(status: int) -> str:
    """Outcome of a relayed answer."""
    if status < 400:
        return "ok"
    return "client_error" if status < 500 else "engine_error"
