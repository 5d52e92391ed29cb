"""The router over real sockets: joining, pairing, keys, garbage, restart."""

import asyncio
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
from router_kit import SmallEngine, make_pair, wait_until

from pdxfer.core.clock import SystemClock
from pdxfer.core.errors import ConfigError, ListenError, UnreachableError
from pdxfer.router.client import MemberClient, ProxyClient
from pdxfer.router.events import Received
from pdxfer.router.server import RouterServer, RouterSettings
from pdxfer.wire.keys import ClientSecurity, load_client_security, load_server_security, new_keys
from pdxfer.wire.messages import Drain, Ended, Grant, Heartbeat, Local, Message, Pairing, Release, Stamp, Started
from pdxfer.wire.version import MAX_MESSAGE_BYTES, PROTOCOL, encode

SETTINGS = RouterSettings(bind="tcp://127.0.0.1:*", heartbeat_s=0.1, missed_heartbeats=20, forget_s=5.0)
"""The machine may be busy: a heartbeat may be late."""


@contextmanager
def running(keys_dir: Path | None = None, settings: RouterSettings = SETTINGS) -> Iterator[RouterServer]:
    server = RouterServer(settings, load_server_security(keys_dir) if keys_dir else None)
    server.start()
    try:
        yield server
    finally:
        server.close()


@contextmanager
def pair_of_engines(server: RouterServer, security: ClientSecurity | None = None) -> Iterator[list[SmallEngine]]:
    engines = [
        SmallEngine(server.endpoint, "p0", "prefill", security),
        SmallEngine(server.endpoint, "d0", "decode", security),
    ]
    try:
        wait_until(lambda: server.snapshot().is_ready, what="router ready")
        yield engines
    finally:
        for engine in engines:
            engine.close()


@pytest.fixture
def keys_dir(tmp_path: Path) -> Path:
    new_keys(tmp_path / "keys")
    return tmp_path / "keys"


async def test_one_request_from_pair_to_ended_with_keys(keys_dir: Path) -> None:
    """Pairing, Started, Grant, Stamp and Ended reach whom they concern over encrypted sockets; the lease ends."""
    security = load_client_security(keys_dir)
    with running(keys_dir) as server, pair_of_engines(server, security) as (prefill, decode):
        notices: list[object] = []
        proxy = ProxyClient(endpoint=server.endpoint, proxy_id="x", security=security, on_message=notices.append)
        await proxy.start()
        pairing = await proxy.pair(make_pair("r1"), 5.0)
        assert isinstance(pairing, Pairing)
        assert (pairing.prefill.engine_id, pairing.decode.engine_id) == ("p0", "d0")
        transfer_id = pairing.transfer_id

        prefill.sched.client.send(Started(transfer_id=transfer_id, num_tokens=1000))
        await asyncio.to_thread(wait_until, lambda: decode.sched.of(Started))
        assert decode.sched.of(Started)[0].prefill_id == "p0"
        grant = Grant(
            transfer_id=transfer_id, epoch=1, decode_id="d0", decode_incarnation=1, first_block=0,
            block_ids=list(range(63)), num_tokens=1000, token_digest=b"d" * 32,
        )  # fmt: skip
        decode.sched.client.send(grant)
        await asyncio.to_thread(wait_until, lambda: prefill.worker.of(Grant) and prefill.sched.of(Grant))
        decode.sched.client.send(Stamp(transfer_id=transfer_id, stage="landed", wall=123.0))
        decode.sched.client.send(
            Ended(transfer_id=transfer_id, outcome="delivered", num_tokens=999, num_bytes=5, num_units=1, channel="tcp")
        )
        await asyncio.wait_for(_until(lambda: len(notices) == 2), 5.0)
        assert [type(notice) for notice in notices] == [Stamp, Ended]
        snapshot = server.snapshot()
        assert snapshot.num_leases == 0 and snapshot.ended == {"delivered": 1}
        await proxy.close()


