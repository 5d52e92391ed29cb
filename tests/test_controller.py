"""The management API over a real router: readiness, nodes, drain, events, metrics, token, signals."""

import asyncio
import json
import logging
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient
from router_kit import SmallEngine, make_hello, wait_until
from uvicorn.server import ServerState

from pdxfer.controller.app import serve
from pdxfer.controller.http_server import http_protocol
from pdxfer.controller.routes import make_app
from pdxfer.controller.settings import ControllerSettings
from pdxfer.core.errors import ConfigError, ListenError
from pdxfer.router.server import RouterServer, RouterSettings

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
TOKEN = {"Authorization": "Bearer s3cret"}


@pytest.fixture
def router() -> Iterator[RouterServer]:
    server = RouterServer(RouterSettings(bind="tcp://127.0.0.1:*", heartbeat_s=0.1, missed_heartbeats=20))
    server.start()
    yield server
    server.close()


@pytest.fixture
def engines(router: RouterServer) -> Iterator[list[SmallEngine]]:
    members = [SmallEngine(router.endpoint, "p0", "prefill"), SmallEngine(router.endpoint, "d0", "decode")]
    wait_until(lambda: router.snapshot().is_ready)
    yield members
    for member in members:
        member.close()


def test_not_ready_says_what_is_missing(router: RouterServer) -> None:
    """503 and the reasons, while the process is alive."""
    api = TestClient(make_app(router, ControllerSettings()))
    assert api.get("/health").json() == {"status": "ok"}
    answer = api.get("/ready")
    assert answer.status_code == 503
    assert answer.json()["reasons"] == ["no prefill engine has said hello", "no decode engine has said hello"]


def test_mismatched_engines_are_not_ready_and_the_field_is_named(router: RouterServer) -> None:
    """Fail closed: the first differing field and both values are in the reasons."""
    prefill = SmallEngine(router.endpoint, "p0", "prefill")
    decode = SmallEngine(
        router.endpoint, "d0", "decode", fingerprint={**make_hello("d0", "decode").fingerprint, "dtype": "bfloat16"}
    )
    api = TestClient(make_app(router, ControllerSettings()))
    wait_until(lambda: "dtype" in api.get("/ready").text)
    answer = api.get("/ready")
    assert answer.status_code == 503 and "'float32' at p0 and 'bfloat16' at d0" in answer.text
    prefill.close()
    decode.close()


def test_nodes_events_and_metrics_show_the_engines(router: RouterServer, engines: list[SmallEngine]) -> None:
    """What the router knows can be read."""
    api = TestClient(make_app(router, ControllerSettings()))
    assert api.get("/ready").json() == {"ready": True, "reasons": []}
    nodes = {node["engine_id"]: node for node in api.get("/v1/nodes").json()["nodes"]}
    assert nodes["p0"]["state"] == "ready" and nodes["p0"]["channels"] == {"d0": "tcp"}
    assert nodes["d0"]["credit_blocks"] == 1000
    events = api.get("/v1/events").json()["events"]
    assert [event["kind"] for event in events] == ["joined", "joined"]
    assert api.get("/v1/events", params={"since": events[-1]["number"]}).json() == {"events": []}
    before_the_restart = api.get("/v1/events", params={"since": 500}).json()["events"]
    assert before_the_restart == events, "a reader that knows a former life's numbers must not miss this one's events"
    metrics = api.get("/metrics").text
    assert 'pdxfer_router_engines{role="decode",state="ready"} 1.0' in metrics
    assert "pdxfer_router_pairs 1.0" in metrics


def test_drain_and_undrain_answer_with_the_effect(router: RouterServer, engines: list[SmallEngine]) -> None:
    """The reply is the state after the change; an unknown engine is a 404 that says where to look."""
    api = TestClient(make_app(router, ControllerSettings()))
    assert api.post("/v1/nodes/d0/drain").json()["state"] == "draining"
    assert api.get("/ready").status_code == 503
    assert api.post("/v1/nodes/d0/undrain").json()["state"] == "ready"
    assert api.get("/ready").status_code == 200
    missing = api.post("/v1/nodes/nobody/drain")
    assert missing.status_code == 404 and "/v1/nodes" in missing.text


def test_half_a_character_is_refused_in_words(router: RouterServer) -> None:
    """JSON may name a lone surrogate, UTF-8 cannot: the refusal repeats it escaped."""
    api = TestClient(make_app(router, ControllerSettings()))
    answer = api.put("/v1/nodes/p0/role", content=b'{"model": "\\ud800"}', headers={"content-type": "application/json"})
    assert answer.status_code == 422 and answer.json()["detail"]


