"""Where our aiohttp servers log: a client's broken HTTP is the client's fault, told by 400, and no traceback of ours.

The proxy and the FakeEngine give `HTTP_LOG` to their runner. Our own failures keep their tracebacks.
"""

import logging

from aiohttp.http_exceptions import HttpProcessingError


class _BadRequests(logging.Filter):
    """One line at DEBUG instead of a traceback at ERROR; anyone can send what is no HTTP."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
            record.msg = (
                f"refused what is no HTTP request, from %s: {' '.join(error.message.split()).replace('%', '%%')}"
            )
            record.exc_info = None
            return HTTP_LOG.isEnabledFor(logging.DEBUG)
        return True


HTTP_LOG = logging.getLogger("pdxfer.http")
HTTP_LOG.addFilter(_BadRequests())
