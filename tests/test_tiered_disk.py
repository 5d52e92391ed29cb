"""The store over a real disk tier that hangs, runs out of buffers, is lost and comes back."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from disk_faults import FaultyFiles
from msgspec import structs
from tiered_kit import IDENTITY, Rig, key, until

from pdxfer.config.store import StoreConfig, TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store import manage
from pdxfer.store.base import Entry
from pdxfer.store.disk import DiskTier, home_of
from pdxfer.store.disk_local import LocalTier
from pdxfer.store.events import Mirror
from pdxfer.store.tiered import TieredStore
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.testing.faulty_tier import FaultyTier
from pdxfer.testing.memory_tier import MemoryTier

NOBODY = [f"nobody's {number}" for number in range(8)]
"""Chunks that are nowhere; their homes are in each of two directories."""
LONG_S, SHORT_S = 20.0, 0.1
PAUSE_S = 5.0
"""Longer than every pause between two looks for a tier."""


class DiskRig(Rig):
    """Memory over a disk, and a listener; the clock stands still, threads do not."""

    def __init__(self, url: str, files: FaultyFiles, buffers_mib: int) -> None:
        self.files, self.clock, self.mirror = files, FakeClock(), Mirror()
        options = {"buffers_mib": str(buffers_mib)}
        settings = [TierConfig(url="dram:"), TierConfig(url=url, capacity_gib=0.03125, options=options)]
        self.disk = DiskTier(settings[1], self.clock, files=files)
        tiers = [FaultyTier(MemoryTier(settings[0], self.clock)), FaultyTier(self.disk)]
        super().__init__(TieredStore(tiers, StoreConfig(tiers=settings), IDENTITY, clock=self.clock), tiers)
        self.slot = self.store.slots[1]
        self.be_patient()

    def be_patient(self, *, get_s: float = LONG_S, put_s: float = LONG_S) -> None:
        """How long the store waits for the disk."""
        self.slot.config = structs.replace(self.slot.config, get_timeout_s=get_s, put_timeout_s=put_s)

    def goes_on(self) -> None:
        """The disk, after a hang."""
        self.files.hanging = False
        self.files.hang.set()
        self.be_patient()

    def part(self, number: int) -> LocalTier:
        """One directory."""
        return self.disk._parts[number]

    async def on_disk(self, *names: object, size: int = 3000) -> None:
        """There, and in memory no more."""
        await self.saved(*names, size=size)
        self.memory(0).values.clear()
        self.store.events.evict("dram", [key(name) for name in names])
        assert await self.found(*names) == ["disk"] * len(names)
        assert self.known(*names) == [True] * len(names)

    def known(self, *names: object) -> list[bool]:
        """Which of these the listener knows."""
        self.store.events.flush()
        return [key(name) in self.mirror for name in names]

    async def passes(self, seconds: float = PAUSE_S) -> None:
        """Time, with housekeeping at its end."""
        self.clock.advance(seconds)
        await self.store.tick()

    async def is_lost(self, number: int = 0) -> None:
        """Until a directory is known to be away."""
        end = SYSTEM_CLOCK.now() + LONG_S
        while self.part(number).stats().reachable:
            assert SYSTEM_CLOCK.now() < end, "the loss is not noticed"
            self.clock.advance(1.5)
            await self.found(*NOBODY)
            await asyncio.sleep(0.001)

    async def is_back(self, number: int = 0) -> None:
        """Until it is there again and the store reads from it."""
        end = SYSTEM_CLOCK.now() + LONG_S
        while not (self.part(number).stats().reachable and self.slot.readable):
            assert SYSTEM_CLOCK.now() < end, "the disk is not found again"
            await self.passes()
            await self.found(*NOBODY)
            await asyncio.sleep(0.001)


@asynccontextmanager
async def disk_rig(url: str, files: FaultyFiles | None = None, buffers_mib: int = 128) -> AsyncIterator[DiskRig]:
    r = DiskRig(url, files or FaultyFiles(), buffers_mib)
    for tier in r.tiers:
        await tier.open()
    await r.store.open()
    r.store.subscribe(r.mirror.apply)
    try:
        yield r
        await r.settled()
        r.nothing_is_out()
    finally:
        r.goes_on()
        await r.store.close(r.soon)


# ---- a disk that hangs -----------------------------------------------------------------------------------------------


async def test_a_disk_whose_reads_hang_is_soon_not_asked_and_nothing_of_it_is_forgotten(tmp_path: Path) -> None:
    """The tier ends its calls by itself: that is no answer of the disk."""
    async with disk_rig(f"file://{tmp_path}/kv") as r:
        await r.on_disk("a", "b")
        r.files.hanging = True
        r.be_patient(get_s=SHORT_S)
        for _ in range(3):
            await r.found("a")
            assert await r.load("a") == {}
        assert not r.slot.readable
        reads = r.files.calls["read"]
        assert await r.load("a", "b") == {} and r.files.calls["read"] == reads
        await r.passes()
        assert not r.slot.readable, "a probe cannot find it well while reads hang"
        assert r.known("a", "b") == [True, True]
        r.goes_on()
        await until(lambda: r.disk.stats().reachable, "the threads to end")
        await r.is_back()
        assert await r.load("a", "b") == {"a": "disk", "b": "disk"}


async def test_one_directory_whose_reads_hang_costs_the_others_nothing(tmp_path: Path) -> None:
    """What is at home there is a miss at once, after a few that were late."""
    async with disk_rig(f"file://{tmp_path}/one,{tmp_path}/two") as r:
        one = [name for name in range(100) if home_of(key(name), 2) == 0][:4]
        two = next(name for name in range(100) if home_of(key(name), 2) == 1)
        await r.on_disk(*one, two)
        r.files.hung = lambda call, path: call == "read" and path.endswith("one/slab")
        r.files.hanging = True
        r.be_patient(get_s=SHORT_S)
        assert await r.load(*one[:3]) == {}
        r.be_patient()
        reads = r.files.calls["read"]
        assert await r.load(one[3]) == {} and r.files.calls["read"] == reads
        assert await r.load(two) == {two: "disk"}
        assert r.slot.readable and r.known(*one, two) == [True] * 5
        r.goes_on()
        await until(lambda: r.part(0).stats().reachable, "the threads to end")
        assert await r.load(*one) == dict.fromkeys(one, "disk")


async def test_a_read_that_had_hardly_any_time_says_nothing_about_the_disk(tmp_path: Path) -> None:
    async with disk_rig(f"file://{tmp_path}/kv") as r:
        await r.on_disk("a")
        r.files.hanging = True
        for _ in range(3):
            assert await r.disk.get(key("a"), r.clock.now() + 0.01) is None
        stats = r.disk.stats()
        assert stats.reachable and stats.failures == {"late": 3}
        r.goes_on()
        assert await r.load("a") == {"a": "disk"}


async def test_a_disk_whose_writes_hang_is_soon_not_written_to_and_still_read(tmp_path: Path) -> None:
    async with disk_rig(f"file://{tmp_path}/kv") as r:
        await r.on_disk("a")
        r.files.hung = lambda call, path: call == "write"
        r.files.hanging = True
        r.be_patient(put_s=SHORT_S)
        for name in range(3):
            await r.saved(name)
        assert r.slot.writes.state.value == "open"
        writes = r.files.calls["write"]
        await r.saved("more")
        assert r.slot.counts["skipped"] == 1 and r.files.calls["write"] == writes
        assert await r.load("a") == {"a": "disk"}
        r.goes_on()
        await until(lambda: not r.files.waiting, "the threads to end")
        r.clock.advance(PAUSE_S)
        await r.on_disk("after")
        assert r.slot.writes.state.value == "closed"


async def test_a_chunk_without_a_buffer_to_read_it_into_is_not_forgotten(tmp_path: Path) -> None:
    async with disk_rig(f"file://{tmp_path}/kv", buffers_mib=1) as r:
        await r.on_disk("a", "b", size=700_000)
        lease = await r.disk.get(key("a"), r.soon)
        assert lease is not None
        r.be_patient(get_s=SHORT_S)
        assert await r.load("b", size=700_000) == {}
        assert r.disk.stats().failures == {"no_buffer": 1}
        assert r.known("a", "b") == [True, True]
        r.be_patient()
        lease.release()
        assert await r.load("b", size=700_000) == {"b": "disk"}


# ---- a disk that comes back ------------------------------------------------------------------------------------------


async def test_a_disk_that_was_lost_and_came_back_with_its_values_is_listed_again(tmp_path: Path) -> None:
    async with disk_rig(f"file://{tmp_path}/kv") as r:
        await r.on_disk("a")
        os.unlink(tmp_path / "kv" / "lock")
        await r.is_lost()
        await until(lambda: r.known("a") == [False], "the listener to know of the loss")
        cleared = (await manage.clear(r.store, lambda done, total: None, tier="disk"))[0]
        assert (cleared.removed, cleared.reachable) == (0, False)
        await r.is_back()
        await until(lambda: r.known("a") == [True], "the listener to know it")
        assert await r.load("a") == {"a": "disk"}


async def test_a_directory_that_was_lost_and_came_back_is_listed_again(tmp_path: Path) -> None:
    """The tier as a whole was never away."""
    async with disk_rig(f"file://{tmp_path}/one,{tmp_path}/two") as r:
        one, two = (next(n for n in range(100) if home_of(key(n), 2) == number) for number in range(2))
        await r.on_disk(one, two)
        os.unlink(tmp_path / "two" / "lock")
        await r.is_lost(1)
        await until(lambda: r.known(one, two) == [True, False], "the listener to know of the loss")
        assert r.slot.readable
        await r.is_back(1)
        await until(lambda: r.known(one, two) == [True, True], "the listener to know both")


async def test_a_disk_that_is_away_at_the_start_is_listed_when_it_is_there(tmp_path: Path) -> None:
    async with disk_rig(f"file://{tmp_path}/kv") as r:
        await r.on_disk("a")
    files = FaultyFiles()
    files.errors["open"] = errno.EIO
    async with disk_rig(f"file://{tmp_path}/kv", files) as r:
        await r.passes()
        assert not r.disk.stats().reachable and r.known("a") == [False]
        files.errors.clear()
        await r.is_back()
        await until(lambda: r.known("a") == [True], "the listener to know it")
        assert await r.load("a") == {"a": "disk"}


async def test_a_listing_that_came_to_nothing_for_want_of_time_is_none(tmp_path: Path) -> None:
    async with disk_rig(f"file://{tmp_path}/kv") as r:
        await r.on_disk("a")
        scan = r.disk.scan

        async def late(after: bytes, limit: int, deadline: float) -> list[Entry]:
            r.clock.advance(LONG_S)
            return await scan(after, limit, deadline)

        r.disk.scan = late  # type: ignore[method-assign]
        r.store.writer.unlisted.add("disk")
        await r.store.tick()
        assert r.known("a") == [True]
        r.disk.scan = scan  # type: ignore[method-assign]
        await until(lambda: not r.store.writer.unlisted, "a listing that had time")
        assert r.known("a") == [True]