async def _until(condition: "object") -> None:
    while not condition():  # type: ignore[operator]
        await asyncio.sleep(0.005)


async def test_a_late_answer_is_released_and_the_caller_hears_of_the_deadline() -> None:
    """A pairing that arrives after its caller gave up does not stay reserved: the router had not heard of it."""

    class Quiet(ProxyClient):
        def send(self, message: Message) -> bool:
            return message != Release(
                transfer_id="slow", reason="nobody waits for an answer any more"
            ) and super().send(message)

    with running() as server:
        proxy = Quiet(endpoint=server.endpoint, proxy_id="x", security=None, on_message=lambda _: None)
        await proxy.start()
        with pytest.raises(UnreachableError, match="did not answer"):
            await _pair_when_connected(proxy)
        engines = await asyncio.to_thread(
            lambda: [SmallEngine(server.endpoint, "p0", "prefill"), SmallEngine(server.endpoint, "d0", "decode")]
        )
        await _until(lambda: server.snapshot().answers.get("pairing", 0) + server.snapshot().answers.get("local", 0))
        await _until(lambda: server.snapshot().num_leases == 0)
        await proxy.close()
        for engine in engines:
            await asyncio.to_thread(engine.close)


@pytest.mark.parametrize("how", ["time is up", "the client left"])
async def test_a_question_that_nobody_asks_any_more_leaves_the_queue(how: str) -> None:
    """Or impatient clients fill it, and those who wait are told that it is full."""
    with running(settings=replace(SETTINGS, no_engine_wait_s=100.0)) as server:
        proxy = ProxyClient(endpoint=server.endpoint, proxy_id="x", security=None, on_message=lambda _: None)
        await proxy.start()
        await _until(lambda: proxy.connected)
        asked = asyncio.create_task(
            proxy.pair(make_pair("r1", deadline_s=90.0), 60.0 if how == "the client left" else 0.3)
        )
        await _until(lambda: server.snapshot().num_queued == 1 or asked.done())
        if how == "the client left":
            asked.cancel()
        await _until(lambda: server.snapshot().num_queued == 0)
        await asyncio.gather(asked, return_exceptions=True)
        await proxy.close()


async def _pair_when_connected(proxy: ProxyClient) -> None:
    await _until(lambda: proxy.connected)
    await proxy.pair(make_pair("slow", deadline_s=10.0), 0.05)


async def test_a_restarted_router_is_found_again(tmp_path: Path) -> None:
    """Members and proxy say hello to a new router on the same port, and a question asked meanwhile is answered."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings = RouterSettings(bind=f"tcp://127.0.0.1:{port}", heartbeat_s=0.1, missed_heartbeats=20)
    proxy = ProxyClient(endpoint=settings.bind, proxy_id="x", security=None, on_message=lambda _: None, heartbeat_s=0.1)
    with running(settings=settings) as server, pair_of_engines(server) as engines:
        await proxy.start()
        assert isinstance(await proxy.pair(make_pair("r1"), 5.0), Pairing)
        server.close()
        await _until(lambda: not proxy.connected)
        asked = asyncio.create_task(proxy.pair(make_pair("r2"), 10.0))
        with running(settings=settings) as second:
            assert isinstance(await asked, Pairing | Local)
            await asyncio.to_thread(wait_until, lambda: second.snapshot().is_ready)
            assert isinstance(await proxy.pair(make_pair("r3"), 5.0), Pairing)
            assert engines[0].sched.links[:2] == [True, False]
            await proxy.close()


async def test_a_notice_that_cannot_be_taken_does_not_end_the_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the next beat the router would take a living proxy for gone."""
    proxy = ProxyClient(endpoint="tcp://127.0.0.1:1", proxy_id="x", security=None, on_message=lambda _: None)
    await proxy.start()
    before = proxy._timer
    assert before is not None
    before.cancel()

    def fail() -> None:
        raise RuntimeError("a bug in a callback")

    with monkeypatch.context() as patch:
        patch.setattr(proxy, "_on_ready", fail)
        with pytest.raises(RuntimeError):
            proxy._beat()
    assert proxy._timer is not before and not proxy._timer.cancelled()
    await proxy.close()


