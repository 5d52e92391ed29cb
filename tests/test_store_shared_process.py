"""The store process as a process: engines and the store itself are killed, stopped and started again."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store.base import Outcome
from pdxfer.store.shared import SharedDramTier
from pdxfer.testing.tier_kit import MIB, WAIT_S, Opened, closing, key_of, until, value_of

pytestmark = pytest.mark.slow
BACK_WITHIN_S = 5.0
CAPACITY_BYTES = 16 * MIB

ENGINE = """
import asyncio, sys
from pdxfer.config.store import TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store.shared import SharedDramTier
from pdxfer.testing.tier_kit import MIB, Opened, key_of, value_of

async def main():
    tier = SharedDramTier(TierConfig(url="shm:" + sys.argv[1]), SYSTEM_CLOCK)
    await tier.open()
    t = Opened(tier, SYSTEM_CLOCK)
    await t.stored("kept", num_bytes=MIB)
    held = [await tier.get(key_of("kept"), t.soon) for _ in range(3)]
    for n in range(4):
        reservation = await tier.reserve(key_of(("half", n)), 2 * MIB, t.soon)
        reservation.view[:MIB] = value_of(n, MIB)
        held.append(reservation)
    print("holding", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A Python process; killed at the end if it still runs."""
    started = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


def store_process(path: Path) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    tier = {"url": "dram:", "capacity_gib": CAPACITY_BYTES / (1 << 30)}
    section = json.dumps({"shared_memory": str(path), "tiers": [tier]})
    return process("-m", "pdxfer.store.server", "--store", section)


@asynccontextmanager
async def engine(path: Path) -> AsyncIterator[Opened]:
    """An engine in this process, attached."""
    tier = SharedDramTier(TierConfig(url=f"shm:{path}"), SYSTEM_CLOCK)
    await tier.open()
    async with closing(tier):
        await until(lambda: tier.stats().reachable, "the engine to attach")
        yield Opened(tier, SYSTEM_CLOCK)


async def test_a_killed_engine_gives_everything_back_and_its_values_stay(tmp_path: Path) -> None:
    """kill -9 while it holds three leases and four half-written reservations, which fill the tier."""
    path = tmp_path / "store.sock"
    async with store_process(path), engine(path) as t:
        for _ in range(3):
            async with process("-c", ENGINE, str(path)) as victim:
                assert victim.stdout is not None
                assert await asyncio.wait_for(victim.stdout.readline(), WAIT_S) == b"holding\n"
                soon = SYSTEM_CLOCK.now() + 0.05
                large = [value_of("large", 10 * MIB)]
                assert await t.tier.put(key_of("large"), large, soon) in (Outcome.FULL, Outcome.LATE)
                victim.send_signal(signal.SIGKILL)
                assert await t.tier.put(key_of("large"), large, t.soon) is Outcome.STORED
            assert await t.holds("kept", ("half", 0), ("half", 3)) == [True, False, False]
            assert await t.get(key_of("kept")) == value_of("kept", MIB)
            assert await t.tier.delete([key_of("kept"), key_of("large")], t.soon) == 2
            assert t.tier.stats().used_bytes == 0


async def test_values_outlive_the_engine_that_stored_them(tmp_path: Path) -> None:
    path = tmp_path / "store.sock"
    async with store_process(path):
        async with engine(path) as t:
            await t.stored(*range(5), num_bytes=MIB)
        async with engine(path) as t:
            for n in range(5):
                assert await t.get(key_of(n)) == value_of(n, MIB)


async def test_a_killed_store_is_a_miss_and_its_successor_is_found(tmp_path: Path) -> None:
    """What an engine held of the old one stays readable; calls end at once; the new one is attached within 5 s."""
    path = tmp_path / "store.sock"
    async with store_process(path) as store, engine(path) as t:
        await t.stored("k", num_bytes=MIB)
        lease = await t.tier.get(key_of("k"), t.soon)
        half = await t.tier.reserve(key_of("half"), 1000, t.soon)
        assert lease is not None and not isinstance(half, Outcome)
        store.send_signal(signal.SIGKILL)
        await until(lambda: not t.tier.stats().reachable, "the kill to be seen")
        assert await t.get(key_of("k")) is None
        assert await t.put(key_of("new"), b"x") is Outcome.FAILED
        assert await half.commit() is Outcome.FAILED
        async with store_process(path) as successor:
            started = SYSTEM_CLOCK.now()
            await until(lambda: t.tier.stats().reachable, "the successor to be attached")
            assert SYSTEM_CLOCK.now() - started < BACK_WITHIN_S
            assert await t.holds("k", "half") == [False, False]
            await t.stored("k", num_bytes=MIB)
            assert bytes(lease.view) == value_of("k", MIB)
            lease.release()
            assert await t.get(key_of("k")) == value_of("k", MIB)
            successor.terminate()
            assert await asyncio.wait_for(successor.wait(), WAIT_S) == 0
            assert not path.exists()


async def test_a_frozen_store_costs_the_deadline_and_nothing_else(tmp_path: Path) -> None:
    """SIGSTOP: every call ends by its deadline; after SIGCONT all works and nothing is left held."""
    path = tmp_path / "store.sock"
    async with store_process(path) as store, engine(path) as t:
        await t.stored("k", num_bytes=MIB)
        half = await t.tier.reserve(key_of("half"), 1000, SYSTEM_CLOCK.now() + 2)
        assert not isinstance(half, Outcome)
        store.send_signal(signal.SIGSTOP)
        try:
            started = SYSTEM_CLOCK.now()
            deadline = started + 0.1
            assert await t.tier.get(key_of("k"), deadline) is None
            calls = [
                t.tier.lookup([key_of("k")], started + 0.2),
                t.tier.put(key_of("late"), [b"x"], started + 0.2),
                half.commit(),
            ]
            assert await asyncio.gather(*calls) == [[None], Outcome.LATE, Outcome.LATE]
            assert SYSTEM_CLOCK.now() - started < 10
        finally:
            store.send_signal(signal.SIGCONT)
        assert await t.get(key_of("k")) == value_of("k", MIB)
        assert await t.holds("half", "late") == [False, False]
        assert await t.tier.delete([key_of("k")], t.soon) == 1

        async def empty() -> bool:
            await t.tier.lookup([key_of("k")], t.soon)
            return t.tier.stats().used_bytes == 0

        ends = SYSTEM_CLOCK.now() + WAIT_S
        while not await empty():
            assert SYSTEM_CLOCK.now() < ends, t.tier.stats()
        assert t.tier.stats().failures["timeout"] == 4


async def test_a_wrong_setting_ends_the_process_with_2(tmp_path: Path) -> None:
    for section, said in (
        ("{}", b"shared_memory is empty"),
        ('{"shared_memory": "%s", "tiers": [{"url": "file:///tmp"}]}' % (tmp_path / "s"), b"no `dram:` tier"),
        ('{"nonsense": 1}', b"nonsense"),
    ):
        started = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pdxfer.store.server", "--store", section), stderr=asyncio.subprocess.PIPE
        )
        _, errors = await asyncio.wait_for(started.communicate(), WAIT_S)
        assert started.returncode == 2 and said in errors, errors
