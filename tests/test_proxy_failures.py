"""Legs that fail, engines that die, clients that leave, deadlines that pass, and the drain."""

import asyncio
import json
import os
import signal
import time
from typing import Any

import aiohttp
import pytest
from proxy_rig import MODEL, Rig, rig

from pdxfer.core.errors import CutOffError
from pdxfer.proxy.app import run
from pdxfer.proxy.body import JsonObject
from pdxfer.proxy.errors import ApiError
from pdxfer.proxy.settings import ProxySettings
from pdxfer.testing.fake_engine import FakeEngine, FakeEngineSettings
from pdxfer.testing.fake_pairer import FakePairer
from pdxfer.wire.messages import EngineRef, LegFailed, Release

COMPLETION = {"model": MODEL, "prompt": "words " * 300, "max_tokens": 8}
STREAM = COMPLETION | {"stream": True}


async def until(condition: Any, timeout_s: float = 20.0) -> None:
    """Wait for a condition of the fakes."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


async def stream(r: Rig, body: Any) -> bytes:
    async with r.http.post(r.url + "/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.read()


# ---- prefill -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "kind"), [({"status": 500}, "status"), ({"status": 400}, "status"), ({"reset": True}, "reset")]
)
async def test_a_failing_prefill_leg_is_told_to_the_router_and_the_request_succeeds(
    fault: dict[str, Any], kind: str
) -> None:
    async with rig(engine={"inter_token_s": 0.01}) as r:
        for name, value in fault.items():
            setattr(r.prefill.faults, name, value)
        assert b"[DONE]" in await stream(r, STREAM)
        failed = await r.pairer.wait_for(LegFailed)
        assert isinstance(failed, LegFailed) and failed.leg == "prefill"
        assert failed.transfer_id == r.pairer.pairings[0].transfer_id
        assert r.count("leg_failures_total", leg="prefill", kind=kind) == 1
        assert r.count("retries_total") == 0


async def test_a_body_that_cannot_be_sent_on_releases_its_pairing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested so deep that it was just read, and cannot be written: found when the router has given the pairing."""

    def refuse(body: JsonObject) -> bytes:
        raise ApiError(400, "maximum recursion depth exceeded", code="invalid_json")

    monkeypatch.setattr("pdxfer.proxy.legs.encode", refuse)
    async with rig() as r:
        status, body, _ = await r.post("/v1/completions", COMPLETION)
        assert (status, body["error"]["code"]) == (400, "invalid_json")
        [pairing] = r.pairer.pairings
        [release] = r.pairer.sent
        assert isinstance(release, Release) and release.transfer_id == pairing.transfer_id
        assert not r.prefill.counts.seen and not r.decode.counts.seen


async def test_a_prefill_engine_that_is_not_there_is_told_to_the_router() -> None:
    async with rig(engine={"inter_token_s": 0.01}) as r:
        await r.prefill.stop()
        assert b"[DONE]" in await stream(r, STREAM)
        await r.pairer.wait_for(LegFailed)
        assert r.count("leg_failures_total", leg="prefill", kind="connect") == 1


async def test_a_prefill_that_hangs_fails_at_the_transfers_deadline() -> None:
    async with rig(settings={"transfer_timeout_s": 0.05}, engine={"inter_token_s": 0.05}) as r:
        r.prefill.faults.hang = True
        assert b"[DONE]" in await stream(r, STREAM)
        await r.pairer.wait_for(LegFailed)
        assert r.count("leg_failures_total", leg="prefill", kind="timeout") == 1


# ---- decode ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [{"status": 503}, {"reset": True}, {"break_after": 0}])
@pytest.mark.parametrize("body", [STREAM, STREAM | {"n": 2}], ids=["pair", "local"])
async def test_decode_failing_before_its_first_byte_is_retried_once(body: Any, fault: dict[str, Any]) -> None:
    """On a pairing of its own; the first one is released and prefill need not wait."""
    async with rig() as r:
        for name, value in (fault | {"num_times": 1}).items():
            setattr(r.decode.faults, name, value)
        assert b"[DONE]" in await stream(r, body)
        await r.settled()
        assert r.count("retries_total") == 1
        if "n" not in body:
            first, second = r.pairer.pairings
            assert first.transfer_id != second.transfer_id
            assert [type(m) for m in r.pairer.sent if m.transfer_id == first.transfer_id] == [LegFailed, Release]
            assert [type(m) for m in r.pairer.sent if m.transfer_id == second.transfer_id] == [Release]


async def test_the_retry_may_go_to_another_engine() -> None:
    async with rig() as r, FakeEngine(FakeEngineSettings(engine_id="d1")) as other:
        await r.get("/v1/models")
        await r.decode.stop()
        r.pairer.answers.append(r.pairer.pairing)
        r.pairer.answers.append(
            lambda ask: setattr(r.pairer, "decode", EngineRef(engine_id="d1", url=other.url)) or r.pairer.pairing(ask)
        )
        assert b"[DONE]" in await stream(r, STREAM)
        assert other.counts.finished == 1


async def test_decode_failing_twice_keeps_its_status_and_body() -> None:
    async with rig() as r:
        r.decode.faults.status = 507
        status, body, _ = await r.post("/v1/completions", COMPLETION)
        assert (status, body["error"]["message"]) == (507, "injected fault")
        await r.settled()
        assert r.count("requests_total", endpoint="completions", mode="pair", outcome="engine_error") == 1


async def test_no_decode_engine_at_all_is_502() -> None:
    async with rig() as r:
        await r.get("/v1/models")
        await r.decode.stop()
        status, body, headers = await r.post("/v1/completions", COMPLETION)
        assert status == 502 and body["error"]["code"] == "engine_unreachable" and headers["Retry-After"]
        assert len([m for m in r.pairer.sent if isinstance(m, Release)]) == 2


