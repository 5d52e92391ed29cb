"""The tiered store over memory tiers: what is saved is found, loaded verified, promoted, written back, prefetched."""

import asyncio

import pytest
from tiered_kit import IDENTITY, chunk, key, raw, rig, until, wanted

from pdxfer.config.store import StoreConfig, TierConfig
from pdxfer.core.errors import ConfigError
from pdxfer.store.events import Mirror
from pdxfer.store.lanes import Lane
from pdxfer.store.tiered import TieredStore
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.testing.faulty_tier import FaultyTier
from pdxfer.testing.memory_tier import MemoryTier


async def test_a_saved_chunk_is_found_and_loaded():
    """Into memory at once, into the others in the background; the fastest one answers."""
    async with rig() as r:
        assert await r.save("a", "b") == ["held", "held"]
        assert await r.found("a", "b", "c") == ["dram", "dram"]
        assert await r.load("a", "b") == {"a": "dram", "b": "dram"}
        await r.settled()
        assert [set(r.memory(i).values) for i in range(3)] == [{key("a"), key("b")}] * 3
        assert await r.save("a") == ["already"]
        r.nothing_is_out()


async def test_a_prefix_may_be_spread_over_tiers():
    """The longest run of which some tier has each chunk; what is beyond a hole is not counted."""
    async with rig() as r:
        await r.saved(0, 1, 2, 3, 5)
        for tier, gone in ((0, (1, 2)), (1, (2,))):
            for name in gone:
                del r.memory(tier).values[key(name)]
        assert await r.found(0, 1, 2, 3, 4, 5) == ["dram", "disk", "redis", "dram"]
        assert await r.load(0, 1, 2, 3) == {0: "dram", 1: "disk", 2: "redis", 3: "dram"}


async def test_a_hit_in_a_slow_tier_is_promoted():
    """The next time it comes from memory."""
    async with rig() as r:
        await r.saved("a")
        r.store.events.evict("dram", [key("a")])
        del r.memory(0).values[key("a")]
        assert await r.load("a") == {"a": "disk"}
        await r.settled()
        assert await r.load("a") == {"a": "dram"}
        assert r.store.slots[0].counts["promoted"] == 1
        r.nothing_is_out()


async def test_no_promotion_where_it_is_off():
    """`promote: false`."""
    async with rig(TierConfig(url="dram:"), TierConfig(url="disk:", promote=False)) as r:
        await r.saved("a")
        r.store.events.evict("dram", [key("a")])
        del r.memory(0).values[key("a")]
        assert await r.load("a") == await r.load("a") == {"a": "disk"}
        r.nothing_is_out()


async def test_partial_retrieval():
    """From chunk k on: the engine has the first ones itself."""
    async with rig() as r:
        await r.saved(0, 1, 2, 3)
        assert list(await r.load(0, 1, 2, 3, start=2)) == [2, 3]
        chunks = await r.store.get([key(i) for i in (0, 1, 2, 3, 4)], r.soon, start_chunk=1)
        assert [bytes(c.raw) for c in chunks] == [raw(1), raw(2), raw(3)]
        for c in chunks:
            c.release()
        r.nothing_is_out()


async def test_without_memory_the_parts_are_copied_once():
    """A store of slow tiers only: the caller's blocks are free at once."""
    async with rig(TierConfig(url="disk:"), kinds=("disk",)) as r:
        parts = bytearray(raw("a"))
        mine = chunk("a")
        result = await r.store.save(type(mine)(key=mine.key, num_tokens=16, parts=[parts]), r.soon)
        parts[:] = bytes(len(parts))
        assert result.outcome.value == "queued" and not result.held
        await r.settled()
        assert await r.load("a") == {"a": "disk"}
        r.nothing_is_out()


async def test_a_full_queue_drops_and_counts():
    """Saves never wait for a slow tier."""
    async with rig(max_pending_saves=4) as r:
        r.tiers[1].frozen = True
        await r.save(*range(20))
        assert r.store.slots[1].counts["dropped"] >= 10
        assert await r.load(*range(20)) == dict.fromkeys(range(20), "dram")


