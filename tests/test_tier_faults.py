"""Remote tiers whose server is down, frozen, slow, cut off, killed, or forgets: always misses, in time, and back soon.

One set of promises for every kind, on its real server behind a proxy that misbehaves on demand.
"""

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import pytest
from servers.cloud import AzureServer, GcsServer, S3Server
from servers.kit import LARGE, get, opened, put, soon
from servers.memcached import MemcachedServer
from servers.process import ServerProcess
from servers.proxy import FaultyProxy
from servers.redis import RedisServer

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store.base import Outcome, Tier
from pdxfer.testing.tier_kit import key_of, until, value_of

pytestmark = pytest.mark.slow

T = TypeVar("T")
SHORT_S = 0.4
"""Deadline of calls that are expected to miss it."""
SLACK_S = 4.0
"""How much later than its deadline a call may be back on a busy machine."""
PATIENT_S = 6.0
"""Deadline of calls that must not use it."""
AT_ONCE_S = 2.0
BACK_S = 20.0
"""A server is found within 4 s of its return on a machine that has time for us."""


@dataclass
class Rig:
    """One kind of server, and the way to it through the proxy."""

    server: ServerProcess
    proxy: FaultyProxy
    url: str
    keeps: bool
    """Values survive a kill of the server."""

    def heal(self) -> None:
        """As it was."""
        self.proxy.set("pass")


def _redis(stack: ExitStack) -> Rig:
    server = stack.enter_context(RedisServer("valkey"))
    proxy = stack.enter_context(FaultyProxy(server.port))
    return Rig(server, proxy, f"redis://127.0.0.1:{proxy.port}", False)


def _memcached(stack: ExitStack) -> Rig:
    server = stack.enter_context(MemcachedServer())
    proxy = stack.enter_context(FaultyProxy(server.port))
    return Rig(server, proxy, f"memcached://127.0.0.1:{proxy.port}", False)


def _s3(stack: ExitStack) -> Rig:
    server = stack.enter_context(S3Server())
    proxy = stack.enter_context(FaultyProxy(server.port))
    return Rig(server, proxy, server.url(port=proxy.port), True)


def _gs(stack: ExitStack) -> Rig:
    server = stack.enter_context(GcsServer())
    proxy = stack.enter_context(FaultyProxy(server.port))
    return Rig(server, proxy, server.url(port=proxy.port), False)


def _az(stack: ExitStack) -> Rig:
    server = stack.enter_context(AzureServer())
    proxy = stack.enter_context(FaultyProxy(server.port))
    return Rig(server, proxy, server.url(port=proxy.port), False)


KINDS: dict[str, Callable[[ExitStack], Rig]] = {
    "redis": _redis,
    "memcached": _memcached,
    "s3": _s3,
    "gs": _gs,
    "az": _az,
}


