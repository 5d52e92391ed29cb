"""The prefill legs of one transfer: whatever ends one, the router hears of it, once and with its epoch."""

import asyncio

import pytest

from pdxfer.proxy.attempts import Attempts
from pdxfer.proxy.engine_http import LegError
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
