"""The verbs of the management API on a store: each reply is compared with what the tiers really hold afterwards."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiered_kit import IDENTITY, OTHER, RAW_BYTES, Rig, chunk, key, raw, rig, until

from pdxfer.codec.frame import read_header
from pdxfer.config.store import StoreConfig, TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.errors import ConfigError, IdentityError
from pdxfer.store import manage, manage_copy, portable, scrub
from pdxfer.store.base import Outcome
from pdxfer.store.chunk import NewChunk
from pdxfer.store.lease import BufferPool
from pdxfer.store.open import open_tier
from pdxfer.store.peer.pull import Pull
from pdxfer.store.peer.wire import Value
from pdxfer.store.portable import PortableError
from pdxfer.store.tiered import TieredStore
from pdxfer.store.transcode import Transcoder
from pdxfer.testing.faulty_tier import FaultyTier

Told = list[tuple[int, int]]


def keys(*names: object) -> list[bytes]:
    return [key(name) for name in names]


def held(r: Rig, tier: int) -> set[bytes]:
    return set(r.memory(tier).values)


def codecs(r: Rig, tier: int) -> list[str]:
    return sorted(read_header(bytes(v.data)).codec for v in r.memory(tier).values.values())


# ---- lookup, clear, pin ----------------------------------------------------------------------------------------------


async def test_lookup_says_what_each_tier_has():
    """Longest prefix a tier, chunk by chunk: bytes, codec, pin, age, hits; also what lies behind a gap."""
    async with rig(TierConfig(url="dram:"), TierConfig(url="disk:", codec="zstd")) as r:
        await r.saved(0, 1, 2, 3)
        del r.memory(0).values[key(1)]
        await r.store.slots[0].pin(keys(0), None, r.soon)
        await r.load(0)
        answer = await manage.lookup(r.store, keys(0, 1, 2, 3, 4))
        dram, disk = answer.tiers
        assert (answer.num_chunks, dram.num_chunks, disk.num_chunks) == (4, 1, 4)
        assert [c.index for c in dram.chunks] == [0, 2, 3]
        assert dram.chunks[0].pinned and not dram.chunks[1].pinned
        assert dram.chunks[0].hits >= 1 and 0 <= dram.chunks[0].age_s < 60
        assert {c.codec for c in dram.chunks} == {"raw"} and {c.codec for c in disk.chunks} == {"zstd"}
        assert dram.chunks[0].num_bytes == RAW_BYTES + 160
        r.store.slots[1].codecs.clear()
        assert [c.codec for c in (await manage.lookup(r.store, keys(0), "disk")).tiers[0].chunks] == ["zstd"]
        r.tiers[1].down = True
        for _ in range(3):
            await r.found("never")
        assert not (await manage.lookup(r.store, keys(0))).tiers[1].reachable
        r.nothing_is_out()


async def test_clear_by_prefix_tier_tenant_and_age():
    """Only what was asked for goes; the reply counts what is gone, looked at again."""
    async with rig() as r:
        for name, tenant in ((0, "a"), (1, "a"), (2, "b"), (3, "b")):
            await r.store.save(chunk(name), r.soon, tenant=tenant)
        await r.settled()
        told: Told = []
        [one] = await manage.clear(r.store, lambda *p: told.append(p), keys=keys(0, 9), tier="disk")
        assert (one.tier, one.removed, one.left, one.removed_bytes) == ("disk", 1, 0, RAW_BYTES + 160)
        assert held(r, 1) == set(keys(1, 2, 3)) and held(r, 0) == set(keys(0, 1, 2, 3))
        assert told[-1][0] <= told[-1][1]

        await manage.clear(r.store, lambda *p: None, tenant="b")
        assert [held(r, i) for i in range(3)] == [set(keys(0, 1)), set(keys(1)), set(keys(0, 1))]

        r.memory(0).values[key(0)].created_wall -= 1000
        r.memory(0).values[key(1)].created_wall = 0
        replies = await manage.clear(r.store, lambda *p: None, older_than_s=500)
        assert [(c.removed, c.unknown_age) for c in replies] == [(1, 1), (0, 0), (0, 0)]

        assert sum(c.removed for c in await manage.clear(r.store, lambda *p: None)) == 4
        assert [held(r, i) for i in range(3)] == [set()] * 3
        assert sum(c.removed for c in await manage.clear(r.store, lambda *p: None)) == 0, "idempotent"
        assert await r.found(0) == [] and not any(r.store.events.num_held(t) for t in ("dram", "disk", "redis"))


async def test_what_was_cleared_stays_away():
    """Copies that were on their way arrive first; dirty chunks are not written back afterwards."""
    async with rig(TierConfig(url="dram:"), TierConfig(url="disk:"), TierConfig(url="redis:", write="back")) as r:
        r.tiers[1].slow_s = 0.02
        await r.save(*range(5))
        await manage.clear(r.store, lambda *p: None)
        await r.settled()
        r.store.writer.write_back(everything=True)
        await r.settled()
        assert [held(r, i) for i in range(3)] == [set()] * 3


async def test_what_a_load_brings_back_while_it_is_cleared_goes_too():
    """It comes out of a tier whose turn is still to come."""
    async with rig(TierConfig(url="dram:", write="through"), TierConfig(url="disk:")) as r:
        await r.saved(0, 1)
        del r.memory(0).values[key(1)]
        r.store.events.evict("dram", [key(1)])
        scan = r.memory(1).scan

        async def meanwhile(*args: object) -> object:
            r.memory(1).scan = scan  # type: ignore[method-assign]
            assert set(await r.load(0, 1)) == {0, 1}
            await r.settled()
            assert held(r, 0) == set(keys(0, 1))
            return await scan(*args)  # type: ignore[arg-type]

        r.memory(1).scan = meanwhile  # type: ignore[method-assign, assignment]
        replies = await manage.clear(r.store, lambda *p: None)
        assert [held(r, 0), held(r, 1)] == [set(), set()] and [one.left for one in replies] == [0, 0]
        assert await r.found(0) == []


@pytest.mark.parametrize("tenant", ["bank", "a tenant whose name is longer than tiers keep names"])
async def test_a_tenants_values_are_cleared_wherever_they_are(tmp_path: Path, tenant: str):
    """Also where a tier keeps its name shortened."""
    settings = [
        TierConfig(url="dram:", capacity_gib=0.03125),
        TierConfig(url=f"file://{tmp_path}/slab", capacity_gib=0.0625),
    ]
    store = TieredStore([await open_tier(t, SYSTEM_CLOCK) for t in settings], StoreConfig(tiers=settings), IDENTITY)
    await store.open()
    try:
        soon = store.clock.now() + 20
        for name, whose in (("theirs", tenant), ("other", tenant + "x")):
            assert (await store.save(chunk(name), soon, tenant=whose)).held
        await store.writer.quiet(soon)
        assert [one.removed for one in await manage.clear(store, lambda *p: None, tenant=tenant)] == [1, 1]
        assert (await store.lookup(keys("other"), soon)).num_chunks == 1
    finally:
        await store.close(store.clock.now() + 5)


async def test_clear_of_a_tier_that_is_away_says_so():
    """Not 0 removed and fine."""
    async with rig() as r:
        await r.saved(0)
        r.tiers[2].down = True
        for _ in range(3):
            await r.found("never")
        replies = await manage.clear(r.store, lambda *p: None)
        assert [(c.removed, c.reachable) for c in replies] == [(1, True), (1, True), (0, False)]


async def test_pin_and_unpin_tell_how_many_are_pinned():
    """Absent keys are not."""
    async with rig() as r:
        await r.saved(0, 1)
        assert [(p.pinned, p.present) for p in await manage.pin(r.store, keys(0, 1, 9), None)] == [(2, 2)] * 3
        assert [(p.pinned, p.present) for p in await manage.unpin(r.store, keys(0), "dram")] == [(0, 1)]
        assert [p.pinned for p in await manage.pin(r.store, keys(0, 1), 5.0, "disk")] == [2]
        assert r.memory(0).values[key(1)].pinned and not r.memory(0).values[key(0)].pinned


async def test_a_tier_that_does_not_exist_is_named():
    """With those there are."""
    async with rig() as r:
        for call in (
            manage.lookup(r.store, keys(0), "dsik"),
            manage_copy.copy(r.store, lambda *p: None, keys(0), "dsik"),
            manage_copy.copy(r.store, lambda *p: None, keys(0), ""),
        ):
            with pytest.raises(ConfigError, match="dram, disk, redis"):
                await call
        with pytest.raises(ConfigError, match="to itself"):
            await manage_copy.move(r.store, lambda *p: None, keys(0), "disk", "disk")


# ---- copy, move, prefetch --------------------------------------------------------------------------------------------


async def test_copy_and_move_between_tiers_both_ways():
    """In the target's codec; a source loses its chunk only after the copy was verified; again: already."""
    tiers = TierConfig(url="dram:"), TierConfig(url="disk:", write="none", codec="zstd")
    async with rig(*tiers) as r:
        await r.saved(0, 1, 2)
        told: Told = []
        done = await manage_copy.move(r.store, lambda *p: told.append(p), keys(0, 1, 9), "disk", "dram")
        assert (done.done, done.removed, done.missing, done.failed) == (2, 2, 1, {})
        assert (held(r, 0), held(r, 1)) == (set(keys(2)), set(keys(0, 1))) and codecs(r, 1) == ["zstd", "zstd"]
        assert told[-1] == (3, 3)
        done = await manage_copy.copy(r.store, lambda *p: None, keys(0, 1), "dram", "disk")
        assert (done.done, done.removed) == (2, 0) and codecs(r, 0) == ["raw"] * 3
        assert (await manage_copy.copy(r.store, lambda *p: None, keys(0, 1), "dram")).already == 2
        assert await r.load(0, 1) == {0: "dram", 1: "dram"}
        r.nothing_is_out()


