"""Operations on the members' stores, by REST over a real router: parts, ends, cancelling, keys, bounds, tokenising."""

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from fastapi.testclient import TestClient
from msgspec.structs import replace
from router_kit import Half, SmallEngine, make_hello, make_worker_hello, wait_until

from pdxfer.controller import operations
from pdxfer.controller.access import MAX_BODY_BYTES
from pdxfer.controller.cache import VERBS
from pdxfer.controller.routes import make_app
from pdxfer.controller.settings import ControllerSettings
from pdxfer.router.client import ProxyClient
from pdxfer.router.server import RouterServer, RouterSettings
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.wire.manage import StoreOp, StoreOpCancel, StoreOpUpdate
from pdxfer.wire.messages import FromRouter, Heartbeat, TierReport

pytestmark = pytest.mark.slow


class StoreHalf(Half):
    """A worker half with a store that is asked by a script."""

    def __init__(self, endpoint: str, engine_id: str, incarnation: int = 1) -> None:
        self.ops: list[StoreOp] = []
        self.answer: Callable[[StoreOp], StoreOpUpdate | None] = lambda op: done(op)
        self.cancelled: list[str] = []
        hello = make_worker_hello(engine_id, incarnation=incarnation)
        super().__init__(endpoint, f"{engine_id}/w0", [hello], None, 0.05)

    def _beat(self) -> Heartbeat:
        return replace(super()._beat(), tiers=[TierReport(kind="dram", capacity_bytes=1 << 30)])

    def _on_message(self, message: FromRouter) -> None:
        if isinstance(message, StoreOp):
            self.ops.append(message)
            if (update := self.answer(message)) is not None:
                self.client.send(update)
        elif isinstance(message, StoreOpCancel):
            self.cancelled.append(message.op_id)
            self.client.send(StoreOpUpdate(op_id=message.op_id, rank=0, done=3, total=9, over=True, error="cancelled"))
        else:
            super()._on_message(message)


class StoreEngine:
    """One engine with a store."""

    def __init__(self, endpoint: str, engine_id: str, **changes: object) -> None:
        hello = make_hello(engine_id, "both", **changes)
        self.sched = Half(endpoint, f"{engine_id}/sched", [hello], None, 0.05)
        self.worker = StoreHalf(endpoint, engine_id, hello.incarnation)

    def close(self, goodbye: str = "") -> None:
        self.sched.client.close(goodbye)
        self.worker.client.close()


def done(op: StoreOp, **result: Any) -> StoreOpUpdate:
    return StoreOpUpdate(op_id=op.op_id, rank=0, done=2, total=2, over=True, result=json.dumps(result or {}).encode())


def nothing(op: StoreOp) -> None:
    return None


@pytest.fixture
def router() -> Iterator[RouterServer]:
    server = RouterServer(RouterSettings(bind="tcp://127.0.0.1:*", heartbeat_s=0.1, missed_heartbeats=20))
    server.start()
    yield server
    server.close()


@pytest.fixture
def engines(router: RouterServer) -> Iterator[list[StoreEngine]]:
    members = [StoreEngine(router.endpoint, "e0"), StoreEngine(router.endpoint, "e1")]
    wait_until(lambda: sum(bool(r.tiers) for e in router.snapshot().engines for r in e.ranks) == 2)
    yield members
    for member in members:
        member.close()