async def test_a_reserved_save_says_truthfully_where_the_bytes_are():
    """Spill: memory full of pinned values, so the next tier that takes it and that peers read; nobody: failed."""
    small = TierConfig(url="dram:", capacity_gib=4000 / (1 << 30))
    disk = TierConfig(url="disk:", write="none", capacity_gib=8000 / (1 << 30))
    async with rig(small, disk, TierConfig(url="peer:"), kinds=("dram", "disk", "peer")) as r:
        await r.save("pinned")
        await r.store.slots[0].pin([key("pinned")], None, r.soon)
        result = await r.store.save(chunk("a"), r.soon, reserved=True)
        assert result.held and {k: v.value for k, v in result.tiers.items()} == {"dram": "full", "disk": "stored"}
        assert await r.load("a") == {"a": "disk"}
        r.tiers[1].down = True
        assert (await r.store.save(chunk("b"), r.soon, reserved=True)).outcome.value == "failed"
        r.tiers[1].down = False
        r.nothing_is_out()


async def test_second_sight():
    """Of the store: the second save is kept. Of a tier: memory takes it at once, the SSD the second time."""
    async with rig(save="second_sight") as r:
        assert await r.save("a", "a", "a") == ["skipped", "held", "already"]
    async with rig(TierConfig(url="dram:"), TierConfig(url="disk:", admit_second_sight=True)) as r:
        await r.saved("a")
        assert len(r.memory(1).values) == 0
        await r.saved("a")
        assert set(r.memory(1).values) == {key("a")}


async def test_write_back_begins_before_memory_is_full():
    """The oldest of what only memory has goes down from 75 % on; nothing is lost in a store that keeps up."""
    async with rig(
        TierConfig(url="dram:", capacity_gib=10 * 3160 / (1 << 30)), TierConfig(url="disk:", write="back")
    ) as r:
        for name in range(7):
            await r.saved(name)
        await r.store.tick()
        await r.settled()
        assert len(r.memory(1).values) == 0
        for name in range(7, 40):
            await r.saved(name)
            await r.store.tick()
            await r.settled()
        assert len(await r.load(*range(40))) == 40
        assert r.store.slots[1].counts["lost"] == 0
        assert r.store.slots[1].counts["written_back"] >= 30


async def test_close_writes_back_what_only_memory_has():
    """A clean stop loses nothing."""
    async with rig(TierConfig(url="dram:"), TierConfig(url="disk:", write="back")) as r:
        await r.save("a", "b")
        assert not r.memory(1).values
        await r.store.close(r.soon)
        assert set(r.memory(1).values) == {key("a"), key("b")}


async def test_prefetch_brings_a_prefix_into_memory():
    """Bounded, cancellable by its token."""
    async with rig(TierConfig(url="dram:"), TierConfig(url="disk:", promote=False)) as r:
        await r.saved(*range(10))
        r.memory(0).values.clear()
        r.store.events.evict("dram", r.store.events.keys("dram"))
        assert await r.store.prefetch([key(i) for i in range(12)], "req", r.soon) == 10
        assert await r.load(*range(10)) == dict.fromkeys(range(10), "dram")

        r.memory(0).values.clear()
        r.tiers[1].frozen = True
        r.tiers[1].calls.append("frozen")
        running = asyncio.create_task(r.store.prefetch([key(0)], "req", r.soon))
        await until(lambda: r.tiers[1].calls[-1] == "get", "the prefetch to ask")
        r.store.cancel_prefetch("req")
        assert await running == 0
        r.nothing_is_out()


async def test_too_many_loads_are_computed_instead():
    """`max_pending_loads`: the next one is told at once that there is nothing."""
    async with rig(max_pending_loads=1) as r:
        await r.saved("a")
        r.tiers[0].frozen = True
        first = asyncio.create_task(r.load("a"))
        await until(lambda: r.store.stats().loads == 1, "the load to begin")
        assert await r.load("a") == {}
        r.tiers[0].thaw()
        assert await first == {"a": "dram"}


async def test_nothing_is_delivered_after_a_load_was_cancelled():
    """The destination blocks belong to somebody else then."""
    async with rig() as r:
        await r.saved(*range(8))
        calls: list[int] = []
        r.tiers[0].frozen = True
        load = asyncio.create_task(r.store.load(wanted(range(8)), lambda i, header, view: calls.append(i), r.soon))
        await until(lambda: "get" in r.tiers[0].calls, "gets to be out")
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        r.tiers[0].thaw()
        await until(lambda: r.store.slots[0].strays == 0, "gets to end")
        assert calls == []
        r.nothing_is_out()


