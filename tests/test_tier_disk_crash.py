"""Killed or cut off at any point, the disk tier comes back with whole values, and with all its room.

Also that these tests can fail: the same checks on mutants, which write the entry before the payload, or do not erase
the entries of values they overwrite.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from disk_faults import DyingFiles, PowerFiles

from pdxfer.store.base import Outcome
from pdxfer.store.disk import DiskTier
from pdxfer.store.disk_files import FileLayer, OsFiles, stage, write_all
from pdxfer.store.disk_index import Record
from pdxfer.store.disk_slab import Slab, _pieces
from pdxfer.store.disk_table import slot_offset
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.testing.tier_kit import MIB, Opened, Wanted, key_of, on_pages, value_of

CAPACITY = 3 * MIB // 2
NEVER = 1 << 30


def size_of(name: int) -> int:
    """Sizes from one byte to a third of the slab."""
    return random.Random(name).choice((1, 20_000, 100_000, 250_000, 400_000))


def tier_at(where: Path, files: FileLayer, **options: str) -> DiskTier:
    """Small enough that most puts evict."""
    return DiskTier(Wanted(capacity_bytes=CAPACITY).config(f"file://{where}", **options), FakeClock(), files=files)


async def use(t: Opened, num_steps: int, stop: Callable[[], bool]) -> set[int]:
    """Puts (copied, and from where the value lies), deletes, pins, the same in every run; names visible at the end."""
    chance = random.Random(3)
    names: set[int] = set()
    for step in range(num_steps):
        name = step if chance.random() < 0.8 else chance.randrange(step + 1)
        match chance.randrange(8):
            case 0:
                await t.tier.delete([key_of(name)], t.soon)
            case 1:
                await t.tier.pin([key_of(name)], 5.0, t.soon)
            case 2 | 3 | 4:
                await t.tier.put(key_of(name), [on_pages(value_of(name, size_of(name)))], t.soon)
            case _:
                await t.put(key_of(name), value_of(name, size_of(name)))
        names.add(name)
        t.clock.advance(1.0)
        if stop():
            break
    held = await t.holds(*sorted(names))
    return {name for name, there in zip(sorted(names), held, strict=True) if there}


async def reopened(where: Path, num_steps: int) -> tuple[set[int], dict[str, int]]:
    """What a new process finds: whole values only, and all of the room. Names, and what was counted as damage."""
    tier = tier_at(where, OsFiles())
    await tier.open()
    t = Opened(tier, FakeClock())
    found = set()
    for name in range(num_steps):
        value = await t.get(key_of(name))
        if value is not None:
            assert value == value_of(name, size_of(name)), f"wrong bytes under {name}"
            found.add(name)
    damage = tier.stats().failures
    await t.tier.delete([key_of(name) for name in range(num_steps)], t.soon)
    assert tier.stats().used_bytes == 0
    room = 300 * 4096
    assert await t.put(key_of("all"), bytes(room)) is Outcome.STORED, "room was lost"
    await tier.close()
    return found, damage


async def killed_at(where: Path, change: int, num_steps: int) -> tuple[int, dict[str, int]]:
    """Run, die in this change, come back; how many changes there were, and the damage found."""
    files = DyingFiles(change)
    tier = tier_at(where, files)
    await tier.open()
    visible = await use(Opened(tier, FakeClock()), num_steps, lambda: files.dead)
    await tier.close()
    found, damage = await reopened(where, num_steps)
    assert damage or visible <= found, f"lost {visible - found}"
    return files.changes, damage


async def all_deaths(tmp_path: Path, num_steps: int, every: int) -> dict[str, int]:
    """Die in each `every`-th change; damage found, added up."""
    total: dict[str, int] = {}
    changes, damage = await killed_at(tmp_path / "whole", NEVER, num_steps)
    assert changes > num_steps and not damage
    for change in range(4, changes, every):
        _, damage = await killed_at(tmp_path / str(change), change, num_steps)
        for reason, times in damage.items():
            total[reason] = total.get(reason, 0) + times
    return total


async def test_killed_in_any_write_it_comes_back_whole(tmp_path: Path) -> None:
    """No wrong byte, nothing damaged, nothing visible lost, no room lost."""
    assert await all_deaths(tmp_path, num_steps=40, every=11) == {}


@pytest.mark.slow
async def test_killed_in_every_write_of_a_longer_run(tmp_path: Path) -> None:
    assert await all_deaths(tmp_path, num_steps=60, every=1) == {}


def entry_first(self: Slab, record: Record, block: memoryview, parts: Sequence[memoryview]) -> None:
    """Mutant of Slab.write: visible before complete."""
    self.flush()
    record.digest = stage(block, parts, record.num_bytes)
    self._write_entry(record)
    for offset, piece in _pieces(record, block):
        write_all(self._files, self._at.slab, piece, offset)


def nothing_erased(self: Slab, record: Record, block: memoryview, parts: Sequence[memoryview]) -> None:
    """Mutant of Slab.write: entries of overwritten values stay."""
    record.digest = stage(block, parts, record.num_bytes)
    for offset, piece in _pieces(record, block):
        write_all(self._files, self._at.slab, piece, offset)
    self._write_entry(record)


@pytest.mark.parametrize("mutant", [entry_first, nothing_erased])
async def test_a_wrong_order_of_writes_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: Callable[..., None]
) -> None:
    """The test above sees damage in both mutants, and even they serve no wrong byte: the checks turn it into misses."""
    monkeypatch.setattr(Slab, "write", mutant)
    damage: dict[str, int] = {}
    for change in range(20, 60, 2):
        _, found = await killed_at(tmp_path / str(change), change, 40)
        damage |= found
    assert damage.keys() & {"corrupt", "dropped"}, "the mutant was not noticed"


@pytest.mark.parametrize("durable", ["false", "true"])
async def test_a_power_cut_leaves_no_wrong_byte(tmp_path: Path, durable: str) -> None:
    """Unsynced sectors are lost at random, in any order. `durable`: what put said was stored is there."""
    for seed in range(12):
        files = PowerFiles()
        where = tmp_path / f"{seed}-before"
        tier = tier_at(where, files, durable=durable)
        await tier.open()
        visible = await use(Opened(tier, FakeClock()), 10 + 2 * seed, lambda: False)
        files.cut(tmp_path / str(seed), random.Random(seed))
        await tier.close()
        found, _damage = await reopened(tmp_path / str(seed), 40)
        if durable == "true":
            assert visible <= found


# -- damage made by hand ---------------------------------------------------------------------------------------


async def three_values(where: Path) -> None:
    """Values a, b, c of 20,000 bytes in slots 0, 1, 2 and blocks 0-4, 5-9, 10-14."""
    tier = tier_at(where, OsFiles())
    await tier.open()
    await Opened(tier, FakeClock()).stored("a", "b", "c", num_bytes=20_000)
    await tier.close()


def damage_file(path: Path, offset: int, data: bytes | None = None) -> None:
    """Overwrite, or flip one bit."""
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(data or b"x")] = data or bytes([raw[offset] ^ 1])
    path.write_bytes(raw)


DAMAGE = {
    "bit in the payload": ("slab", 5 * 4096 + 777, None, "corrupt"),
    "last bit of the payload": ("slab", 5 * 4096 + 19_999, None, "corrupt"),
    "torn sector of payload": ("slab", 6 * 4096 + 512, b"\xff" * 512, "corrupt"),
    "bit in the key": ("table", slot_offset(1) + 60, None, "entry"),
    "bit in the length": ("table", slot_offset(1) + 24, None, "entry"),
    "bit in the extents": ("table", slot_offset(1) + 121, None, "entry"),
    "bit in the digest": ("table", slot_offset(1) + 50, None, "entry"),
    "bit in the magic": ("table", slot_offset(1), None, "entry"),
    "half an entry": ("table", slot_offset(1) + 128, b"\0" * 128, "entry"),
}


@pytest.mark.parametrize("what", DAMAGE)
async def test_damage_is_a_counted_miss_of_the_value_it_hits(tmp_path: Path, what: str) -> None:
    name, offset, data, reason = DAMAGE[what]
    await three_values(tmp_path / "kv")
    damage_file(tmp_path / "kv" / name, offset, data)
    tier = tier_at(tmp_path / "kv", OsFiles())
    await tier.open()
    t = Opened(tier, FakeClock())
    values = [await t.get(key_of(name)) for name in "abc"]
    assert values == [value_of("a", 20_000), None, value_of("c", 20_000)]
    stats = tier.stats()
    assert (stats.failures.get(reason), stats.misses, stats.num_values) == (1, 1, 2)
    await t.stored("b", num_bytes=20_000)
    await tier.close()


async def test_values_swapped_on_disk_are_misses(tmp_path: Path) -> None:
    """Payload of c where that of b was, and an entry copied into another slot."""
    await three_values(tmp_path / "kv")
    slab, table = (tmp_path / "kv" / name for name in ("slab", "table"))
    damage_file(slab, 5 * 4096, slab.read_bytes()[10 * 4096 : 15 * 4096])
    damage_file(table, slot_offset(3), table.read_bytes()[slot_offset(0) : slot_offset(1)])
    tier = tier_at(tmp_path / "kv", OsFiles())
    await tier.open()
    t = Opened(tier, FakeClock())
    assert [await t.get(key_of(name)) for name in "abc"] == [value_of("a", 20_000), None, value_of("c", 20_000)]
    assert tier.stats().failures == {"entry": 1, "corrupt": 1}
    await tier.close()


async def test_a_slab_cut_short_costs_what_was_behind_the_cut(tmp_path: Path) -> None:
    await three_values(tmp_path / "kv")
    with open(tmp_path / "kv" / "slab", "r+b") as slab:
        slab.truncate(7 * 4096)
    tier = tier_at(tmp_path / "kv", OsFiles())
    await tier.open()
    t = Opened(tier, FakeClock())
    assert await t.holds("a", "b", "c") == [True, False, False]
    await t.stored("b", "c", num_bytes=20_000)
    await tier.close()


async def test_gets_under_heavy_eviction_never_show_a_reused_place(tmp_path: Path) -> None:
    """Readers and writers of values that chase each other out: right bytes or a miss."""
    tier = tier_at(tmp_path / "kv", OsFiles(), threads="8")
    await tier.open()
    t = Opened(tier, FakeClock())
    values = {name: value_of(name, size_of(name)) for name in range(24)}

    async def read(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(60):
            name = chance.randrange(24)
            assert await t.get(key_of(name)) in (None, values[name])

    async def write(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(40):
            name = chance.randrange(24)
            await t.put(key_of(name), values[name])

    await asyncio.gather(*(read(seed) for seed in range(6)), *(write(seed) for seed in range(4)))
    assert tier.stats().failures == {} and tier.stats().evictions > 0
    await t.all_returned()
    await tier.close()