@contextmanager
def serving_loop() -> Iterator[Callable[[Coroutine[Any, Any, None]], None]]:
    """An event loop in a thread of its own; what it gives runs a coroutine there to its end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """The members of a test share its process."""
    yield
    logging.getLogger("pdxfer").setLevel(logging.NOTSET)


@pytest.fixture
def api(router: RouterServer, engines: list[StoreEngine]) -> TestClient:
    return TestClient(make_app(router, ControllerSettings()))


PROMPT = {"tokens": list(range(600))}


def test_an_operation_is_done_when_every_worker_says_so(api: TestClient, engines: list[StoreEngine]) -> None:
    """200, each worker's own result in its part; the arguments came through whole."""
    for number, engine in enumerate(engines):
        engine.worker.answer = lambda op, n=number: done(op, num_values=n)
    answer = api.post("/v1/cache/clear", json={**PROMPT, "salt": "s", "tier": "dram"})
    assert answer.status_code == 200 and answer.json()["state"] == "done"
    assert {p["engine_id"]: p["result"] for p in answer.json()["parts"]} == {
        "e0": {"num_values": 0}, "e1": {"num_values": 1}
    }  # fmt: skip
    [op] = engines[0].worker.ops
    assert (op.verb, op.args.tokens, op.args.salt, op.args.tier) == ("clear", PROMPT["tokens"], "s", "dram")


def test_partial_failure_is_told_by_node(api: TestClient, engines: list[StoreEngine]) -> None:
    """207 with the reason of the one that failed; 502 if all did."""
    fail = lambda op: StoreOpUpdate(op_id=op.op_id, rank=0, over=True, error="disk is away")  # noqa: E731
    engines[1].worker.answer = fail
    answer = api.post("/v1/cache/lookup", json=PROMPT)
    assert answer.status_code == 207 and answer.json()["state"] == "partial"
    assert [(p["engine_id"], p["state"], p["error"]) for p in answer.json()["parts"]] == [
        ("e0", "done", ""), ("e1", "failed", "disk is away")
    ]  # fmt: skip
    engines[0].worker.answer = fail
    assert api.post("/v1/cache/lookup", json=PROMPT).status_code == 502


def test_a_long_operation_is_202_then_found_by_its_id_with_progress(
    api: TestClient, engines: list[StoreEngine]
) -> None:
    """Location names it; waiting for it answers when it is over."""
    for engine in engines:
        engine.worker.answer = lambda op: StoreOpUpdate(op_id=op.op_id, rank=0, done=1, total=4)
    answer = api.post("/v1/cache/verify", json={"everything": True}, params={"wait_s": 0})
    assert answer.status_code == 202
    location = answer.headers["location"]
    wait_until(lambda: api.get(location).json()["done"] == 2)
    assert api.get(location).json()["total"] == 8
    waiting = threading.Timer(0.1, lambda: [e.worker.client.send(done(e.worker.ops[0])) for e in engines])
    waiting.start()
    over = api.get(location, params={"wait_s": 20})
    assert over.status_code == 200 and over.json()["state"] == "done" and over.json()["ended"]
    assert api.get("/v1/operations").json()[0]["id"] == over.json()["id"]


def test_cancel_reaches_the_workers_and_tells_how_far_they_were(api: TestClient, engines: list[StoreEngine]) -> None:
    """Idempotent; an operation that is over stays as it was."""
    for engine in engines:
        engine.worker.answer = nothing
    started = api.post("/v1/cache/verify", json={"everything": True}, params={"wait_s": 0}).json()
    over = api.post(f"/v1/operations/{started['id']}/cancel").json()
    assert over["state"] == "cancelled" and over["done"] == 6
    assert all(engine.worker.cancelled == [started["id"]] for engine in engines)
    assert api.post(f"/v1/operations/{started['id']}/cancel").json() == over
    assert api.post("/v1/operations/op-0/cancel").status_code == 404


def test_a_lost_engine_ends_its_part(api: TestClient, engines: list[StoreEngine]) -> None:
    """The other's result is not lost with it."""
    engines[1].worker.answer = nothing
    started = api.post("/v1/cache/copy", json={**PROMPT, "to_tier": "disk"}, params={"wait_s": 0}).json()
    engines[1].close("leaving")
    over = api.get(f"/v1/operations/{started['id']}", params={"wait_s": 20}).json()
    assert over["state"] == "partial"
    assert {p["engine_id"]: p["state"] for p in over["parts"]} == {"e0": "done", "e1": "lost"}


