"""The prefill legs of one transfer: whatever ends one, the router hears of it. And a proxy that cannot begin."""

import asyncio
import gc

import pytest

from pdxfer.core.errors import ConfigError
from pdxfer.proxy.app import Proxy
from pdxfer.proxy.attempts import Attempts
from pdxfer.proxy.engine_http import LegError
from pdxfer.proxy.settings import ProxySettings
from pdxfer.testing.fake_pairer import FakePairer
from pdxfer.wire.messages import EngineRef

P0 = EngineRef(engine_id="p0", url="http://127.0.0.1:1")


@pytest.mark.parametrize("error", [LegError("connect", "refused"), KeyError("a bug")])
async def test_a_leg_that_fails_is_reported_whatever_the_error(error: Exception) -> None:
    """Decode would wait for its KV until the deadline."""
    failed: list[tuple[int, str]] = []
    has_failed = asyncio.Event()

    async def send(prefill: EngineRef) -> None:
        raise error

    def on_failed(epoch: int, why: LegError) -> None:
        failed.append((epoch, str(why)))
        has_failed.set()

    attempts = Attempts("t", send, on_failed)
    assert attempts.begin(1, P0)
    async with asyncio.timeout(10.0):
        await has_failed.wait()
    await attempts.close()
    assert [epoch for epoch, _ in failed] == [1]
    assert ("refused" if isinstance(error, LegError) else "bug in the proxy: KeyError: 'a bug'") in failed[0][1]


async def test_a_leg_that_is_replaced_or_closed_fails_nobody() -> None:
    """It is cut off by us; what is said about it would hurt the next one."""
    failed: list[int] = []
    running: list[str] = []

    async def send(prefill: EngineRef) -> None:
        running.append(prefill.engine_id)
        await asyncio.Event().wait()

    attempts = Attempts("t", send, lambda epoch, why: failed.append(epoch))
    for epoch in (1, 2):
        assert attempts.begin(epoch, P0)
        async with asyncio.timeout(10.0):
            while len(running) < epoch:
                await asyncio.sleep(0)
    assert not attempts.begin(2, P0)
    await attempts.close()
    assert not attempts.begin(3, P0) and not failed


async def test_a_proxy_whose_router_address_is_refused_leaves_nothing_open(caplog: pytest.LogCaptureFixture) -> None:
    """One line for the operator, and none of the event loop's about sessions that nobody closed."""

    class Refusing(FakePairer):
        async def start(self) -> None:
            raise ConfigError("'10.0.0.1' is no address of a router")

    proxy = Proxy(ProxySettings(router="10.0.0.1"), lambda on_message: Refusing(P0, P0))
    with pytest.raises(ConfigError, match="no address of a router"):
        await proxy.start()
    del proxy
    gc.collect()
    assert not caplog.records