async def test_a_chunk_stays_its_tenants():
    """Moved, promoted, compressed: quotas and `clear` by tenant still find it; a pin keeps the rest of its ttl."""
    async with rig(TierConfig(url="dram:"), TierConfig(url="disk:", write="none")) as r:
        await r.store.save(chunk(0), r.soon, tenant="t")
        await manage_copy.move(r.store, lambda *p: None, keys(0), "disk", "dram")
        await r.load(0)
        await r.settled()
        await manage.pin(r.store, keys(0), 1000.0, "disk")
        await manage_copy.compress(r.store, lambda *p: None, keys(0), "disk", "zstd")
        assert [r.memory(i).values[key(0)].tenant for i in (0, 1)] == ["t", "t"]
        left = r.store.slots[1].pin_left_s(key(0))
        assert left is not None and 900 < left <= 1000 and r.memory(1).values[key(0)].pinned


async def test_move_keeps_what_is_pinned_or_could_not_be_copied():
    """No reply of success, no loss."""
    async with rig(TierConfig(url="dram:"), TierConfig(url="disk:", write="none")) as r:
        await r.saved(0, 1)
        await manage.pin(r.store, keys(0), None)
        done = await manage_copy.move(r.store, lambda *p: None, keys(0), "disk", "dram")
        assert (done.done, done.removed, done.kept_pinned) == (1, 0, 1)
        r.tiers[1].damage = lambda frame: frame[:-1] + b"?"
        done = await manage_copy.move(r.store, lambda *p: None, keys(1), "disk", "dram")
        assert (done.done, done.removed, done.failed) == (0, 0, {"not readable afterwards": 1})
        assert key(1) in held(r, 0)


