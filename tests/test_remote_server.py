"""Server: sessions lent to calls in threads; who gives a call up must not hurt the next one."""

import asyncio
import threading

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store.remote.errors import Reason, ServerError
from pdxfer.store.remote.server import Server, _Job
from pdxfer.testing.tier_kit import until


class FakeSession:
    """Counts what was done to it."""

    def __init__(self) -> None:
        self.num_aborts = self.num_closes = 0

    def ping(self, end: float) -> None: ...

    def abort(self) -> None:
        self.num_aborts += 1

    def close(self) -> None:
        self.num_closes += 1


def server_of(session: FakeSession) -> Server:
    return Server("fake", lambda end: session, sessions=1, failed=lambda reason: None)  # type: ignore[arg-type, return-value]


async def test_a_call_given_up_as_it_ends_does_not_abort_the_session_it_gave_back() -> None:
    """Its next user would find it broken, and the server would count as away."""
    session = FakeSession()
    server = server_of(session)
    job = _Job(server, lambda taken: "done", SYSTEM_CLOCK.now() + 10)
    assert job.run() == "done"
    job.abort()
    assert session.num_aborts == 0
    assert await server.run(lambda taken: "next", SYSTEM_CLOCK.now() + 10) == "next" and server.up
    await server.close()


async def test_a_call_given_up_while_it_runs_loses_its_session() -> None:
    session, running, go_on = FakeSession(), threading.Event(), threading.Event()

    def call(taken: object) -> None:
        running.set()
        go_on.wait(20)

    server = server_of(session)
    task = asyncio.ensure_future(server.run(call, SYSTEM_CLOCK.now() + 20))
    await asyncio.to_thread(running.wait, 20)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    go_on.set()
    await asyncio.to_thread(server._threads.shutdown, True)
    assert (session.num_aborts, session.num_closes) == (1, 1)
    await server.close()


async def test_a_server_is_looked_for_until_it_is_there_whatever_a_look_raises() -> None:
    """Nobody else would find it: a search that ended would make the tier useless until the engine's restart."""
    errors = [ServerError(Reason.UNREACHABLE, "away"), ServerError(Reason.UNREACHABLE, "still"), UnicodeError("host")]
    session, failures = FakeSession(), []

    def connect(end: float) -> FakeSession:
        if errors:
            raise errors.pop(0)
        return session

    server = Server("fake", connect, sessions=1, failed=failures.append)  # type: ignore[arg-type]
    await server.start(SYSTEM_CLOCK.now() + 10)
    assert not server.up and failures == [Reason.UNREACHABLE]
    await until(lambda: server.up, "the server to be found")
    assert not errors
    await server.close()