def test_with_a_token_only_health_and_ready_are_open(router: RouterServer) -> None:
    """Everything else answers 401 without it, documentation and unknown paths included."""
    api = TestClient(make_app(router, ControllerSettings(token="s3cret")))
    for path in ("/metrics", "/v1/nodes", "/v1/events", "/docs", "/openapi.json", "/nothing"):
        assert api.get(path).status_code == 401, path
        assert api.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert api.post("/v1/nodes/p0/drain").status_code == 401
    assert api.get("/health").status_code == 200 and api.get("/ready").status_code == 503
    assert api.get("/v1/nodes", headers={"Authorization": "Basic s3cret"}).status_code == 401
    assert api.get("/v1/nodes", headers=TOKEN).status_code == 200
    assert api.get("/v1/nodes", headers={"Authorization": "bearer s3cret"}).status_code == 200
    assert "/v1/nodes/{engine_id}/drain" in api.get("/openapi.json", headers=TOKEN).json()["paths"]
    assert api.get("/docs", headers=TOKEN).status_code == 200


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_body_that_is_too_large_is_413_however_it_comes(router: RouterServer, is_declared: bool) -> None:
    api = TestClient(make_app(router, ControllerSettings()))
    parts = [b'{"text": "', *[b"x" * (1 << 20)] * 17, b'"}']
    answer = api.post("/v1/cache/lookup", content=b"".join(parts) if is_declared else iter(parts))
    assert answer.status_code == 413 and "16 MiB" in answer.text
    assert api.get("/v1/nodes").status_code == 200


def test_a_public_controller_without_token_is_refused() -> None:
    """Closed by default; the token does not show in repr."""
    with pytest.raises(ConfigError, match="token_file"):
        ControllerSettings(host="0.0.0.0")
    assert "s3cret" not in repr(ControllerSettings(host="0.0.0.0", token="s3cret"))


def test_a_taken_port_is_one_clear_error(router: RouterServer) -> None:
    """The address and the setting are named."""
    port = int(router.endpoint.rpartition(":")[2])
    with pytest.raises(ListenError, match=f"127.0.0.1:{port}.*controller.port"):
        serve(RouterSettings(bind="tcp://127.0.0.1:*"), ControllerSettings(port=port))


SERVE = """
import json
from pdxfer.controller.app import ControllerSettings, RouterSettings, serve
serve(RouterSettings(bind="tcp://127.0.0.1:*"), ControllerSettings(port=0),
      lambda endpoint, port: print(json.dumps([endpoint, port]), flush=True))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_serves_until_a_signal_and_exits_cleanly(number: signal.Signals) -> None:
    """`serve` returns after SIGTERM or SIGINT: exit code 0."""
    process = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        _, port = json.loads(process.stdout.readline())
        wait_until(lambda: _get(f"http://127.0.0.1:{port}/health") == {"status": "ok"})
        process.send_signal(number)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def _answer(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """An application that reads the body first."""
    while (message := await receive()).get("more_body"):
        pass
    if message["type"] == "http.request":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.parametrize("before", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["first", "second request"])
@pytest.mark.parametrize(
    "sends",
    [b"", b"GET / HTTP/1.1\r\nX-Half: ", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{"],
    ids=["nothing", "half a head", "half a body"],
)
@pytest.mark.parametrize("drips", [False, True], ids=["", "drips"])
async def test_a_client_that_does_not_send_its_whole_request_is_cut_off(
    before: bytes, sends: bytes, drips: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A byte now and then is not enough."""
    loop = asyncio.get_running_loop()
    config = uvicorn.Config(_answer, http=http_protocol(0.3), lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    server = await loop.create_server(
        lambda: config.http_protocol_class(config=config, server_state=state, app_state={}),  # type: ignore[call-arg]
        "127.0.0.1",
        0,
    )
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    async with asyncio.timeout(20.0):
        if before:
            writer.write(before)
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.write(sends)
        with suppress(ConnectionError):
            while drips and sends and not reader.at_eof():
                writer.write(b"x")
                with suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(1), 0.02)
            assert await reader.read() == b""
    writer.close()
    server.close()
    await asyncio.gather(*state.tasks)
    assert not state.connections and not [one for one in caplog.records if one.levelno >= logging.WARNING]


def _get(url: str) -> object:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return json.load(answer)
    except OSError:
        return None


def test_the_openapi_page_needs_nothing_from_elsewhere(router: RouterServer) -> None:
    """/docs works without the internet: every reference is to this server, and is served; no validator is asked."""
    api = TestClient(make_app(router, ControllerSettings()))
    page = api.get("/docs").text
    references = re.findall(r"""(?:src|href)=["']([^"']+)""", page)
    assert len(references) >= 3 and "SwaggerUIBundle" in page and '"validatorUrl": null' in page
    assert "http" not in page
    for reference in references:
        assert reference.startswith("/") and api.get(reference).status_code == 200, reference
    style = next(api.get(reference).text for reference in references if reference.endswith(".css"))
    assert not re.search(r"@import|url\(\s*['\"]?(?:https?:)?//", style)
    assert api.get("/redoc").status_code == 404
