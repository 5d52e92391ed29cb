"""The router's process: router thread and management API together, until a signal ends them.

First SIGTERM or SIGINT: not ready, no new pairings, running transfers finish (bounded). Second: at once, and if
transfers were left, CutOffError.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn

from pdxfer.controller.board import Board
from pdxfer.controller.http_server import http_protocol
from pdxfer.controller.routes import make_app
from pdxfer.controller.settings import ControllerSettings
from pdxfer.core.descriptors import AcceptErrors
from pdxfer.core.errors import CutOffError, ListenError
from pdxfer.metrics.spans import Spans
from pdxfer.router.server import RouterServer
from pdxfer.router.settings import RouterSettings
from pdxfer.wire.keys import load_server_security

__all__ = ["ControllerSettings", "RouterSettings", "serve"]

log = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = 0.0005
"""The router's thread shares the interpreter with HTTP handlers; Python's default of 5 ms would be its latency."""
_POLL_S = 0.05

OnListening = Callable[[str, int], None]
"""Told the router's endpoint and the controller's port once both are bound."""


def serve(router: RouterSettings, controller: ControllerSettings, on_listening: OnListening | None = None) -> None:
    """Run both until SIGTERM or SIGINT. Blocks; main thread only. Raises ConfigError for bad keys, ListenError for
    taken ports, CutOffError if transfers were left."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    security = load_server_security(router.keys_dir) if router.keys_dir is not None else None
    spans = Spans("router", router.otlp_endpoint) if router.otlp_endpoint else None
    server = RouterServer(router, security, spans=spans)
    with contextlib.closing(_listen(controller)) as listener, contextlib.closing(server):
        server.start()
        port = listener.getsockname()[1]
        log.info("controller on http://%s:%d, token %s", controller.host, port, "on" if controller.token else "off")
        if on_listening is not None:
            on_listening(server.endpoint, port)
        num_left = asyncio.run(_serve_http(server, controller, listener))
    if spans is not None:
        spans.close()
    log.info("router stopped")
    if num_left:
        raise CutOffError(
            f"the router was stopped with {num_left} transfers running: a second signal came, or they had not ended "
            f"within {controller.drain_timeout_s:g} s (proxy.drain_timeout_s); the engines end them without it"
        )


class _HttpServer(uvicorn.Server):
    """uvicorn without signal handlers of its own: the process is ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve_http(router: RouterServer, settings: ControllerSettings, listener: socket.socket) -> int:
    """Until a signal. Returns how many transfers were left."""
    board = Board(router)
    board.start()
    http = _HttpServer(
        uvicorn.Config(
            make_app(router, settings, board), http=http_protocol(settings.client_stall_s), ws="none", lifespan="off",
            log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=2,
        )
    )  # fmt: skip
    asked, forced = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(AcceptErrors())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (forced if asked.is_set() else asked).set())
    serving = asyncio.create_task(http.serve([listener]))
    stopping = asyncio.create_task(asked.wait())
    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    num_left = await _drain(router, settings.drain_timeout_s, forced)
    stopping.cancel()
    await asyncio.to_thread(board.close)
    http.should_exit = True
    await serving
    return num_left


async def _drain(router: RouterServer, timeout_s: float, forced: asyncio.Event) -> int:
    """No new pairings; wait for the leases that run, a second signal, or the deadline. Returns how many are left."""
    router.stop_pairing()
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        num_leases = (await asyncio.to_thread(router.snapshot)).num_leases
        if num_leases == 0 or forced.is_set():
            return num_leases
        if asyncio.get_running_loop().time() >= deadline:
            log.warning("%d transfers had not ended %g s after the signal to stop", num_leases, timeout_s)
            return num_leases
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(forced.wait(), _POLL_S)


def _listen(settings: ControllerSettings) -> socket.socket:
    if settings.allow_insecure and not settings.token:
        log.warning("INSECURE: the controller listens on %s without a token.", settings.host)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=128)
    except OSError as error:
        raise ListenError(
            f"the controller cannot listen on {settings.host}:{settings.port}: {error.strerror}. "
            "Choose another port with controller.port, or stop what uses this one"
        ) from error