async def test_prefetch_brings_a_prefix_into_memory():
    """The verb for an operator, not for a request."""
    async with rig() as r:
        await r.saved(0, 1)
        r.memory(0).values.clear()
        assert (await manage_copy.prefetch(r.store, lambda *p: None, keys(0, 1))).done == 2
        assert held(r, 0) == set(keys(0, 1))


# ---- compress --------------------------------------------------------------------------------------------------------


def compressible(name: object) -> bytes:
    return raw(name, 40) * 75


async def test_compress_and_decompress_in_place():
    """The bytes shrink, the chunk stays readable at every moment, pins stay, and it comes back bit for bit."""
    async with rig(TierConfig(url="dram:"), kinds=("dram",)) as r:
        for name in range(3):
            data = compressible(name)
            await r.store.save(NewChunk(key=key(name), num_tokens=16, parts=[data]), r.soon, tenant="t")
        await manage.pin(r.store, keys(1), None)
        reads: list[bool] = []

        async def reader() -> None:
            while True:
                for name in range(3):
                    got = await r.store.get_chunk(key(name), r.soon)
                    reads.append(got is not None and bytes(got.raw) == compressible(name))
                    if got is not None:
                        got.release()
                await asyncio.sleep(0)

        reading = asyncio.create_task(reader())
        await until(lambda: reads, "the reader to begin")
        done = await manage_copy.compress(r.store, lambda *p: None, keys(0, 1, 2, 9), "dram", "zstd")
        assert (done.done, done.missing, done.failed) == (3, 1, {}) and codecs(r, 0) == ["zstd"] * 3
        assert done.num_bytes_after < done.num_bytes_before / 4
        assert r.memory(0).values[key(1)].pinned and r.memory(0).values[key(1)].tenant == "t"
        assert (await manage_copy.compress(r.store, lambda *p: None, keys(0), "dram", "zstd")).already == 1
        done = await manage_copy.compress(r.store, lambda *p: None, keys(0, 1, 2), "dram", "raw")
        assert done.done == 3 and codecs(r, 0) == ["raw"] * 3
        reading.cancel()
        await asyncio.wait([reading])
        assert all(reads) and len(reads) > 3
        r.nothing_is_out()