def test_the_same_key_is_the_same_operation(api: TestClient, engines: list[StoreEngine]) -> None:
    """A repeated request does nothing twice; the key with another request is refused."""
    key = {"Idempotency-Key": "k-1"}
    first = api.post("/v1/cache/clear", json=PROMPT, headers=key)
    again = api.post("/v1/cache/clear", json=PROMPT, headers=key)
    assert first.json() == again.json() and len(engines[0].worker.ops) == 1
    other = api.post("/v1/cache/clear", json={"everything": True}, headers=key)
    assert other.status_code == 422 and "k-1" in other.text
    assert api.post("/v1/cache/clear", json=PROMPT, headers={"Idempotency-Key": "k-2"}).json() != first.json()


def test_only_the_named_engines_are_asked(api: TestClient, engines: list[StoreEngine]) -> None:
    """And one that is not there is named."""
    api.post("/v1/cache/lookup", json={**PROMPT, "engines": ["e1"]})
    assert not engines[0].worker.ops and len(engines[1].worker.ops) == 1
    answer = api.post("/v1/cache/lookup", json={**PROMPT, "engines": ["nobody"]})
    assert answer.status_code == 409 and "nobody" in answer.text and "e0" in answer.text


def test_without_a_store_nothing_is_started(router: RouterServer) -> None:
    """409 that says what to set."""
    engine = SmallEngine(router.endpoint, "p0", "both")
    wait_until(lambda: router.snapshot().engines and router.snapshot().engines[0].state == "ready")
    answer = TestClient(make_app(router, ControllerSettings())).post("/v1/cache/lookup", json=PROMPT)
    assert answer.status_code == 409 and "--set store.enabled=true" in answer.text
    engine.close()


