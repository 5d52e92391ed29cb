"""A disk tier's directory at its start: a damaged or cut table of ours is mended, files of others are left alone."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pdxfer.core.errors import ConfigError
from pdxfer.store.disk import DiskTier
from pdxfer.store.disk_table import HEADER_BYTES
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.testing.tier_kit import MIB, Opened, Wanted, key_of, value_of


async def tier_on(place: Path) -> Opened:
    tier = DiskTier(Wanted(capacity_bytes=4 * MIB).config(f"file://{place}"), FakeClock())
    await tier.open()
    return Opened(tier, FakeClock())


@pytest.mark.parametrize("sector", [0, 512])
async def test_one_damaged_copy_of_the_header_costs_nothing(tmp_path: Path, sector: int) -> None:
    t = await tier_on(tmp_path / "kv")
    await t.stored("a")
    await t.tier.close()
    with open(tmp_path / "kv" / "table", "r+b") as table:
        table.seek(sector)
        table.write(b"\xff" * 512)
    t = await tier_on(tmp_path / "kv")
    assert await t.get(key_of("a")) == value_of("a", 1000)
    await t.tier.close()


def _zeros(head: bytearray) -> None:
    head[:] = bytes(len(head))


def _garbage(head: bytearray) -> None:
    head[:] = b"\xff" * len(head)


def _one_bit_each(head: bytearray) -> None:
    head[4] ^= 1
    head[512 + 16] ^= 1


@pytest.mark.parametrize("damage", [_zeros, _garbage, _one_bit_each])
async def test_a_damaged_header_of_ours_is_written_again(
    tmp_path: Path, damage: Callable[[bytearray], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Both copies of it: entries have checks of their own, so the values are still there, also at the next start."""
    t = await tier_on(tmp_path / "kv")
    await t.stored("a")
    await t.tier.close()
    raw = bytearray((tmp_path / "kv" / "table").read_bytes())
    head = raw[:HEADER_BYTES]
    damage(head)
    (tmp_path / "kv" / "table").write_bytes(head + raw[HEADER_BYTES:])
    caplog.set_level("WARNING")
    for _ in range(2):
        t = await tier_on(tmp_path / "kv")
        assert await t.get(key_of("a")) == value_of("a", 1000)
        await t.tier.close()
    assert (tmp_path / "kv" / "table").read_bytes() == raw
    assert caplog.text.count("is damaged") == (damage is not _zeros)


@pytest.mark.parametrize("length", [0, 3, 4, 16, 24, 30, 32, 600, 4095, 4096, 4096 + 100, 4096 + 256])
async def test_a_table_that_was_cut_is_ours(tmp_path: Path, length: int) -> None:
    """Values whose entries were cut off are misses; the next ones are kept."""
    t = await tier_on(tmp_path / "kv")
    await t.stored("a", "b")
    await t.tier.close()
    with open(tmp_path / "kv" / "table", "r+b") as table:
        table.truncate(length)
    if length == 3:
        with pytest.raises(ConfigError, match="is not the table of a disk tier"):
            await tier_on(tmp_path / "kv")
        return
    t = await tier_on(tmp_path / "kv")
    assert await t.holds("a", "b") == [length == 4096 + 256, False]
    await t.stored("c")
    await t.tier.close()
    t = await tier_on(tmp_path / "kv")
    assert await t.holds("b", "c") == [False, True]
    await t.tier.close()


@pytest.mark.parametrize("theirs", [b"a,b,c\n1,2,3\n", bytes(5000) + b"PDXE of a disk image" * 1000, b"PDXE" * 5000])
async def test_files_of_others_are_not_touched(tmp_path: Path, theirs: bytes) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "table").write_bytes(theirs)
    for _ in range(2):
        with pytest.raises(ConfigError, match="is not the table of a disk tier") as refused:
            await tier_on(tmp_path / "kv")
        assert repr(theirs[:3])[:-1] not in str(refused.value), "what is in it is nobody's business"
    assert (tmp_path / "kv" / "table").read_bytes() == theirs


async def test_a_slab_of_others_is_not_touched(tmp_path: Path) -> None:
    """A slab has no mark; ours has a lock beside it, so a table that was removed costs its values only."""
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "slab").write_bytes(b"theirs" * 1000)
    for _ in range(2):
        with pytest.raises(ConfigError, match="is not the slab of a disk tier"):
            await tier_on(tmp_path / "kv")
    assert (tmp_path / "kv" / "slab").read_bytes() == b"theirs" * 1000
    t = await tier_on(tmp_path / "ours")
    await t.stored("a")
    await t.tier.close()
    (tmp_path / "ours" / "table").unlink()
    t = await tier_on(tmp_path / "ours")
    assert await t.holds("a") == [False]
    await t.tier.close()