def test_a_member_with_a_wrong_key_is_refused_and_counted(
    keys_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only keys in the router's directory are admitted; the others never exchange a message, and say why."""
    new_keys(tmp_path / "other")
    stranger = load_client_security(tmp_path / "other")
    impostor = ClientSecurity(
        server_key=load_client_security(keys_dir).server_key,
        public_key=stranger.public_key,
        secret_key=stranger.secret_key,
    )
    with running(keys_dir) as server:
        engine = SmallEngine(server.endpoint, "p0", "prefill", impostor)
        wait_until(lambda: server.snapshot().refused.get("handshake", 0) > 0)
        assert not engine.sched.client.connected and server.snapshot().engines == []
        wait_until(lambda: "refuses the connection: it does not know our keys" in caplog.text)
        engine.close()


async def test_a_member_without_a_key_is_refused(keys_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A plain connection to a router with keys gets nowhere; the engine's log and the proxy's say so, once each."""
    with running(keys_dir) as server:
        engine = SmallEngine(server.endpoint, "p0", "prefill", None)
        proxy = ProxyClient(
            endpoint=server.endpoint, proxy_id="x", security=None, on_message=lambda m: None, heartbeat_s=0.1
        )
        await proxy.start()
        complaint = f"the router at {server.endpoint} refuses the connection: it wants keys, and we have none"
        for name in ("p0/sched", "proxy x"):
            said = f"{name}: {complaint}"
            await asyncio.to_thread(wait_until, lambda: said in caplog.text)
            assert caplog.text.count(said) == 1
        assert server.snapshot().refused["handshake"] > 0 and not engine.sched.client.connected
        await proxy.close()
        engine.close()


def test_an_absent_router_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """A wrong address and a firewall look like this."""
    engine = SmallEngine("tcp://127.0.0.1:1", "p0", "prefill", None)
    wait_until(lambda: "p0/sched: no router answers at tcp://127.0.0.1:1" in caplog.text)
    engine.close()


def test_garbage_is_counted_and_the_router_lives(caplog: pytest.LogCaptureFixture) -> None:
    """Random bytes, wrong versions, extra frames, oversized frames and plain TCP noise leave a working router, and few
    lines in its log."""
    with running() as server, pair_of_engines(server):
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.set(zmq.LINGER, 0)
        dealer.connect(server.endpoint)
        ours, theirs = bytes([PROTOCOL]), bytes([PROTOCOL + 1, 1])
        for payload in (b"", b"\x00", ours, theirs, b"\xff" + os.urandom(100), ours + b"\x81" * 50):
            dealer.send(payload)
        dealer.send_multipart([b"a", b"b", b"c"])
        dealer.send(bytes(MAX_MESSAGE_BYTES + 1))
        wait_until(lambda: server.snapshot().refused.get("malformed", 0) == 8)
        assert 1 <= caplog.text.count("message dropped, from") < 8
        dealer.send(bytes(MAX_MESSAGE_BYTES + 100_000))
        with socket.create_connection(("127.0.0.1", int(server.endpoint.rpartition(":")[2]))) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert server.snapshot().is_ready
        # The oversized frame closed the connection: what is sent before our side notices is lost with it.
        wait_until(lambda: dealer.send(b"\x00again") or server.snapshot().refused["malformed"] > 8)
        assert server.snapshot().is_ready
        context.destroy(0)


def test_drain_reaches_the_engine_and_stops_pairing() -> None:
    """A drained decode engine is told, is not ready any more, and comes back with undrain."""
    with running() as server, pair_of_engines(server) as (_, decode):
        server.drain("d0", True)
        wait_until(lambda: decode.sched.of(Drain))
        assert not server.snapshot().is_ready
        assert "engine d0 is draining" in server.snapshot().reasons
        server.drain("d0", False)
        wait_until(lambda: server.snapshot().is_ready)
        assert [event.kind for event in server.events()][-3:] == ["drain", "drained", "undrain"]


def test_a_silent_engine_is_suspect_and_then_back() -> None:
    """An engine whose worker is gone is out of the pairings after three heartbeats."""
    settings = RouterSettings(bind="tcp://127.0.0.1:*", heartbeat_s=0.1)
    with running(settings=settings) as server, pair_of_engines(server) as (prefill, _):
        prefill.worker.client.close()
        wait_until(lambda: any(e.engine_id == "p0" and e.state == "suspect" for e in server.snapshot().engines))
        assert not server.snapshot().is_ready


def test_a_port_in_use_is_one_clear_error() -> None:
    """Two routers on one port: the second says which address and what to do."""
    with running() as server:
        with pytest.raises(ListenError, match="cannot listen on .*router.port"):
            RouterServer(RouterSettings(bind=server.endpoint)).start()


def test_a_public_bind_without_keys_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Beyond loopback keys are needed; the override works and is loud."""
    with pytest.raises(ConfigError, match="pdxfer keys new"):
        RouterServer(RouterSettings(bind="tcp://0.0.0.0:*")).start()
    with running(settings=RouterSettings(bind="tcp://0.0.0.0:*", allow_insecure=True)):
        assert "INSECURE" in caplog.text


def test_send_while_offline_keeps_messages_and_bounds_them() -> None:
    """A member without a router queues up to a bound, then counts what it drops."""
    engine = SmallEngine("tcp://127.0.0.1:9", "p0", "prefill")
    client = engine.sched.client
    results = [client.send(Release(transfer_id="t", reason="")) for _ in range(16400)]
    assert results[0] and not results[-1] and client.num_dropped == results.count(False)
    engine.close()


def test_a_member_without_a_router_waits_and_does_not_spin() -> None:
    """Seen once: the overdue heartbeat made every wait return at once, and an orphaned engine burnt a core."""

    class CountingClock(SystemClock):
        num_reads = 0

        def now(self) -> float:
            self.num_reads += 1
            return super().now()

    clock = CountingClock()
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    client = MemberClient(
        endpoint=endpoint,
        identity="e0/sched",
        security=None,
        hello=list,
        beat=lambda: Heartbeat(incarnation=1, wall=0.0),
        on_message=lambda message: None,
        on_link=lambda up: None,
        heartbeat_s=0.05,
        clock=clock,
    )
    try:
        threading.Event().wait(0.5)
        assert clock.num_reads < 500
    finally:
        client.close()


def test_a_question_is_answered_before_the_heartbeats_that_came_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """All members may beat at once. Each beat is answered once nothing else waits; a member's order is kept."""
    server = RouterServer(SETTINGS)
    beat = encode(Heartbeat(incarnation=1, wall=1.0, free_blocks=1))
    waiting = deque([(b"e%d/sched#1" % i, beat) for i in range(20)])
    waiting.append((b"proxy/x#1", encode(make_pair("r1"))))
    waiting.append((b"e3/sched#1", encode(Started(transfer_id="t", num_tokens=1))))
    handled: list[tuple[bytes, str]] = []

    def handle(event: Received) -> None:
        handled.append((event.route, type(event.message).__name__))

    class Waiting:
        def receive(self) -> tuple[bytes, bytes] | None:
            return waiting.popleft() if waiting else None

    monkeypatch.setattr(server, "_handle", handle)
    assert server._drain_socket(Waiting())  # type: ignore[arg-type]
    assert handled[0] == (b"proxy/x#1", "Pair")
    assert handled[1:3] == [(b"e3/sched#1", "Heartbeat"), (b"e3/sched#1", "Started")]
    others = [f"e{i}/sched#1".encode() for i in range(20) if i != 3]
    assert handled[3:] == [(route, "Heartbeat") for route in others]