async def test_two_that_compress_the_same_chunk_do_not_meet_in_it():
    """The second leaves it to the first, and says so."""
    async with rig(TierConfig(url="dram:"), kinds=("dram",)) as r:
        await r.saved(0)
        delete, told = r.memory(0).delete, []

        async def meanwhile(*args: object) -> object:
            r.memory(0).delete = delete  # type: ignore[method-assign]
            told.append(await manage_copy.compress(r.store, lambda *p: None, keys(0), "dram", "zstd"))
            return await delete(*args)  # type: ignore[arg-type]

        r.memory(0).delete = meanwhile  # type: ignore[method-assign, assignment]
        first = await manage_copy.compress(r.store, lambda *p: None, keys(0), "dram", "zstd")
        assert first.done == 1 and [one.failed for one in told] == [{"another operation replaces it now": 1}]
        assert codecs(r, 0) == ["zstd"] and await r.load(0) == {0: "dram"} and not r.store.slots[0].shadows


async def test_a_put_that_fails_brings_the_old_value_back():
    """A tier that refuses the new copy: the old one is there, and the reply says so."""
    async with rig(TierConfig(url="dram:"), kinds=("dram",)) as r:
        await r.saved(0)
        put, times = r.memory(0).put, []

        async def once(*args: object, **more: object) -> object:
            times.append(1)
            if len(times) == 1:
                return Outcome.FULL
            return await put(*args, **more)  # type: ignore[arg-type]

        r.memory(0).put = once  # type: ignore[method-assign, assignment]
        done = await manage_copy.compress(r.store, lambda *p: None, keys(0), "dram", "zstd")
        assert done.failed == {"put said full, old value put back": 1} and codecs(r, 0) == ["raw"]
        assert await r.load(0) == {0: "dram"}


async def test_a_cancelled_compress_leaves_every_chunk_readable():
    """Each one in the old codec or the new."""
    async with rig(TierConfig(url="dram:"), kinds=("dram",)) as r:
        await r.saved(*range(8))
        told: Told = []
        work = asyncio.create_task(
            manage_copy.compress(r.store, lambda *p: told.append(p), keys(*range(8)), "dram", "zstd")
        )
        await until(lambda: len(told) >= 3, "some chunks to be done")
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert len(await r.load(*range(8))) == 8
        assert not r.store.slots[0].shadows
        assert 3 <= codecs(r, 0).count("zstd") < 8


async def test_a_codec_that_cannot_be_used_here_is_named():
    """Lossy codecs need the engine's layout."""
    async with rig() as r:
        with pytest.raises(ConfigError, match="int8"):
            await manage_copy.compress(r.store, lambda *p: None, keys(0), "dram", "int8")
        with pytest.raises(ConfigError, match="name of the tier"):
            await manage_copy.compress(r.store, lambda *p: None, keys(0), "", "zstd")


# ---- verify ----------------------------------------------------------------------------------------------------------