@pytest.fixture(scope="module", params=KINDS)
def shared(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with ExitStack() as stack:
        yield KINDS[request.param](stack)


@pytest.fixture
def rig(shared: Rig) -> Iterator[Rig]:
    yield shared
    shared.heal()


async def timed(call: Awaitable[T]) -> tuple[T, float]:
    """Its result and how long it took."""
    begun = SYSTEM_CLOCK.now()
    result = await call
    return result, SYSTEM_CLOCK.now() - begun


def short() -> float:
    return SYSTEM_CLOCK.now() + SHORT_S


async def all_miss(tier: Tier, deadline_s: float, within_s: float) -> None:
    """Each kind of call says no, in time."""
    outcome, put_s = await timed(tier.put(key_of("new"), [value_of("new", LARGE)], SYSTEM_CLOCK.now() + deadline_s))
    lease, get_s = await timed(tier.get(key_of("k"), SYSTEM_CLOCK.now() + deadline_s))
    found, lookup_s = await timed(tier.lookup([key_of("k"), key_of("new")], SYSTEM_CLOCK.now() + deadline_s))
    deleted, delete_s = await timed(tier.delete([key_of("k")], SYSTEM_CLOCK.now() + deadline_s))
    assert outcome in (Outcome.LATE, Outcome.FAILED)
    assert (lease, found, deleted) == (None, [None, None], 0)
    assert max(put_s, get_s, lookup_s, delete_s) < within_s, (put_s, get_s, lookup_s, delete_s)


async def back(tier: Tier) -> None:
    """The tier works again, by itself: it keeps a value and gives it. Others may ask for too much meanwhile."""
    deadline = SYSTEM_CLOCK.now() + BACK_S
    name, got = random.random(), None
    while got is None:
        if await tier.put(key_of(name), [value_of(name, 1000)], soon()) in (Outcome.STORED, Outcome.ALREADY):
            got = await get(tier, name)
        assert SYSTEM_CLOCK.now() < deadline, f"not back after {BACK_S:g} s: {tier!r}"
        await asyncio.sleep(0.02)
    assert got == value_of(name, 1000)


async def test_a_server_that_is_down_costs_nothing_and_is_found_when_it_comes(rig: Rig) -> None:
    """Open is no error; calls answer at once; within 5 s of its start the tier works."""
    rig.proxy.set("cut")
    async with opened(rig.url) as tier:
        await until(lambda: not tier.stats().reachable, "the tier to see that nobody is there")
        await all_miss(tier, PATIENT_S, AT_ONCE_S)
        assert set(tier.stats().failures) <= {"unreachable", "timeout"}
        rig.heal()
        await back(tier)


async def test_a_frozen_server_costs_one_deadline_then_nothing(rig: Rig) -> None:
    async with opened(rig.url) as tier:
        await put(tier, "k", num_bytes=LARGE)
        rig.proxy.set("freeze")
        lease, took = await timed(tier.get(key_of("k"), short()))
        assert lease is None and took < SHORT_S + SLACK_S
        assert not tier.stats().reachable and "timeout" in tier.stats().failures
        await all_miss(tier, PATIENT_S, AT_ONCE_S)
        rig.heal()
        await back(tier)
        assert await get(tier, "k") == value_of("k", LARGE)
        assert await tier.delete([key_of("k"), key_of("new")], soon()) >= 1


async def test_a_server_at_1_kb_s_is_a_miss_by_the_deadline(rig: Rig) -> None:
    async with opened(rig.url) as tier:
        await put(tier, "k", num_bytes=LARGE)
        rig.proxy.set("slow")
        for _ in range(3):
            await all_miss(tier, SHORT_S, SHORT_S + SLACK_S)
        rig.heal()
        await back(tier)
        assert await tier.delete([key_of("k")], soon()) == 1
        await tier.delete([key_of("new")], soon())


@pytest.mark.parametrize("call", ["get", "put"])
async def test_a_connection_cut_in_mid_value_leaves_no_part_of_it(rig: Rig, call: str) -> None:
    """The value is whole or a miss, and can be stored and read afterwards."""
    async with opened(rig.url) as tier:
        if call == "get":
            await put(tier, "k", num_bytes=LARGE)
        rig.proxy.set("slow")
        value = [value_of("k", LARGE)]
        task = asyncio.ensure_future(
            tier.get(key_of("k"), soon()) if call == "get" else tier.put(key_of("k"), value, soon())
        )
        await asyncio.sleep(0.3)
        rig.proxy.set("cut")
        assert (await task) in (None, Outcome.FAILED, Outcome.LATE)
        rig.heal()
        await back(tier)
        if call == "put":
            assert await get(tier, "k") is None
            await put(tier, "k", num_bytes=LARGE)
        assert await get(tier, "k") == value_of("k", LARGE)
        assert await tier.delete([key_of("k")], soon()) == 1


RESTARTS = [pytest.param(kind, marks=pytest.mark.full) if kind == "s3" else kind for kind in KINDS]
"""SeaweedFS needs 20 s to start on its old data."""


@pytest.mark.parametrize("shared", RESTARTS, indirect=True)
async def test_killed_and_started_again_under_load(rig: Rig) -> None:
    """Tasks put, get and look up all the while; no call is late, nothing wrong is read, everything comes back."""
    late: list[float] = []

    async def use(tier: Tier, seed: int, stop: asyncio.Event) -> None:
        chance = random.Random(seed)
        while not stop.is_set():
            n = chance.randrange(20)
            begun, deadline = SYSTEM_CLOCK.now(), SYSTEM_CLOCK.now() + SHORT_S
            match chance.randrange(3):
                case 0:
                    await tier.put(key_of(n), [value_of(n, 30_000 * n)], deadline)
                case 1:
                    lease = await tier.get(key_of(n), deadline)
                    if lease is not None:
                        assert lease.view == value_of(n, 30_000 * n)
                        lease.release()
                case _:
                    await tier.lookup([key_of(n) for n in range(20)], deadline)
            took = SYSTEM_CLOCK.now() - begun
            late.append(took - SHORT_S)
            await asyncio.sleep(0.001)

    async with opened(rig.url) as tier:
        stop = asyncio.Event()
        users = [asyncio.ensure_future(use(tier, seed, stop)) for seed in range(4)]
        await asyncio.sleep(0.2)
        await asyncio.to_thread(rig.server.kill)
        await asyncio.sleep(0.2)
        await asyncio.to_thread(rig.server.start)
        await back(tier)
        stop.set()
        await asyncio.gather(*users)
        assert max(late) < SLACK_S
        await tier.delete([key_of(n) for n in range(20)], soon())


async def test_calls_that_are_cancelled_while_the_server_is_frozen_return_everything(rig: Rig) -> None:
    async with opened(rig.url) as tier:
        await put(tier, "k", num_bytes=LARGE)
        rig.proxy.set("freeze")
        calls = [tier.get(key_of("k"), soon()) for _ in range(6)]
        calls += [tier.put(key_of(n), [value_of("k", LARGE)], soon()) for n in range(6)]  # type: ignore[misc]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        _, took = await timed(asyncio.gather(*tasks, return_exceptions=True))
        assert took < SLACK_S
        rig.heal()
        await back(tier)
        assert await get(tier, "k") == value_of("k", LARGE)
        await tier.delete([key_of("k"), *(key_of(n) for n in range(6))], soon())
        await until(
            lambda: (tier.stats().leases, tier.stats().reservations) == (0, 0), "reservations to come back", 5.0
        )


async def test_close_while_the_server_is_frozen_ends_calls_and_threads(rig: Rig) -> None:
    before = {thread for thread in threading.enumerate() if thread.name.startswith("pdxfer-")}
    async with opened(rig.url) as tier:
        await put(tier, "k", num_bytes=LARGE)
        rig.proxy.set("freeze")
        tasks = [asyncio.ensure_future(tier.get(key_of("k"), short())) for _ in range(3)]
        await asyncio.sleep(0.05)
        _, took = await timed(tier.close())
        assert took < SLACK_S
        assert await asyncio.gather(*tasks) == [None] * 3

    def ended() -> bool:
        names = {thread for thread in threading.enumerate() if thread.name.startswith("pdxfer-")}
        return not names - before

    await until(ended, "threads to end", 5.0)
    rig.heal()
    async with opened(rig.url) as tier:
        assert await tier.delete([key_of("k")], soon()) == 1