@pytest.mark.parametrize(
    ("verb", "body", "text"),
    [
        ("lookup", {}, "needs a prompt"),
        ("lookup", {"tokens": [1], "text": "x"}, "once"),
        ("clear", {}, "which values"),
        ("move", {"tokens": [1]}, "needs to_tier"),
        ("compress", {"tokens": [1], "tier": "dram"}, "needs a codec"),
        ("export", {"tokens": [1]}, "needs path"),
        ("pin", {"tokens": [-1]}, "tokens"),
        ("clear", {"tokenz": [1]}, "tokenz"),
        ("clear", {"everything": True, "deadline_s": 1e9}, "deadline_s"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(
    api: TestClient, verb: str, body: dict[str, Any], text: str
) -> None:
    """422 and nothing was asked of any engine."""
    answer = api.post(f"/v1/cache/{verb}", json=body)
    assert answer.status_code == 422 and text in answer.text


def test_operations_are_bounded(
    router: RouterServer, engines: list[StoreEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """429 when too many run; ended ones are forgotten, oldest first; bodies have a limit."""
    monkeypatch.setattr(operations, "MAX_RUNNING", 3)
    monkeypatch.setattr(operations, "MAX_KEPT", 4)
    api = TestClient(make_app(router, ControllerSettings()))
    for engine in engines:
        engine.worker.answer = nothing
    ids = [api.post("/v1/cache/lookup", json=PROMPT, params={"wait_s": 0}).json()["id"] for _ in range(3)]
    assert api.post("/v1/cache/lookup", json=PROMPT).status_code == 429
    for op_id in ids:
        api.post(f"/v1/operations/{op_id}/cancel")
    for engine in engines:
        engine.worker.answer = done
    for _ in range(3):
        api.post("/v1/cache/lookup", json=PROMPT)
    assert len(api.get("/v1/operations").json()) == 4
    assert api.get(f"/v1/operations/{ids[0]}").status_code == 404
    assert api.post("/v1/cache/lookup", content=b" " * (MAX_BODY_BYTES + 1)).status_code == 413


def test_a_silent_worker_expires_at_the_deadline(router: RouterServer, engines: list[StoreEngine]) -> None:
    """Nobody waits for ever."""
    clock = FakeClock()
    engines[0].worker.answer = nothing
    found = operations.Operations(router, clock)
    started = found.start("lookup", operations.StoreArgs(tokens=[1]), ("e0",), 5.0)
    clock.advance(5.5)
    assert found.get(started.id) is not None and not found.get(started.id).is_over  # type: ignore[union-attr]
    clock.advance(1.0)
    over = found.get(started.id)
    assert over is not None and over.state == "failed" and over.parts[0].state == "expired"


@pytest.mark.parametrize("result", [b"nonsense", b"[1]", b'{"a": ' * 5000])
def test_a_result_that_is_no_object_fails_the_part(api: TestClient, engines: list[StoreEngine], result: bytes) -> None:
    """Members are not trusted with the controller's health."""
    engines[0].worker.answer = lambda op: StoreOpUpdate(op_id=op.op_id, rank=0, over=True, result=result)
    answer = api.post("/v1/cache/lookup", json={**PROMPT, "engines": ["e0"]})
    assert answer.status_code == 502 and "JSON" in answer.json()["parts"][0]["error"]


class Tokenizer(BaseHTTPRequestHandler):
    """An engine's /tokenize."""

    asked: list[tuple[str, Any]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.headers.get("authorization", ""), body))
        status = 400 if body.get("prompt") == "refuse" else 200
        data = json.dumps({"tokens": [7, 8, 9], "count": 3}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        return


def test_text_and_chat_are_tokenised_by_an_engine(router: RouterServer) -> None:
    """With the cluster's token; a refused prompt is the client's error, an absent engine is not."""
    server = HTTPServer(("127.0.0.1", 0), Tokenizer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    engine = StoreEngine(router.endpoint, "e0", url=f"http://127.0.0.1:{server.server_port}")
    wait_until(lambda: any(r.tiers for e in router.snapshot().engines for r in e.ranks))
    headers = {"Authorization": "Bearer s3cret"}
    api = TestClient(make_app(router, ControllerSettings(token="s3cret")), headers=headers)
    assert api.post("/v1/cache/lookup", json={"text": "hello"}).status_code == 200
    chat = [{"role": "user", "content": "hello"}]
    assert api.post("/v1/cache/lookup", json={"messages": chat, "model": "demo"}).status_code == 200
    assert [op.args.tokens for op in engine.worker.ops] == [[7, 8, 9]] * 2
    assert Tokenizer.asked[0] == ("Bearer s3cret", {"model": "demo", "prompt": "hello", "add_special_tokens": True})
    assert Tokenizer.asked[1][1]["messages"] == chat
    assert api.post("/v1/cache/lookup", json={"text": "refuse"}).status_code == 422
    assert api.post("/v1/cache/lookup", json={"text": "x", "model": "other"}).status_code == 422
    server.shutdown()
    server.server_close()
    assert api.post("/v1/cache/lookup", json={"text": "hello"}).status_code == 503
    engine.close()


def test_all_verbs_need_the_token(router: RouterServer) -> None:
    """Locked like everything else."""
    api = TestClient(make_app(router, ControllerSettings(token="s3cret")))
    for verb in VERBS:
        assert api.post(f"/v1/cache/{verb}", json=PROMPT).status_code == 401
    assert api.get("/v1/operations").status_code == 401


def test_what_operators_change_is_so_afterwards(
    router: RouterServer, engines: list[StoreEngine], api: TestClient
) -> None:
    """Role, credit, policy, log level: the answer is the state after the change."""
    assert api.put("/v1/nodes/e0/role", json={"role": "prefill"}).json()["role"] == "prefill"
    assert not any(decode.engine_id == "e0" for decode, _ in router._state.cluster.pairs(""))
    assert api.put("/v1/nodes/e0/role", json={"role": "both"}).json()["role"] == "both"
    prefill = SmallEngine(router.endpoint, "p0", "prefill")
    wait_until(lambda: len(router.snapshot().engines) == 3)
    assert "started as prefill" in api.put("/v1/nodes/p0/role", json={"role": "decode"}).text
    assert api.put("/v1/nodes/e1/credit", json={"limit_blocks": 5}).json()["credit_blocks"] == 5
    assert api.put("/v1/nodes/e1/credit", json={"limit_blocks": None}).json()["credit_blocks"] == 1000
    assert api.put("/v1/nodes/e1/credit", json={"limit_blocks": 0}).json()["credit_blocks"] == 0
    events = api.get("/v1/events").json()["events"]
    limits = [event["detail"]["blocks"] for event in events if event["kind"] == "credit_limit"]
    assert limits == ["5", "none", "0"]
    api.put("/v1/nodes/e1/credit", json={"limit_blocks": None})
    assert api.patch("/v1/policy", json={"min_remote_tokens": 64, "max_queue": 7}).json()["max_queue"] == 7
    assert router._state.placement.queue.max_len == 7 and router._state.placement._settings.min_remote_tokens == 64
    policy = api.get("/v1/policy").text
    assert '"min_remote_tokens":64,' in policy and '"max_wait_s":120.0,' in policy
    assert '"max_queue":9,' in api.patch("/v1/policy", json={"max_queue": 9}).text
    assert api.patch("/v1/policy", json={"max_queue": 0, "lease_s": 5}).status_code == 422
    level = api.put("/v1/nodes/e0/log-level", json={"level": "DEBUG"})
    assert level.status_code == 200 and level.json()["ranks"][0]["log_level"] == "DEBUG"
    assert api.put("/v1/log-level", json={"level": "INFO"}).json() == {"level": "INFO"}
    proxy = ProxyClient(endpoint=router.endpoint, proxy_id="x1", security=None, on_message=print, heartbeat_s=0.1)
    with serving_loop() as run:
        run(proxy.start())
        wait_until(lambda: [p["proxy_id"] for p in api.get("/v1/proxies").json()["proxies"]] == ["x1"])
        changed = api.put("/v1/proxies/x1/log-level", json={"level": "WARNING"})
        assert changed.status_code == 200 and changed.json()["log_level"] == "WARNING"
        assert logging.getLogger("pdxfer").level == logging.WARNING
        run(proxy.close())
    assert api.put("/v1/proxies/nobody/log-level", json={"level": "INFO"}).status_code == 404
    assert "codec.wire" in api.put("/v1/nodes/e0/wire", json={"is_on": False}).text
    bodies = {"role": {"role": "both"}, "credit": {"limit_blocks": 1}, "log-level": {"level": "INFO"}}
    for path, body in (bodies | {"wire": {"is_on": True}}).items():
        assert api.put(f"/v1/nodes/nobody/{path}", json=body).status_code == 404
    prefill.close()


def test_health_is_by_worker(router: RouterServer, engines: list[StoreEngine], api: TestClient) -> None:
    """What a worker says of itself, and tiers and channels that are away."""
    assert api.get("/v1/health").json()["ok"] is True
    beat = engines[0].worker._beat
    away = TierReport(kind="redis", reachable=False)
    engines[0].worker._beat = lambda: replace(beat(), tiers=[away], problems=["arena: 3 blocks leaked"])  # type: ignore[method-assign]
    engines[0].worker.client._beat = engines[0].worker._beat

    def said() -> bool:
        [e0, e1] = api.get("/v1/health").json()["engines"]
        [rank] = e0["ranks"]
        told = (rank["problems"], rank["unreachable_tiers"]) == (["arena: 3 blocks leaked"], ["redis"])
        return bool(told and not e0["ok"] and e1["ok"])

    wait_until(said)
    assert api.get("/v1/health").json()["ok"] is False
