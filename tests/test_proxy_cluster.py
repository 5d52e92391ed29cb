"""The whole path on fakes: proxy, real router, fake engines whose real nodes move real bytes over tcp."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from pdxfer.metrics.catalog import STAGES
from pdxfer.proxy import readiness
from pdxfer.proxy.app import Proxy
from pdxfer.proxy.router_link import GRACE_S, RouterLink
from pdxfer.proxy.settings import ProxySettings
from pdxfer.router.server import RouterServer, RouterSettings
from pdxfer.testing.fake_engine import FakeEngine, FakeEngineSettings
from pdxfer.testing.fake_main import _parser, join
from pdxfer.testing.fake_member import FakeMember
from pdxfer.testing.fake_model import next_words

MODEL = "fake"
PROMPT = list(range(1000, 3500))
STREAM = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "stream": True}
ANSWER = "".join(next_words(PROMPT, 6))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class Engine:
    http: FakeEngine
    member: FakeMember


@asynccontextmanager
async def running_engine(role: str, engine_id: str, router: str, **flags: Any) -> AsyncIterator[Engine]:
    """A fake engine that is a member of the router's cluster."""
    argv = ["--role", role, "--engine-id", engine_id, "--port", str(free_port()), "--router", router]
    for name, value in ({"prefill-tokens-per-s": 100_000, "num-blocks": 1024} | flags).items():
        argv += [f"--{name}", str(value)]
    options = _parser().parse_args(argv)
    member = join(options, f"http://127.0.0.1:{options.port}")
    adapters = {name: f"/adapters/{name}" for name in options.lora}
    settings = FakeEngineSettings(engine_id=engine_id, port=options.port, max_model_len=10_000, adapters=adapters)
    try:
        async with FakeEngine(settings, member) as http:
            yield Engine(http, member)
    finally:
        await member.close()


@dataclass
class Cluster:
    router: RouterServer
    proxy: Proxy
    engines: dict[str, Engine]
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.proxy.port}"

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path) as response:
            return response.status, await response.json()

    async def ask(self, body: Any, request_id: str = "q", key: str = "") -> tuple[str, str]:
        """Text of one streamed completion, and its timeline header."""
        headers = {"X-Request-Id": request_id} | ({"Authorization": f"Bearer {key}"} if key else {})
        async with self.http.post(self.url + "/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            data = await response.read()
            return text_of(data), response.headers["x-pdxfer-timeline"]


def text_of(data: bytes) -> str:
    events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]
    assert not any("error" in event for event in events), data
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


async def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while True:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def cluster(
    roles: dict[str, str], *, missed_heartbeats: int = 20, api_keys: dict[str, str] | None = None, **flags: Any
) -> AsyncIterator[Cluster]:
    """Engines by id → role; ready when every pair can be had. Heartbeats may be late: the machine may be busy."""
    router = RouterServer(
        RouterSettings(bind="tcp://127.0.0.1:0", min_remote_tokens=64, missed_heartbeats=missed_heartbeats)
    )
    router.start()
    settings = ProxySettings(
        port=0, router=router.endpoint, drain_timeout_s=0.2, pair_timeout_s=5.0, api_keys=api_keys or {}
    )
    proxy = Proxy(
        settings,
        lambda on_message: RouterLink(
            endpoint=settings.router, proxy_id=settings.proxy_id, security=None, on_message=on_message
        ),
    )
    async with AsyncExitStack() as stack:
        stack.callback(router.close)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)))
        engines = {
            engine_id: await stack.enter_async_context(running_engine(role, engine_id, router.endpoint, **flags))
            for engine_id, role in roles.items()
        }
        await proxy.start()
        stack.push_async_callback(proxy.stop)
        c = Cluster(router, proxy, engines, http)

        num_pairs = list(roles.values()).count("prefill") * list(roles.values()).count("decode")

        async def ready() -> bool:
            return router.snapshot().num_pairs == num_pairs and (await c.get("/ready"))[0] == 200

        await until(ready)
        yield c
        for engine in engines.values():
            await until(lambda engine=engine: engine.member.is_idle)


async def test_an_adapter_is_paired_as_its_model_is() -> None:
    """The router knows engines by their models only; adapters are loaded behind its back."""
    async with cluster({"p0": "prefill", "d0": "decode"}, lora="sql") as c:
        text, header = await c.ask(STREAM | {"model": "sql"})
        assert text == ANSWER and header.startswith("mode=pair; ")


async def test_kv_moves_from_prefill_to_decode_and_the_timeline_is_whole() -> None:
    """Decode checks each byte, so a right answer in mode=pair with all bytes counted proves the data path."""
    async with cluster({"p0": "prefill", "d0": "decode"}) as c:
        text, header = await c.ask(STREAM, "q1")
        assert text == ANSWER
        assert header.startswith("mode=pair; ") and "ttft=" in header
        timeline: Any = {}

        async def complete() -> bool:  # a stamp may come after the first byte of so fast an engine
            nonlocal timeline
            _, timeline = await c.get("/v1/pdxfer/timeline/q1")
            return len(timeline["stages_ms"]) == len(STAGES) and timeline["transfer"]

        await until(complete)
        assert list(timeline["stages_ms"]) == list(STAGES)
        moved = timeline["transfer"]
        assert (moved["outcome"], moved["num_tokens"], moved["channel"]) == ("delivered", 2500, "tcp")
        assert moved["num_bytes"] == 157 * 4 * 16 * 256 and moved["num_units"] >= 10