async def test_an_error_of_the_sink_ends_the_load_and_nothing_else():
    """It is the caller's; leases come back."""
    async with rig() as r:
        await r.saved("a", "b")

        def sink(index, header, view):
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await r.store.load(wanted(["a", "b"]), sink, r.soon)
        r.nothing_is_out()
        assert await r.load("a", "b") == {"a": "dram", "b": "dram"}


async def test_an_unknown_codec_is_named_at_start():
    """A setting, so an error with the nearest name."""
    with pytest.raises(ConfigError, match="redis.*lossles.*did you mean lossless"):
        async with rig(TierConfig(url="redis://h", codec="lossles"), kinds=("redis",), identity=IDENTITY):
            raise AssertionError


async def test_what_others_put_into_shared_memory_becomes_known(monkeypatch: pytest.MonkeyPatch):
    """By a lookup at once; to listeners after the next listing."""
    monkeypatch.setattr("pdxfer.store.tiered.RELIST_S", 0.0)
    async with rig(kinds=("dram",)) as r, rig(kinds=("dram",)) as other:
        await other.saved("theirs", "more")
        r.memory(0).values.update(other.memory(0).values)
        assert await r.found("theirs") == ["dram"]
        mirror = Mirror()
        r.store.subscribe(mirror.apply)
        assert key("theirs") in mirror and key("more") not in mirror
        await r.store.tick()
        assert key("more") in mirror


async def test_a_listener_with_a_bug_ends_nothing(caplog: pytest.LogCaptureFixture):
    """It is logged, and the others are told the next time."""
    async with rig() as r:
        heard: list[bytes] = []

        def broken(batch):
            raise ZeroDivisionError

        end = r.store.subscribe(lambda batch: heard.extend(batch.added))
        r.store.events._listeners.insert(0, broken)
        await r.saved("a")
        await until(lambda: "housekeeping failed" in caplog.text, "the ticker to log it")
        r.store.events._listeners.remove(broken)
        await r.saved("b")
        await until(lambda: key("b") in heard, "the other listener to hear")
        end()


@pytest.mark.parametrize("kind", ["disk", "nixl-posix"])
async def test_two_tiers_of_one_kind_are_two_tiers(kind: str):
    """Each has a name, a queue and an index of its own."""
    async with rig(kinds=(kind, kind)) as r:
        await r.saved("a")
        assert [slot.name for slot in r.store.slots] == [kind, f"{kind}-2"]
        assert [set(r.memory(number).values) for number in range(2)] == [{key("a")}] * 2


async def test_what_a_stopped_tier_did_not_take_is_written_back_when_it_is_back():
    """An outage costs nothing of what memory still has."""
    async with rig(TierConfig(url="dram:"), TierConfig(url="disk:", write="back")) as r:
        names = list(range(80))
        await r.save(*names)
        r.tiers[1].down = True
        for _ in range(5):
            r.store.writer.write_back(everything=True)
            await r.settled()
        assert r.store.slots[1].writes.times_opened == 1 and not r.memory(1).values
        r.tiers[1].down = False
        await until(lambda: r.store.writer.write_back(everything=True), "the pause to be over")
        await r.store.writer.drain(r.soon)
        failed = r.store.slots[1].counts["failed"]
        assert failed <= 4 and len(r.memory(1).values) >= len(names) - failed


async def test_a_stop_does_not_wait_for_a_tier_that_takes_nothing():
    """What only memory has cannot be saved then."""
    async with rig(TierConfig(url="dram:"), TierConfig(url="disk:", write="back")) as r:
        await r.save(*range(8))
        r.tiers[1].down = True
        begin = r.store.clock.now()
        await r.store.writer.drain(begin + 20)
        assert r.store.clock.now() - begin < 10


async def test_a_stop_gives_all_slow_tiers_one_deadline(monkeypatch: pytest.MonkeyPatch):
    """Not one each."""
    clock = FakeClock()
    settings = [TierConfig(url=f"{kind}:") for kind in ("dram", "disk", "redis")]
    tiers = [FaultyTier(MemoryTier(t, clock, kind=t.url[:-1])) for t in settings]
    store = TieredStore(tiers, StoreConfig(tiers=settings), IDENTITY, clock=clock)
    waits: list[float] = []

    async def hangs(lane: Lane, timeout_s: float) -> None:
        waits.append(timeout_s)
        clock.advance(timeout_s)

    monkeypatch.setattr(Lane, "drain", hangs)
    store.writer._saving = 1
    await store.writer.drain(clock.now() + 3.0)
    assert sum(waits) == 3.0
    store.workers.close()