async def test_verify_finds_repairs_and_leaves_others_alone():
    """Damage is found by reading everything; another tier's copy puts it right; foreign values are no damage."""
    async with rig() as r:
        await r.saved(*range(6))
        foreign = TieredStore([r.tiers[2]], StoreConfig(tiers=[TierConfig(url="redis:")]), OTHER)
        await foreign.save(chunk("theirs"), r.soon)
        foreign.writer.start()
        await until(lambda: key("theirs") in held(r, 2), "the other model's chunk to arrive")
        await foreign.writer.close()
        foreign.workers.close()
        for tier, name in ((0, 1), (1, 2), (1, 3), (2, 3)):
            r.memory(tier).values[key(name)].data[-1] ^= 1
        r.memory(0).values[key(4)].data[20] ^= 1
        told: Told = []
        dram, disk, redis = await scrub.verify(r.store, lambda *p: told.append(p), repair=True)
        assert (dram.intact, dram.broken, dram.repaired) == (4, 2, 2)
        assert (disk.intact, disk.broken, disk.repaired) == (4, 2, 2)
        assert (redis.intact, redis.broken, redis.repaired, redis.foreign) == (5, 1, 1, 1)
        assert told[-1] == (19, 19)
        again = await scrub.verify(r.store, lambda *p: None)
        assert [(s.intact, s.broken, s.foreign) for s in again] == [(6, 0, 0), (6, 0, 0), (6, 0, 1)]
        [some] = await scrub.verify(r.store, lambda *p: None, keys=keys(0, 9), tier="dram")
        assert (some.intact, some.broken) == (1, 0)
        r.nothing_is_out()


async def test_other_models_values_in_a_shared_tier_are_left_alone():
    """Whatever is done with everything a tier holds: they are intact, only not ours."""
    async with rig() as r:
        await r.saved(0)
        theirs = TieredStore(r.tiers, r.store.config, OTHER)
        theirs.writer.start()
        assert (await theirs.save(chunk("theirs"), r.soon)).held
        await until(lambda: theirs.writer.pending == 0, "the other model's chunk to arrive")
        await theirs.writer.close()
        theirs.workers.close()
        every = keys(0, "theirs")
        assert (await manage_copy.copy(r.store, lambda *p: None, every, "dram", "redis")).foreign == 1
        moved = await manage_copy.move(r.store, lambda *p: None, every, "redis", "disk")
        assert (moved.already, moved.removed, moved.foreign, moved.missing, moved.failed) == (1, 1, 1, 0, {})
        done = await manage_copy.compress(r.store, lambda *p: None, every, "redis", "zstd")
        assert (done.done, done.foreign, done.missing) == (1, 1, 0)
        r.memory(0).values[key("theirs")].data[-1] ^= 1
        [dram] = await scrub.verify(r.store, lambda *p: None, tier="dram", repair=True)
        assert (dram.broken, dram.repaired) == (1, 0)
        assert [key("theirs") in held(r, tier) for tier in range(3)] == [False, True, True]
        assert not sum(slot.counts["corrupt"] for slot in r.store.slots[1:])


async def test_another_nodes_values_of_other_models_are_not_taken():
    """A tier that it shares with them lists them, too."""
    frame, pool = Transcoder(OTHER).raw_frame(chunk("theirs")), BufferPool(1 << 20)

    async def run(call: object, end: float, drop: object = None) -> object:
        buffer = pool.try_take(len(frame))
        assert buffer is not None
        buffer.view[:] = frame
        return buffer, Value(tier="dram")

    link = SimpleNamespace(server=SimpleNamespace(run=run))
    async with rig() as r:
        pull = Pull(r.store, link, to_tier="disk", from_tier="")  # type: ignore[arg-type]
        done = await pull.run(lambda *p: None, keys("theirs"), remove=True)
        assert (done.foreign, done.failed, done.removed, pool.lent_bytes) == (1, {}, 0, 0)


async def test_what_cannot_be_repaired_is_removed():
    """And counted."""
    async with rig(kinds=("dram",)) as r:
        await r.saved(0)
        r.memory(0).values[key(0)].data[-1] ^= 1
        [one] = await scrub.verify(r.store, lambda *p: None, repair=True)
        assert (one.broken, one.repaired) == (1, 0) and held(r, 0) == set()


# ---- export, import --------------------------------------------------------------------------------------------------


async def test_a_prefix_travels_in_a_file(tmp_path: Path):
    """Only what is there without a gap; another store of the same identity has it then, verified."""
    path = tmp_path / "prefix.kv"
    async with rig(TierConfig(url="dram:", codec="zstd"), kinds=("dram",)) as r:
        await r.saved(0, 1, 3)
        wrote = await portable.export(r.store, lambda *p: None, keys(0, 1, 2, 3), path)
        assert (wrote.num_chunks, wrote.num_tokens, wrote.num_bytes) == (2, 32, path.stat().st_size)
    async with rig() as r:
        told: Told = []
        read = await portable.import_(r.store, lambda *p: told.append(p), path, "disk")
        assert (read.num_chunks, read.stored, read.already, read.refused) == (2, 2, 0, {})
        assert held(r, 1) == set(keys(0, 1)) and told == [(1, 2), (2, 2)]
        assert await r.load(0, 1) == {0: "disk", 1: "disk"}
        assert (await portable.import_(r.store, lambda *p: None, path, "disk")).already == 2
        r.nothing_is_out()
    assert [p.name for p in tmp_path.iterdir()] == ["prefix.kv"]


