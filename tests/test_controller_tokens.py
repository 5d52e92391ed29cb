"""Which engines serve a model or an adapter: all are asked at once."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pdxfer.controller.tokens import find_model
from pdxfer.router.snapshot import EngineView

NUM_ENGINES = 3
CARDS = {"data": [{"id": "sql", "root": "/adapters/sql", "parent": "demo"}]}


class Models(BaseHTTPRequestHandler):
    """/v1/models of an engine that answers only when all others have been asked, too."""

    all_asked = threading.Barrier(NUM_ENGINES, timeout=30.0)

    def do_GET(self) -> None:
        self.all_asked.wait()
        data = json.dumps(CARDS).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Models) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def engine(number: int, url: str) -> EngineView:
    return EngineView(
        engine_id=f"e{number}",
        incarnation=1,
        role="both",
        started_role="both",
        state="ready",
        url=url,
        model="demo",
        served_names=["demo"],
        num_ranks=1,
        silent_s=0.0,
        num_blocks=1,
        block_size=16,
        credit_blocks=0,
        reserved_blocks=0,
        outstanding_tokens=0,
        num_running=0,
        num_waiting=0,
        num_transfers=0,
        channels={},
    )


def test_engines_are_asked_for_their_adapters_at_once(url: str) -> None:
    """Each may stay silent until the timeout: one after another the client would wait for all of them in turn."""
    engines = [engine(number, url) for number in range(NUM_ENGINES)]
    assert find_model(engines, "", "sql") == (engines, "/adapters/sql")


def test_a_base_model_is_asked_of_nobody() -> None:
    """The router knows it."""
    known = engine(0, "http://nowhere.invalid")
    assert find_model([known], "", "demo") == ([known], "")
