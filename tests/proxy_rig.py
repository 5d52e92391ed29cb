"""A proxy with a fake router and two fake engines, for the tests of the proxy."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from pdxfer.core.clock import SYSTEM_CLOCK, Clock
from pdxfer.proxy.app import Proxy
from pdxfer.proxy.pairer import OnMessage
from pdxfer.proxy.settings import ProxySettings
from pdxfer.testing.fake_engine import FakeEngine, FakeEngineSettings
from pdxfer.testing.fake_pairer import FakePairer
from pdxfer.wire.messages import EngineRef, Stamp

MODEL = "fake"
COMPLETION = {"model": MODEL, "prompt": "words " * 300, "max_tokens": 8}


@dataclass
class Rig:
    """Everything a test talks to."""

    proxy: Proxy
    pairer: FakePairer
    prefill: FakeEngine
    decode: FakeEngine
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.proxy.port}"

    async def post(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, Any], Mapping[str, str]]:
        """Status, JSON and headers of one request."""
        kind = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.http.post(self.url + path, headers=headers, **kind) as response:
            return response.status, await response.json(), response.headers

    async def settled(self, timeout_s: float = 20.0) -> None:
        """Wait until the proxy has accounted for every request: a client sees its answer a moment earlier."""
        async with asyncio.timeout(timeout_s):
            while self.count("in_flight_requests"):
                await asyncio.sleep(0)

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        async with self.http.get(self.url + path, headers=headers) as response:
            return response.status, await response.json()

    def stamp(self, **walls: float) -> None:
        """Have the router deliver these stamps for the last pairing."""
        for stage, wall in walls.items():
            transfer_id = self.pairer.pairings[-1].transfer_id
            self.pairer.on_message(Stamp(transfer_id=transfer_id, stage=stage, wall=wall))  # type: ignore[arg-type]

    def count(self, name: str, **labels: str) -> float:
        return self.proxy.metrics.value(f"pdxfer_proxy_{name}", **labels)


@asynccontextmanager
async def rig(
    *,
    settings: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> AsyncIterator[Rig]:
    """A running rig. `settings` for the proxy, `engine` for both engines."""
    async with (
        FakeEngine(FakeEngineSettings(engine_id="p0", **(engine or {}))) as prefill,
        FakeEngine(FakeEngineSettings(engine_id="d0", **(engine or {}))) as decode,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http,
    ):
        pairer = FakePairer(EngineRef(engine_id="p0", url=prefill.url), EngineRef(engine_id="d0", url=decode.url))

        def make_pairer(on_message: OnMessage) -> FakePairer:
            pairer.on_message = on_message
            return pairer

        proxy = Proxy(ProxySettings(**{"port": 0, "drain_timeout_s": 0.2, **(settings or {})}), make_pairer, clock)
        await proxy.start()
        try:
            yield Rig(proxy=proxy, pairer=pairer, prefill=prefill, decode=decode, http=http)
        finally:
            await proxy.stop()