async def test_many_prompts_at_once_all_arrive_right() -> None:
    async with cluster({"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}) as c:

        async def one(i: int) -> None:
            prompt = [i * 7 + k for k in range(65 + 37 * i)]
            text, header = await c.ask(STREAM | {"prompt": prompt}, f"q{i}")
            assert text == "".join(next_words(prompt, 6))
            assert header.startswith("mode=pair"), header

        await asyncio.gather(*(one(i) for i in range(24)))
        assert all(engine.http.counts.finished for engine in c.engines.values())


async def test_a_prefill_engine_that_refuses_costs_only_time() -> None:
    async with cluster({"p0": "prefill", "d0": "decode"}) as c:
        c.engines["p0"].http.faults.status = 500
        text, _ = await c.ask(STREAM, "q1")
        assert text == ANSWER

        async def unused() -> bool:
            _, timeline = await c.get("/v1/pdxfer/timeline/q1")
            return bool(timeline["transfer"] and timeline["transfer"]["outcome"] == "unused")

        await until(unused)


async def test_clients_that_leave_leave_nothing_behind() -> None:
    """Blocks and transfers return to the start, whatever the moment (checked as the cluster closes)."""
    flags = {"prefill-tokens-per-s": 20_000}
    async with cluster({"p0": "prefill", "d0": "decode"}, **flags) as c:
        for moment in range(8):
            request = asyncio.create_task(c.ask(STREAM | {"max_tokens": 2000}, f"q{moment}"))
            await asyncio.wait([request], timeout=0.02 * moment)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
        text, _ = await c.ask(STREAM)
        assert text == ANSWER


async def test_short_prompts_and_lists_are_decoded_alone() -> None:
    async with cluster({"p0": "prefill", "d0": "decode"}) as c:
        _, header = await c.ask(STREAM | {"prompt": [1, 2, 3]})
        assert header.startswith("mode=local; reason=short_prompt")
        _, header = await c.ask(STREAM | {"n": 2})
        assert header.startswith("mode=local; reason=n;")


async def test_a_cluster_that_pairs_only_long_prompts_is_ready_while_a_pair_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The probe of GET /ready is shorter than min_remote_tokens then; without a prefill engine it still is 503."""
    monkeypatch.setattr(readiness, "BELIEVE_S", 0.0)
    async with cluster({"p0": "prefill", "d0": "decode"}) as c:
        c.router.set_policy({"min_remote_tokens": 4096})
        assert await c.get("/ready") == (200, {"ready": True, "reasons": []})
        c.router.drain("p0", True)

        async def is_unready() -> bool:
            status, body = await c.get("/ready")
            return status == 503 and "no prefill engine is ready" in body["reasons"][0]

        await until(is_unready)


@pytest.mark.slow
async def test_a_router_that_dies_is_missed_only_briefly() -> None:
    """Requests go to the last decode engine within the grace, and then without any wait."""
    async with cluster({"p0": "prefill", "d0": "decode"}) as c:
        await c.ask(STREAM)
        c.router.close()
        async with asyncio.timeout(1.5 + GRACE_S + 10):
            text, header = await c.ask(STREAM)
        assert text == ANSWER and "reason=router_unreachable" in header
        async with asyncio.timeout(4):
            assert "reason=router_unreachable" in (await c.ask(STREAM))[1]


@pytest.mark.slow
async def test_a_router_that_comes_back_is_used_again() -> None:
    async with cluster({"p0": "prefill", "d0": "decode"}) as c:
        await c.ask(STREAM)
        endpoint = c.router.endpoint
        c.router.close()
        assert "reason=router_unreachable" in (await c.ask(STREAM))[1]
        again = RouterServer(RouterSettings(bind=endpoint, min_remote_tokens=64))
        again.start()
        try:

            async def paired() -> bool:
                return (await c.ask(STREAM))[1].startswith("mode=pair")

            await until(paired, timeout_s=20.0)
        finally:
            again.close()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_alone_is_not_ready(role: str) -> None:
    router = RouterServer(RouterSettings(bind="tcp://127.0.0.1:0"))
    router.start()
    try:
        async with running_engine(role, "e0", router.endpoint) as engine:
            await until(lambda: router.snapshot().engines)
            assert engine.member.is_idle
    finally:
        router.close()


async def test_kv_of_another_prompt_is_never_answered_from() -> None:
    """The fakes' check has teeth: wrong bytes, sent with a right digest, become an error and no text."""
    async with cluster({"p0": "prefill", "d0": "decode"}) as c:
        cache = c.engines["p0"].member.cache
        honest = cache.write
        cache.write = lambda blocks, tokens, first: honest(blocks, [t + 1 for t in tokens], first)  # type: ignore[method-assign]
        async with c.http.post(c.url + "/v1/completions", json=STREAM | {"stream": False}) as response:
            assert response.status == 500
            assert "does not hold this prompt's KV" in (await response.json())["error"]["message"]
