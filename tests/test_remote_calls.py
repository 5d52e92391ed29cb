"""A remote server's calls: one that is cancelled, or waits while the server is closed, leaves nothing behind."""

import asyncio
import threading

import pytest

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store.remote.errors import Reason, ServerError
from pdxfer.store.remote.server import Server
from pdxfer.store.remote.session import Session
from pdxfer.testing.tier_kit import until


class NoSession:
    """Calls of these tests do not use it."""

    def abort(self) -> None:
        pass

    close = abort


def server_of() -> Server:
    return Server("server", lambda end: NoSession(), sessions=1, failed=lambda reason: None)  # type: ignore[arg-type, return-value]


def soon() -> float:
    return SYSTEM_CLOCK.now() + 20.0


@pytest.mark.parametrize("turns", range(8))
async def test_a_result_is_the_callers_or_dropped_whenever_he_is_cancelled(turns: int) -> None:
    """Also in the very turn of the event loop in which it comes."""
    server, may_end, dropped = server_of(), threading.Event(), list[str]()

    def call(session: Session) -> str:
        may_end.wait()
        return "result"

    calling = asyncio.ensure_future(server.run(call, soon(), drop=dropped.append))
    await until(lambda: server._threads._work_queue.empty() and server._threads._threads, "the call to begin")
    may_end.set()
    server._threads.submit(int).result()  # runs after the call, in the only thread
    for _ in range(turns):
        await asyncio.sleep(0)
    calling.cancel()
    [said] = await asyncio.gather(calling, return_exceptions=True)
    if said != "result":
        assert isinstance(said, asyncio.CancelledError)
        await until(lambda: dropped == ["result"], "the result to be dropped")
    await server.close()


async def test_who_waits_for_a_connection_as_the_server_is_closed_is_told_so() -> None:
    """And the connection's place is given back."""
    server, may_end = server_of(), threading.Event()
    first = asyncio.ensure_future(server.run(lambda session: may_end.wait(), soon()))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(server.run(lambda session: True, soon()))
    await asyncio.sleep(0)
    await server.close()
    may_end.set()
    assert await first
    with pytest.raises(ServerError) as raised:
        await second
    assert raised.value.reason is Reason.UNREACHABLE and not server._free.locked()
