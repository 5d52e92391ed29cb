"""An engine joins the router when its HTTP server answers: before, a request that is sent to it would fall back.

Used by the scheduler half (real and fake), which lives long before the API server listens.
"""

import http.client
import logging
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable

from pdxfer.core.clock import SYSTEM_CLOCK

log = logging.getLogger(__name__)

_INTERVAL_S = 0.1
_ASK_S = 2.0
LIMIT_S = 300.0
"""Then the engine joins all the same: its URL may be one that only others can reach."""


class ApiWait:
    """Asks `url`/health on a thread of its own until it answers, then calls `then` there, once. `close` ends it."""

    def __init__(self, url: str, then: Callable[[], None], *, limit_s: float = LIMIT_S) -> None:
        self._url, self._then, self._limit_s = url, then, limit_s
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._closing = threading.Event()
        self.num_asked = 0
        self._thread = threading.Thread(target=self._run, name="pdxfer-api-wait", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """`then` is not called any more once this has returned. Idempotent."""
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        end = SYSTEM_CLOCK.now() + self._limit_s
        while not self._answers():
            if SYSTEM_CLOCK.now() > end:
                log.warning(
                    "%s/health did not answer this process within %g s; joining the router nevertheless. If other "
                    "hosts cannot reach it either, set the engine's url", self._url, self._limit_s,
                )  # fmt: skip
                break
            if self._closing.wait(_INTERVAL_S):
                return
        if not self._closing.is_set():
            self._then()

    def _answers(self) -> bool:
        self.num_asked += 1
        try:
            with self._opener.open(f"{self._url}/health", timeout=_ASK_S):
                return True
        except urllib.error.HTTPError as error:
            error.close()
            return error.code < 500
        except (OSError, ValueError, http.client.HTTPException) as error:
            return isinstance(getattr(error, "reason", None), ssl.SSLError)
