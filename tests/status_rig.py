"""A router with its controller, served over HTTP from a thread of the test's own process."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from pdxfer.client.api import ControllerClient
from pdxfer.controller.board import Board
from pdxfer.controller.routes import make_app
from pdxfer.controller.settings import ControllerSettings
from pdxfer.router.server import RouterServer, RouterSettings


@dataclass
class Site:
    """Where it can be asked."""

    router: RouterServer
    board: Board
    url: str

    def client(self, token: str = "") -> ControllerClient:
        return ControllerClient(self.url, token)


@contextmanager
def serving(token: str = "", port: int = 0, **router_settings: object) -> Iterator[Site]:
    """Everything that `pdxfer launch --role router` runs, without a process of its own."""
    settings = {"bind": "tcp://127.0.0.1:*", "heartbeat_s": 1.0, "missed_heartbeats": 10, **router_settings}
    router = RouterServer(RouterSettings(**settings))  # type: ignore[arg-type]
    router.start()
    board = Board(router)
    board.start()
    listener = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(
        make_app(router, ControllerSettings(token=token), board), http="h11", ws="none", lifespan="off",
        log_config=None, access_log=False, timeout_graceful_shutdown=2,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), name="site", daemon=True)
    thread.start()
    try:
        yield Site(router, board, f"http://127.0.0.1:{listener.getsockname()[1]}")
    finally:
        board.close()
        server.should_exit = True
        thread.join(10)
        router.close()
        listener.close()