async def test_two_exports_to_one_file_do_not_meet(tmp_path: Path):
    """It is the whole work of one of them."""
    path = tmp_path / "prefix.kv"
    async with rig(kinds=("dram",)) as r:
        await r.saved(0, 1)
        wrote = await asyncio.gather(*(portable.export(r.store, lambda *p: None, keys(0, 1), path) for _ in range(2)))
        assert [one.num_chunks for one in wrote] == [2, 2]
        assert (await portable.import_(r.store, lambda *p: None, path)).already == 2
    assert [p.name for p in tmp_path.iterdir()] == ["prefix.kv"]


async def test_a_file_that_is_not_whole_or_not_ours_is_refused(tmp_path: Path):
    """Every byte counts; nothing of such a file is taken."""
    path = tmp_path / "prefix.kv"
    async with rig(kinds=("dram",)) as r:
        await r.saved(0, 1)
        await portable.export(r.store, lambda *p: None, keys(0, 1), path)
    good = path.read_bytes()
    async with rig() as r:
        bad = [good[:-1], good + b"x", good[:100], b"", b"hello" + good, good[:8] + b"\2\0" + good[10:]]
        bad += [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(0, len(good), 97)]
        for data in bad:
            path.write_bytes(data)
            with pytest.raises(PortableError, match="prefix.kv") as refused:
                await portable.import_(r.store, lambda *p: None, path)
            assert "hello" not in str(refused.value), "what is in a file of others is nobody's business"
        assert held(r, 0) == set()
        with pytest.raises(PortableError, match="cannot read"):
            await portable.import_(r.store, lambda *p: None, tmp_path / "none")
        with pytest.raises(PortableError, match="cannot write"):
            await portable.export(r.store, lambda *p: None, keys(0), tmp_path / "no" / "such" / "dir")
    path.write_bytes(good)
    async with rig(identity=OTHER) as r:
        with pytest.raises(IdentityError, match=IDENTITY.hex()):
            await portable.import_(r.store, lambda *p: None, path)


# ---- on real tiers ---------------------------------------------------------------------------------------------------


async def test_all_verbs_on_memory_and_disk(tmp_path: Path):
    """The same effects on the tiers that serve."""
    settings = [
        TierConfig(url="dram:", capacity_gib=0.03125),
        TierConfig(url=f"file://{tmp_path}/slab", capacity_gib=0.0625, codec="zstd"),
    ]
    tiers = [await open_tier(t, SYSTEM_CLOCK) for t in settings]
    store = TieredStore(tiers, StoreConfig(tiers=settings), IDENTITY)
    r = Rig(store, [FaultyTier(t) for t in tiers])
    await store.open()
    try:
        await r.saved(0, 1, 2)
        assert [t.num_chunks for t in (await manage.lookup(store, keys(0, 1, 2))).tiers] == [3, 3]
        assert [p.pinned for p in await manage.pin(store, keys(0), 60.0)] == [1, 1]
        done = await manage_copy.compress(store, lambda *p: None, keys(0, 1), "disk", "raw")
        assert done.done == 2
        done = await manage_copy.move(store, lambda *p: None, keys(1, 2), "disk", "dram")
        assert (done.already, done.removed) == (2, 2)
        assert await r.found(0, 1, 2) == ["dram", "disk", "disk"]
        wrote = await portable.export(store, lambda *p: None, keys(0, 1, 2), tmp_path / "all.kv")
        assert wrote.num_chunks == 3
        assert [s.intact for s in await scrub.verify(store, lambda *p: None, repair=True)] == [1, 3]
        assert [c.removed for c in await manage.clear(store, lambda *p: None)] == [1, 3]
        assert (await portable.import_(store, lambda *p: None, tmp_path / "all.kv")).stored == 3
        assert list(await r.load(0, 1, 2)) == [0, 1, 2]
        r.nothing_is_out()
    finally:
        await store.close(r.soon)
