"""The relay: identical bytes, back-pressure, headers held for the timeline, and the timeline itself."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from proxy_rig import MODEL, Rig, rig

from pdxfer.metrics.timeline import parse_header
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.wire.messages import Ended, EngineRef

STREAM = {"model": MODEL, "prompt": "words " * 300, "max_tokens": 8, "stream": True}
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def scripted_decode(r: Rig, handler: Handler) -> Any:
    """Replace the decode engine by one that speaks raw HTTP."""
    await r.get("/v1/models")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            await handler(reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        r.pairer.decode = EngineRef(engine_id="raw", url=f"http://127.0.0.1:{port}")
        yield


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n\r\n"


async def test_the_stream_is_relayed_byte_for_byte() -> None:
    """Odd cuts, comments, CRLF, text that is no JSON: nothing is touched."""
    parts = [
        b"da",
        b'ta: {"a": 1}\n',
        b"\n: ping\r\n\r\ndata: \xf0\x9f",
        b"\x98\x80\n\n",
        b"\x00" * 100_000,
        b"data: [DONE]",
    ]

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)

    async with rig() as r, scripted_decode(r, handler):
        async with r.http.post(r.url + "/v1/completions", json=STREAM) as response:
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert await response.read() == b"".join(parts)


async def test_pair_and_engine_alone_stream_the_same() -> None:
    async with rig() as r:
        async with r.http.post(r.url + "/v1/completions", json=STREAM, headers={"X-Request-Id": "a"}) as response:
            through_pair = await response.read()
        async with r.http.post(
            r.decode.url + "/v1/completions", json=STREAM, headers={"X-Request-Id": "a"}
        ) as response:
            alone = await response.read()

        def without_time(data: bytes) -> list[bytes]:
            return [line for line in data.replace(b'"created":', b"\n").split(b"\n") if b"choices" not in line]

        assert through_pair.count(b"data: ") == alone.count(b"data: ") == 9
        assert without_time(through_pair) == without_time(alone)


async def test_a_slow_client_stops_the_engine_instead_of_filling_memory() -> None:
    """Of a 64 MiB answer only what sockets and two small buffers hold leaves the engine while nobody reads."""
    sent = 0
    stalled = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(HEAD)
        for _ in range(1024):
            writer.write(b"x" * 65536)
            try:
                async with asyncio.timeout(0.5):
                    await writer.drain()
            except TimeoutError:
                stalled.set()
                return
            sent += 65536

    async with rig() as r, scripted_decode(r, handler):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            client.connect(("127.0.0.1", r.proxy.port))
            body = b'{"prompt": "hi", "stream": true}'
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            async with asyncio.timeout(10):
                await stalled.wait()
        assert sent < 32 << 20


async def test_headers_wait_for_the_first_byte_and_carry_the_whole_timeline() -> None:
    """Stages come from the engines' stamps; they add up to ttft; the JSON has everything."""
    clock = FakeClock()
    release = asyncio.Event()
    asked = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        asked.set()
        await release.wait()
        writer.write(b"data: {}\n\n")

    async with rig(clock=clock) as r, scripted_decode(r, handler):
        start = clock.wall()
        headers = {"X-Request-Id": "req-1"}
        request = asyncio.create_task(r.http.post(r.url + "/v1/completions", json=STREAM, headers=headers))
        await asked.wait()
        r.stamp(started=start + 0.010, prefilled=start + 0.110, landed=start + 0.115, scheduled=start + 0.117)
        transfer_id = r.pairer.pairings[-1].transfer_id
        r.pairer.on_message(
            Ended(
                transfer_id=transfer_id,
                outcome="delivered",
                num_tokens=300,
                num_bytes=12345,
                num_units=6,
                channel="tcp",
            )
        )
        clock.advance(0.150)
        release.set()
        async with await request as response:
            texts, stages = parse_header(response.headers["x-pdxfer-timeline"])
            await response.read()
        assert texts == {"mode": "pair"}
        expected = {
            "queue": 10,
            "prefill": 100,
            "exposed_transfer": 5,
            "decode_wait": 2,
            "first_decode": 33,
            "ttft": 150,
        }
        assert stages == pytest.approx(expected, abs=0.01)
        await r.settled()
        status, body = await r.get("/v1/pdxfer/timeline/req-1")
        assert status == 200 and body["stages_ms"] == pytest.approx(expected, abs=0.01)
        assert (body["mode"], body["prefill"], body["decode"], body["outcome"]) == ("pair", "p0", "raw", "ok")
        assert body["transfer"] == {
            "outcome": "delivered", "reason": "", "num_tokens": 300, "num_bytes": 12345, "num_units": 6,
            "channel": "tcp",
        }  # fmt: skip
        assert r.count("transfer_bytes_total") == 12345
        assert r.proxy.metrics.registry.get_sample_value(
            "pdxfer_proxy_stage_seconds_sum", {"mode": "pair", "stage": "prefill"}
        ) == pytest.approx(0.1)


async def test_headers_are_not_held_for_ever() -> None:
    """After timeline_hold_s they go out with what is known; the body follows when it comes."""
    release = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        await release.wait()
        writer.write(b"data: {}\n\n")

    async with rig(settings={"timeline_hold_s": 0.02}) as r, scripted_decode(r, handler):
        async with r.http.post(r.url + "/v1/completions", json=STREAM) as response:
            assert response.headers["x-pdxfer-timeline"] == "mode=pair"
            release.set()
            assert await response.read() == b"data: {}\n\n"


async def test_an_unknown_timeline_is_404_and_the_ring_is_bounded() -> None:
    async with rig(settings={"timeline_entries": 2}) as r:
        for name in ("a", "b", "c"):
            await r.post("/v1/completions", STREAM | {"stream": False}, {"X-Request-Id": name})
        assert [(await r.get(f"/v1/pdxfer/timeline/{name}"))[0] for name in ("a", "b", "c")] == [404, 200, 200]