async def test_decode_failing_in_mid_stream_ends_it_with_an_error_event() -> None:
    """What came is relayed, then one error event, then a clean end; nothing is retried."""
    async with rig() as r:
        r.decode.faults.break_after = 3
        events = [e for e in (await stream(r, STREAM)).split(b"\n\n") if e]
        assert len(events) == 4
        for event in events[:3]:
            assert json.loads(event.removeprefix(b"data: "))["choices"]
        assert json.loads(events[3].removeprefix(b"data: "))["error"]["code"] == "engine_lost"
        await r.settled()
        assert r.count("retries_total") == 0
        assert r.count("requests_total", endpoint="completions", mode="pair", outcome="broken") == 1


async def test_a_broken_body_that_is_no_stream_cuts_the_clients_connection() -> None:
    """A truncated JSON must not look complete."""

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"id": ')
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(half, "127.0.0.1", 0)
    async with rig() as r, server:
        await r.get("/v1/models")
        port = server.sockets[0].getsockname()[1]
        r.pairer.decode = EngineRef(engine_id="d9", url=f"http://127.0.0.1:{port}")
        with pytest.raises(aiohttp.ClientError):
            await r.post("/v1/completions", COMPLETION)


# ---- deadlines ---------------------------------------------------------------------------------------------------


async def test_a_request_without_an_answer_in_time_is_504() -> None:
    async with rig(settings={"request_timeout_s": 0.1}) as r:
        await r.get("/v1/models")
        r.decode.faults.hang = True
        status, body, _ = await r.post("/v1/completions", COMPLETION)
        assert status == 504 and "proxy.request_timeout_s" in body["error"]["message"]
        await until(lambda: r.decode.counts.aborted == 1)
        await r.settled()
        assert r.count("requests_total", endpoint="completions", mode="pair", outcome="timeout") == 1


async def test_a_stream_that_outlives_its_deadline_ends_with_an_error_event() -> None:
    async with rig(settings={"request_timeout_s": 0.3}, engine={"inter_token_s": 0.02}) as r:
        data = await stream(r, STREAM | {"max_tokens": 1000})
        assert json.loads(data.rstrip().rsplit(b"\n\n", 1)[1].removeprefix(b"data: "))["error"]["code"] == "timeout"


# ---- clients that leave ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before the first byte", "in mid-stream"])
async def test_a_client_that_leaves_aborts_both_legs_within_a_second(when: str) -> None:
    async with rig(engine={"inter_token_s": 0.01}) as r:
        r.prefill.faults.hang = True
        r.decode.faults.hang = when == "before the first byte"
        async with aiohttp.ClientSession() as client:
            request = asyncio.create_task(client.post(r.url + "/v1/completions", json=STREAM | {"max_tokens": 100_000}))
            if when == "in mid-stream":
                await (await request).content.readany()
            else:
                await until(lambda: r.prefill.counts.running and r.decode.counts.running)
            left = time.monotonic()
            request.cancel()
        await until(lambda: r.prefill.counts.aborted == 1 and r.decode.counts.aborted == 1)
        assert time.monotonic() - left < (1.0 if os.environ.get("PDXFER_TIER") == "full" else 10.0)
        assert isinstance(await r.pairer.wait_for(Release), Release)
        await r.settled()
        assert r.count("requests_total", endpoint="completions", mode="pair", outcome="disconnected") == 1
        assert r.count("leg_failures_total", leg="prefill", kind="reset") == 0
        if when == "in mid-stream":
            request.result().close()  # or the collector may find its connection before it finds the response


# ---- leaving ourselves -------------------------------------------------------------------------------------------


async def test_a_drain_lets_running_requests_finish_and_refuses_new_ones() -> None:
    async with rig(settings={"drain_timeout_s": 5.0}, engine={"inter_token_s": 0.01}) as r:
        async with r.http.post(r.url + "/v1/completions", json=STREAM | {"max_tokens": 30}) as response:
            await response.content.readany()
            stopping = asyncio.create_task(r.proxy.stop())
            await until(lambda: "draining" in repr(r.proxy))
            with pytest.raises(aiohttp.ClientConnectorError):
                await r.get("/health")
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        await stopping


async def test_a_drain_is_bounded() -> None:
    async with rig(settings={"drain_timeout_s": 0.05}) as r:
        r.decode.faults.hang = True
        request = asyncio.create_task(r.post("/v1/completions", COMPLETION))
        await until(lambda: r.decode.counts.running)
        await r.proxy.stop()
        with pytest.raises(aiohttp.ClientError):
            await request
        assert isinstance(await r.pairer.wait_for(Release), Release)


async def test_sigterm_drains_and_a_second_one_forces() -> None:
    nowhere = EngineRef(engine_id="x", url="http://127.0.0.1:9")
    async with FakeEngine(FakeEngineSettings()) as decode, aiohttp.ClientSession() as http:
        decode.faults.hang = True
        port = free_port()
        pairer = FakePairer(nowhere, EngineRef(engine_id="d0", url=decode.url))
        serving = asyncio.create_task(run(ProxySettings(port=port, drain_timeout_s=60.0), lambda on_message: pairer))
        url = f"http://127.0.0.1:{port}"
        await until(lambda: not refused(port))
        request = asyncio.create_task(http.post(url + "/v1/completions", json=COMPLETION))
        await until(lambda: decode.counts.running)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: refused(port))
        assert not serving.done()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(20):
            with pytest.raises(CutOffError, match="1 requests running"):
                await serving
        await asyncio.gather(request, return_exceptions=True)


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def refused(port: int) -> bool:
    import socket

    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0
