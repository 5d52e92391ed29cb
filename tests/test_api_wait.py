"""An engine is no member before its HTTP server answers."""

import ssl
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from launch_rig import free_ports
from router_kit import wait_until
from test_proxy_cluster import until

from pdxfer.router.api_wait import ApiWait
from pdxfer.router.server import RouterServer, RouterSettings
from pdxfer.testing.fake_engine import FakeEngine, FakeEngineSettings
from pdxfer.testing.fake_main import _parser, join
from pdxfer.wire.halves import WorkerReady
from pdxfer.wire.run_sockets import socket_path


def test_it_waits_for_an_answer_and_calls_once() -> None:
    [port] = free_ports(1)
    called = threading.Semaphore(0)
    wait = ApiWait(f"http://127.0.0.1:{port}", called.release)
    wait_until(lambda: wait.num_asked >= 2)
    assert not called.acquire(blocking=False)
    with HTTPServer(("127.0.0.1", port), _Answer) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        assert called.acquire(timeout=10)
        server.shutdown()
        serving.join()
    wait.close()
    assert not called.acquire(blocking=False)


def test_a_url_that_only_others_reach_delays_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    called = threading.Semaphore(0)
    wait = ApiWait("http://127.0.0.1:1", called.release, limit_s=0.0)
    assert called.acquire(timeout=10)
    wait.close()
    assert "http://127.0.0.1:1/health did not answer" in caplog.text


def test_after_close_nothing_is_called() -> None:
    called = threading.Semaphore(0)
    ApiWait("http://127.0.0.1:1", called.release).close()
    assert not called.acquire(blocking=False)


@pytest.mark.parametrize("status", [200, 404, 401])
def test_any_answer_but_a_servers_failure_counts(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A TLS server whose name we cannot check listens, too."""
    monkeypatch.setattr(_Answer, "status", status)
    called = threading.Semaphore(0)
    with HTTPServer(("127.0.0.1", 0), _Answer) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        wait = ApiWait(f"http://127.0.0.1:{server.server_port}", called.release)
        assert called.acquire(timeout=10)
        wait.close()
        server.shutdown()
        serving.join()


def test_a_refused_certificate_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from urllib.error import URLError
    from urllib.request import OpenerDirector

    def refuse(*_: object, **__: object) -> None:
        raise URLError(ssl.SSLCertVerificationError("self-signed"))

    monkeypatch.setattr(OpenerDirector, "open", refuse)
    called = threading.Semaphore(0)
    wait = ApiWait("https://127.0.0.1:1", called.release)
    assert called.acquire(timeout=10)
    wait.close()


async def test_an_engine_joins_when_its_http_server_listens() -> None:
    """Before, the router has its worker and waits for its scheduler half: no request can be sent there too early."""
    router = RouterServer(RouterSettings(bind="tcp://127.0.0.1:0", heartbeat_s=0.1, missed_heartbeats=50))
    router.start()
    [port] = free_ports(1)
    argv = ["--role", "both", "--engine-id", "e0", "--port", str(port), "--router", router.endpoint]
    member = join(_parser().parse_args(argv), f"http://127.0.0.1:{port}")
    try:
        await until(lambda: member._link.api is not None and member._link.api.num_asked >= 2)
        await until(lambda: [engine.state for engine in router.snapshot().engines] == ["joining"])
        assert router.snapshot().reasons and not router.snapshot().is_ready
        async with FakeEngine(FakeEngineSettings(engine_id="e0", port=port), member):
            await until(lambda: router.snapshot().is_ready)
    finally:
        await member.close()
        router.close()


@pytest.mark.slow
async def test_vllms_scheduler_half_joins_when_its_http_server_listens() -> None:
    """The connector's own member, without an engine: every rank is ready long before the API is."""
    from pdxfer.connector.member import EngineFacts, Member
    from pdxfer.connector.settings import ConnectorSettings
    from pdxfer.core.clock import SYSTEM_CLOCK

    router = RouterServer(RouterSettings(bind="tcp://127.0.0.1:0", heartbeat_s=0.1, missed_heartbeats=50))
    router.start()
    [port] = free_ports(1)
    settings = ConnectorSettings(
        role="decode", engine_id="d0", url=f"http://127.0.0.1:{port}", router=router.endpoint,
        halves_path=socket_path(f"api-wait-{port}"),
    )  # fmt: skip
    facts = EngineFacts(
        model="m", served_names=["m"], num_blocks=8, block_size=16, max_model_len=128, world_size=1,
        max_step_blocks=8, plans_ready_hits=False,
    )  # fmt: skip
    member = Member(settings, facts, SYSTEM_CLOCK)
    try:
        member._on_fact(WorkerReady(rank=0, fingerprint={}))
        await until(lambda: member._api is not None and member._api.num_asked >= 2)
        assert not router.snapshot().engines
        async with FakeEngine(FakeEngineSettings(engine_id="d0", port=port)):
            await until(lambda: [engine.engine_id for engine in router.snapshot().engines] == ["d0"])
    finally:
        member.close()
        router.close()


@pytest.mark.slow
async def test_a_scheduler_half_that_is_closed_asks_nobody() -> None:
    from pdxfer.connector.member import EngineFacts, Member
    from pdxfer.connector.settings import ConnectorSettings
    from pdxfer.core.clock import SYSTEM_CLOCK

    settings = ConnectorSettings(
        role="decode", engine_id="d0", url="http://127.0.0.1:1", router="tcp://127.0.0.1:1",
        halves_path=socket_path("api-wait-closed"),
    )  # fmt: skip
    facts = EngineFacts(
        model="m", served_names=["m"], num_blocks=8, block_size=16, max_model_len=128, world_size=1,
        max_step_blocks=8, plans_ready_hits=False,
    )  # fmt: skip
    member = Member(settings, facts, SYSTEM_CLOCK)
    member.close()
    member._on_fact(WorkerReady(rank=0, fingerprint={}))
    assert member._api is None


class _Answer(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass
