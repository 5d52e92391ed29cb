"""More than the engines can do: what is too much is refused at once, what is taken is served, nobody pays for another.

Router's bounds by connection, the proxy's by tenant and by client, and the whole path at five times its capacity.
"""

import asyncio
import os
import resource
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import pytest
from proxy_rig import COMPLETION, rig
from router_kit import SmallEngine, make_pair, wait_until
from test_proxy_cluster import Engine, running_engine, until

from pdxfer.metrics.catalog import MetricSet
from pdxfer.proxy.admission import Admission
from pdxfer.proxy.app import Proxy
from pdxfer.proxy.errors import ApiError
from pdxfer.proxy.router_link import RouterLink
from pdxfer.proxy.settings import ProxySettings
from pdxfer.router.client import ProxyClient
from pdxfer.router.flood import Flood, Rate
from pdxfer.router.server import RouterServer, RouterSettings
from pdxfer.wire.messages import Heartbeat, Pairing
from pdxfer.wire.sockets import DealerSocket, new_route
from pdxfer.wire.version import encode

IS_FULL = os.environ.get("PDXFER_TIER") == "full"
RAMP_S, WINDOW_S = 1.0, 10.0 if IS_FULL else 3.0
"""A measurement begins after the one and lasts for the other."""

# ---- the router, by connection ---------------------------------------------------------------------------------------


def test_a_bucket_bounds_rate_and_burst() -> None:
    rate = Rate(10.0, now=0.0)
    assert [rate.take(0.0) for _ in range(12)] == [True] * 10 + [False] * 2
    assert [rate.take(0.25) for _ in range(3)] == [True, True, False]
    assert rate.take(100.0, cost=1000.0), "one message always fits a full bucket"
    assert not rate.take(101.0)


def test_big_messages_count_more_and_connections_do_not_share() -> None:
    flood = Flood(100.0)
    assert [flood.admits(b"a", 190 << 10, 0.0) for _ in range(3)] == [True, True, False]
    assert flood.admits(b"b", 10, 0.0)


def test_the_table_of_connections_is_bounded() -> None:
    flood = Flood(1.0)
    for number in range(20_000):
        assert flood.admits(str(number).encode(), 10, 0.0)
    assert len(flood) <= 8192


async def test_a_connection_that_floods_loses_messages_and_nobody_else_does() -> None:
    """A member and a stranger send without a pause: both are cut down and counted, a proxy's questions are answered."""
    settings = RouterSettings(bind="tcp://127.0.0.1:0", heartbeat_s=0.1, missed_heartbeats=50, message_rate=200.0)
    server = RouterServer(settings)
    server.start()
    engines = [SmallEngine(server.endpoint, "p0", "prefill"), SmallEngine(server.endpoint, "d0", "decode")]
    flooders = [DealerSocket(server.endpoint, new_route(who), None) for who in ("p9/sched", "proxy/loud")]
    proxy = ProxyClient(endpoint=server.endpoint, proxy_id="quiet", security=None, on_message=lambda message: None)
    beat = encode(Heartbeat(incarnation=1, wall=0.0))

    def burst() -> None:
        for flooder in flooders:
            flooder.wait(0.0, to_send=False)
            while flooder.receive() is not None:
                pass
            for _ in range(300):
                flooder.send(beat)
            flooder.send(b"\xff" * 100_000)

    try:
        await asyncio.to_thread(wait_until, lambda: server.snapshot().is_ready, 10.0, "router ready")
        await asyncio.to_thread(wait_until, lambda: all(flooder.can_send for flooder in flooders), 10.0, "connected")
        await proxy.start()
        for number in range(20):
            await asyncio.to_thread(burst)
            assert isinstance(await proxy.pair(make_pair(f"r{number}", 16 * 20), 5.0), Pairing)
        flooded = 20 * 2 * 301
        await asyncio.to_thread(
            wait_until, lambda: server.snapshot().refused["rate"] > flooded * 0.8, 10.0, "the flood is dropped"
        )
        assert server.snapshot().num_pairs == 1
    finally:
        await proxy.close()
        for one in (*flooders, *engines):
            one.close()
        server.close()


# ---- the proxy, by tenant and by client ------------------------------------------------------------------------------


def enter(admission: Admission, stack: AsyncExitStack, tenant: str) -> bool:
    try:
        stack.enter_context(admission.enter(tenant))
    except ApiError as error:
        assert error.status == 429 and error.retry_after_s > 0
        return False
    return True


@pytest.mark.parametrize("limit", [2, 8, 1024])
async def test_a_tenant_that_floods_leaves_places_for_others(limit: int) -> None:
    """One gets at most what is left over times four; two as much each; and whoever has none gets in."""
    async with AsyncExitStack() as stack:
        admission = Admission(limit, MetricSet("proxy"), num_tenants=3)
        loud = [sum(enter(admission, stack, tenant) for _ in range(limit)) for tenant in ("loud", "louder")]
        assert loud[0] < limit and loud[0] + loud[1] <= limit
        assert limit < 100 or admission.in_flight < limit and enter(admission, stack, "quiet")
    assert admission.in_flight == 0


async def test_a_single_tenant_may_use_it_all() -> None:
    async with AsyncExitStack() as stack:
        admission = Admission(8, MetricSet("proxy"))
        assert sum(enter(admission, stack, "") for _ in range(20)) == 8


@pytest.mark.slow
async def test_a_client_that_does_not_read_is_cut_off_and_its_kv_freed() -> None:
    """Long before the request's deadline: both legs end, the pairing is released, another client is not delayed."""
    async with rig(settings={"client_stall_s": 0.3}) as r:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", r.proxy.port))
            body = b'{"model": "fake", "prompt": "%s", "max_tokens": 120000, "stream": true}' % (b"words " * 300)
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            client.sendall(head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            await until(lambda: r.pairer.asked)
            status, _, _ = await r.post("/v1/completions", COMPLETION)
            assert status == 200
            await r.settled(timeout_s=20.0)
            await until(lambda: r.decode.counts.aborted == 1 and not r.decode.counts.running)
        assert len(r.pairer.pairings) == 2 and not r.prefill.counts.running
        assert sorted(one.transfer_id for one in r.pairer.sent) == sorted(one.transfer_id for one in r.pairer.pairings)


async def test_a_client_that_does_not_send_its_body_is_answered_408() -> None:
    async with rig(settings={"client_stall_s": 0.2}) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.proxy.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        async with asyncio.timeout(10.0):
            assert b" 408 " in await reader.readline()
            await r.settled()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


HALF = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Half: "
WHOLE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A byte each 20 ms, until the other side ends it."""
    with suppress(ConnectionError):
        while not reader.at_eof():
            writer.write(b"x")
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.02)


@pytest.mark.parametrize("drips", [False, True], ids=["", "drips"])
@pytest.mark.parametrize(
    ("before", "sends"),
    [(b"", b""), (b"", HALF), (WHOLE, HALF)],
    ids=["nothing", "half a head", "half a second head"],
)
async def test_a_client_that_does_not_end_its_head_is_cut_off(before: bytes, sends: bytes, drips: bool) -> None:
    """Also one that keeps sending. Between requests a connection may wait, as long as aiohttp's keep-alive."""
    async with rig(settings={"client_stall_s": 0.2}) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.proxy.port)
        async with asyncio.timeout(20.0):
            if before:
                writer.write(before)
                assert (await reader.readuntil(b"}")).endswith(b'{"status":"ok"}')
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(reader.read(1), 0.5)
            writer.write(sends)
            if drips:
                await drip(reader, writer)
            else:
                assert await reader.read() == b""
        assert await r.get("/health") == (200, {"status": "ok"})
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


# ---- the whole path --------------------------------------------------------------------------------------------------

PROMPT_TOKENS = 500
SLOTS = 4
"""Requests of that size that fit into decode's blocks."""
BLOCKS = SLOTS * (PROMPT_TOKENS // 16 + 3) + 2
KEYS = {"key-loud": "loud", "key-quiet": "quiet"}


@dataclass
class Small:
    """A pair whose capacity is a few requests at a time, each as long as its tokens take."""

    router: RouterServer
    proxy: Proxy
    engines: list[Engine]
    http: aiohttp.ClientSession
    seen: Counter[int] = field(default_factory=Counter)
    refused_without_retry_after: int = 0
    peak_in_flight: int = 0
    peak_queued: int = 0

    async def ask(self, number: int, tenant: str = "loud", tokens: int = PROMPT_TOKENS) -> tuple[int, float]:
        """Status and seconds of one completion."""
        prompt = [number * 7919 % 100_000 + n for n in range(tokens)]
        body = {"model": "fake", "prompt": prompt, "max_tokens": 6 + number * 5 % 9}
        start = asyncio.get_running_loop().time()
        async with self.http.post(
            f"http://127.0.0.1:{self.proxy.port}/v1/completions",
            json=body,
            headers={"Authorization": f"Bearer key-{tenant}"},
        ) as response:
            await response.read()
            self.seen[response.status] += 1
            if response.status != 200 and int(response.headers.get("Retry-After", 0)) < 1:
                self.refused_without_retry_after += 1
            return response.status, asyncio.get_running_loop().time() - start

    def look(self) -> None:
        """Note how much is inside."""
        self.peak_in_flight = max(self.peak_in_flight, int(self.proxy.metrics.value("pdxfer_proxy_in_flight_requests")))
        self.peak_queued = max(self.peak_queued, self.router.snapshot().num_queued)


@asynccontextmanager
async def small(*, max_in_flight: int, max_queue: int) -> AsyncIterator[Small]:
    router = RouterServer(
        RouterSettings(
            bind="tcp://127.0.0.1:0", min_remote_tokens=64, missed_heartbeats=40, max_queue=max_queue, max_bypasses=16
        )
    )
    router.start()
    settings = ProxySettings(
        port=0, router=router.endpoint, drain_timeout_s=0.2, pair_timeout_s=10.0, api_keys=KEYS,
        max_in_flight=max_in_flight, transfer_timeout_s=4.0,
    )  # fmt: skip
    proxy = Proxy(
        settings,
        lambda on_message: RouterLink(
            endpoint=settings.router, proxy_id=settings.proxy_id, security=None, on_message=on_message
        ),
    )
    async with AsyncExitStack() as stack:
        stack.callback(router.close)
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=30)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
        flags = {"heartbeat-s": 0.1, "num-blocks": BLOCKS, "max-model-len": PROMPT_TOKENS * 3}
        engines = [
            await stack.enter_async_context(running_engine(role, name, router.endpoint, **flags))
            for name, role in (("p0", "prefill"), ("d0", "decode"))
        ]
        engines[1].http.settings = replace(engines[1].http.settings, inter_token_s=0.025)
        await proxy.start()
        stack.push_async_callback(proxy.stop)
        await until(lambda: router.snapshot().num_pairs == 1)
        s = Small(router, proxy, engines, http)
        yield s
        await until(lambda: router.snapshot().num_leases == 0 and all(engine.member.is_idle for engine in engines))
        assert proxy.metrics.value("pdxfer_proxy_in_flight_requests") == 0


class Goodput:
    """Counts completions in a window that begins when everything is in full swing."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.start = self._loop.time()
        self.end = self.start + RAMP_S + WINDOW_S
        self.per_s = 0.0

    @property
    def is_over(self) -> bool:
        return self._loop.time() >= self.end

    def completed(self) -> None:
        if self.start + RAMP_S <= self._loop.time() < self.end:
            self.per_s += 1 / WINDOW_S


async def offer(s: Small, per_s: float) -> float:
    """Requests at a steady rate, never repeated. Completions per second."""
    goodput, running, number = Goodput(), set[asyncio.Task[None]](), 0

    async def one(number: int) -> None:
        status, _ = await s.ask(number)
        if status == 200:
            goodput.completed()

    while not goodput.is_over:
        task = asyncio.create_task(one(number))
        running.add(task)
        task.add_done_callback(running.discard)
        s.look()
        number += 1
        due = goodput.start + number / per_s
        await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
    await asyncio.gather(*running)
    return goodput.per_s


def resident_kib() -> int:
    """Memory of this process, everything of the test included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 10


async def peak(s: Small) -> float:
    """Completions per second when there is always one more waiting."""
    goodput = Goodput()

    async def client(number: int) -> None:
        while not goodput.is_over:
            status, _ = await s.ask(number)
            assert status == 200
            goodput.completed()
            number += 100

    await asyncio.gather(*(client(first) for first in range(SLOTS + 2)))
    return goodput.per_s


@pytest.mark.slow
@pytest.mark.parametrize(("max_in_flight", "max_queue", "refusal"), [(10, 64, 429), (256, 6, 503)])
async def test_at_five_times_its_capacity_it_serves_as_much_as_ever(
    max_in_flight: int, max_queue: int, refusal: int
) -> None:
    """What is too much is refused with Retry-After, the rest is served; nothing inside grows."""
    async with small(max_in_flight=max_in_flight, max_queue=max_queue) as s:
        best = await peak(s)
        assert s.seen.keys() == {200}
        memory = resident_kib()
        goodput = await offer(s, 5 * best)
        grown_kib = resident_kib() - memory
        print(f"goodput at 5x: {goodput / best:.2f} of peak; {dict(s.seen)}; grown {grown_kib} KiB")
        assert s.seen.keys() == {200, refusal} and s.seen[refusal] > s.seen[200]
        assert s.refused_without_retry_after == 0
        assert goodput >= (0.9 if IS_FULL else 0.8) * best  # a short window is uncertain by a tenth
        assert s.peak_in_flight <= max_in_flight and s.peak_queued <= max_queue
        assert grown_kib < 16 << 10


@pytest.mark.slow
async def test_a_flood_starves_neither_another_tenant_nor_a_big_request() -> None:
    """Each of the quiet tenant's requests is served, sooner than half of the flood; so is one that needs most of
    decode's blocks, while small ones keep coming."""
    async with small(max_in_flight=30, max_queue=64) as s:
        stop = False
        flood_s: list[float] = []

        async def flooder(first: int) -> None:
            number = first
            while not stop:
                status, seconds = await s.ask(number)
                number += 100
                if status == 200:
                    flood_s.append(seconds)
                else:
                    await asyncio.sleep(0.02)

        flood = [asyncio.create_task(flooder(number)) for number in range(40)]
        try:
            await until(lambda: s.seen[429])
            big = asyncio.create_task(s.ask(77, "quiet", PROMPT_TOKENS * 3 - 20))
            quiet_s = []
            for number in range(5000, 5000 + (40 if IS_FULL else 6)):
                status, seconds = await s.ask(number, "quiet")
                assert status == 200
                quiet_s.append(seconds)
            async with asyncio.timeout(20.0):
                assert (await big)[0] == 200
        finally:
            stop = True
            await asyncio.gather(*flood)
        print(f"quiet {max(quiet_s):.2f} s at most, flood {sorted(flood_s)[len(flood_s) // 2]:.2f} s in the middle")
        assert sorted(quiet_s)[len(quiet_s) // 2] < sorted(flood_s)[len(flood_s) // 2]
