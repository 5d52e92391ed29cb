"""Where our aiohttp servers log: a client's broken HTTP is the client's fault, told by 400, and no traceback of ours.

The proxy and the FakeEngine give `HTTP_LOG` to their runner. Our own failures keep their tracebacks.
"""

import logging

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import RequestPayloadError

_MAX_CHARS = 300


class _BadRequests(logging.Filter):
    """One line at DEBUG instead of a traceback at ERROR; anyone can send what is no HTTP."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            reason = line(error.message).replace("%", "%%")
            return _quiet(record, f"refused what is no HTTP request, from %s: {reason}")
        if isinstance(error, RequestPayloadError):
            return _quiet(record, f"a request's body could not be read to its end: {line(str(error))}")
        return True


def _quiet(record: logging.LogRecord, text: str) -> bool:
    record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    record.msg, record.exc_info = text, None
    return HTTP_LOG.isEnabledFor(logging.DEBUG)


def line(text: str) -> str:
    """What aiohttp says of broken HTTP, as one line of bounded length: it quotes what was sent, all of it."""
    whole = " ".join(text.split())
    return whole if len(whole) <= _MAX_CHARS else f"{whole[:_MAX_CHARS]}..."


HTTP_LOG = logging.getLogger("pdxfer.http")
HTTP_LOG.addFilter(_BadRequests())
