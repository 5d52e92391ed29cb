"""The disk tier's files: golden bytes of the table, versions, other capacities, options."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash
from disk_faults import FaultyFiles

from pdxfer.core.errors import ConfigError
from pdxfer.store.base import Outcome
from pdxfer.store.disk import DiskTier
from pdxfer.store.disk_files import FileLayer, OsFiles
from pdxfer.store.disk_index import FOREVER, Record, kept_tenant
from pdxfer.store.disk_table import HEADER_BYTES, pack_entry, pack_header, unpack_entry
from pdxfer.store.open import open_tier
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.testing.tier_kit import MIB, Opened, Wanted, key_of, on_pages, value_of

SIZE = 200_000


async def tier_on(place: Path, capacity: int = 4 * MIB, files: FileLayer | None = None, **options: str) -> Opened:
    tier = DiskTier(Wanted(capacity_bytes=capacity).config(f"file://{place}", **options), FakeClock(), files=files)
    await tier.open()
    return Opened(tier, FakeClock())


# -- format ------------------------------------------------------------------------------------------------------------

RECORD = Record(
    key=bytes(range(32)),
    num_bytes=9000,
    tenant="acme",
    created_wall=1_700_000_000.5,
    pin_until=FOREVER,
    digest=0x1122334455667788,
    generation=7,
    slot=3,
    extents=((10, 2), (99, 1)),
)
GOLDEN_ENTRY = (
    "504458450200000003000000000000000700000000000000282300000000000000002040fc54d9410000"
    "00000000f07f8877665544332211000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    "61636d65" + "00" * 28 + "0a000000020000006300000001000000" + "00" * 112
)


def test_an_entry_has_these_bytes() -> None:
    """Changing one needs a new version in disk_table.py."""
    packed = pack_entry(RECORD)
    assert packed[:248].hex() == GOLDEN_ENTRY
    assert packed[248:] == struct.pack("<Q", xxhash.xxh3_64_intdigest(packed[:248]))
    back = unpack_entry(packed, 3)
    assert back is not None and pack_entry(back) == packed
    assert unpack_entry(packed, 4) is None, "an entry copied into another slot is damage"


def test_the_header_has_these_bytes() -> None:
    header = pack_header()
    copy = bytes.fromhex("50445854010000010010000000000000" + "00" * 8)
    copy += struct.pack("<Q", xxhash.xxh3_64_intdigest(copy))
    assert header == copy.ljust(512, b"\0") + copy.ljust(HEADER_BYTES - 512, b"\0")


async def test_another_version_is_refused_with_both_numbers(tmp_path: Path) -> None:
    t = await tier_on(tmp_path / "kv")
    await t.tier.close()
    table = tmp_path / "kv" / "table"
    raw = bytearray(table.read_bytes())
    for at in (0, 512):
        raw[at + 4 : at + 6] = struct.pack("<H", 2)
        raw[at + 24 : at + 32] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(raw[at : at + 24])))
    table.write_bytes(raw)
    with pytest.raises(ConfigError, match=r"has format version 2 .* this pdxfer reads version 1"):
        await tier_on(tmp_path / "kv")
    assert table.read_bytes() == raw, "nothing of it is touched"


@pytest.mark.parametrize(("kind", "name"), [("lmdb", "kv/data.mdb"), ("sqlite", "kv")])
async def test_a_file_that_is_not_the_librarys_is_refused(tmp_path: Path, kind: str, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"something else" * 1000)
    with pytest.raises(ConfigError, match="is not an"):
        await open_tier(Wanted(capacity_bytes=8 * MIB).config(f"{kind}://{tmp_path}/kv"), FakeClock())


# -- capacity and room -------------------------------------------------------------------------------------------------


def usage(place: Path) -> int:
    """The larger of apparent and allocated bytes."""
    stats = [path.stat() for path in (place, *place.iterdir())]
    return max(sum(stat.st_size for stat in stats), sum(512 * stat.st_blocks for stat in stats))


async def test_a_smaller_capacity_holds_from_the_start(tmp_path: Path) -> None:
    """What is beyond it is dropped and counted; a larger one keeps everything."""
    t = await tier_on(tmp_path / "kv", 8 * MIB)
    await t.stored(*range(30), num_bytes=SIZE)
    await t.tier.close()
    t = await tier_on(tmp_path / "kv", 3 * MIB)
    assert usage(tmp_path / "kv") <= 3 * MIB
    kept = (await t.holds(*range(30))).count(True)
    assert 10 <= kept and t.tier.stats().failures == {"dropped": 30 - kept}
    await t.stored(*range(100, 120), num_bytes=SIZE)
    assert usage(tmp_path / "kv") <= 3 * MIB
    held = [n for n in range(100, 120) if (await t.holds(n))[0]]
    await t.tier.close()
    t = await tier_on(tmp_path / "kv", 16 * MIB)
    assert all(await t.holds(*held))
    await t.tier.close()


async def test_values_of_all_sizes_use_the_whole_capacity(tmp_path: Path) -> None:
    """No size classes to strand it: after small values, large ones take their room, and the other way round."""
    t = await tier_on(tmp_path / "kv", 8 * MIB)
    for size, least in ((60_000, 0.9), (3_000_000, 0.7), (300_000, 0.9), (20_000, 0.27), (1_000_000, 0.85)):
        await t.stored(*(f"{size}-{n}" for n in range(2 * 8 * MIB // size)), num_bytes=size)
        names = [f"{size}-{n}" for n in range(2 * 8 * MIB // size)]
        held = (await t.holds(*names)).count(True) * size
        assert held >= least * 8 * MIB, f"{size}: {held / 8 / MIB:.2f} of the capacity"
    await t.tier.close()


async def test_values_smaller_than_planned_run_out_of_slots_not_of_order(tmp_path: Path) -> None:
    """With `value_kib` larger than the values, the oldest go when the table is full."""
    t = await tier_on(tmp_path / "kv", 8 * MIB, value_kib="64")
    await t.stored(*range(300), num_bytes=100)
    assert (await t.holds(*range(300))) == [False] * 172 + [True] * 128
    await t.tier.close()
    t = await tier_on(tmp_path / "more", 8 * MIB, value_kib="4")
    await t.stored(*range(300), num_bytes=100)
    assert all(await t.holds(*range(300)))
    await t.tier.close()


async def test_tenants_and_ages_survive_a_restart(tmp_path: Path) -> None:
    long = "a tenant with a name of more than 32 bytes, ü"
    t = await tier_on(tmp_path / "kv")
    await t.stored("a", tenant=long)
    await t.stored("b", tenant="short")
    before = await t.entries("a", "b")
    await t.tier.close()
    t = await tier_on(tmp_path / "kv")
    assert await t.entries("a", "b") == before
    assert [entry and entry.tenant for entry in before] == [kept_tenant(long), "short"]
    await t.tier.close()
    assert len(kept_tenant(long).encode()) <= 32 and kept_tenant(long) != kept_tenant(long + "x")


# -- options -----------------------------------------------------------------------------------------------------------


class NoDirect(FaultyFiles):
    """A filesystem that refuses O_DIRECT: at open, or at the first read."""

    def __init__(self, at_open: bool) -> None:
        super().__init__()
        self._at_open = at_open
        self._direct: set[int] = set()

    def open(self, path: str, flags: int) -> int:
        direct = bool(flags & 0o40000)
        if direct and self._at_open:
            raise OSError(22, "EINVAL")
        fd = super().open(path, flags)
        self._direct.discard(fd)
        if direct:
            self._direct.add(fd)
        return fd

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        if fd in self._direct:
            raise OSError(22, "EINVAL")
        return super().read(fd, view, offset)


@pytest.mark.parametrize("at_open", [True, False])
async def test_without_o_direct_it_is_buffered(tmp_path: Path, at_open: bool) -> None:
    t = await tier_on(tmp_path / "kv", files=NoDirect(at_open))
    await t.stored("a", num_bytes=SIZE)
    assert await t.get(key_of("a")) == value_of("a", SIZE)
    assert "buffered" in repr(t.tier)
    await t.tier.close()


class Looking(OsFiles):
    """Remembers what was written into the slab, and from which memory."""

    def __init__(self) -> None:
        self.slab = -1
        self.written: list[tuple[bytes, list[memoryview]]] = []

    def open(self, path: str, flags: int) -> int:
        fd = super().open(path, flags)
        if path.endswith("slab"):
            self.slab = fd
        return fd

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        if fd == self.slab:
            self.written.append((b"".join(views), list(views)))
        return super().write(fd, views, offset)


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 3 * 4096, 200_000])
@pytest.mark.parametrize("scattered", [False, True])
async def test_a_value_on_whole_pages_is_written_from_there(tmp_path: Path, size: int, scattered: bool) -> None:
    """One write an extent, and no copy, but of the rest of the last page; what is behind it in the slab is zeros."""
    files = Looking()
    t = await tier_on(tmp_path / "kv", MIB, files)
    if scattered:  # in runs of 8 blocks, two of them neighbours
        names = []
        while not t.tier.stats().evictions:
            names.append(len(names))
            await t.stored(names[-1], num_bytes=8 * 4096)
        await t.tier.delete([key_of(name) for name in names[1::2]], t.soon)
    files.written.clear()
    value = on_pages(value_of("a", size))
    assert await t.tier.put(key_of("a"), [value], t.soon) is Outcome.STORED
    assert await t.get(key_of("a")) == value_of("a", size)
    assert b"".join(data for data, _ in files.written) == value_of("a", size).ljust(-(-size // 4096) * 4096, b"\0")
    views = [view for _, views in files.written for view in views]
    copied = [view for view in views if not np.shares_memory(np.asarray(view), np.asarray(value))]
    assert sum(len(view) for view in copied) == (4096 if size % 4096 else 0)
    assert (len(files.written) > 1) is (scattered and size > 20 * 4096)
    await t.tier.close()


async def test_durable_syncs_before_the_entry_and_after(tmp_path: Path) -> None:
    files = FaultyFiles()
    t = await tier_on(tmp_path / "kv", files=files, durable="true")
    await t.stored("a")
    assert files.calls["sync"] == 2
    files.errors["sync"] = 5
    assert await t.put(key_of("b"), b"x") is Outcome.FAILED
    await t.tier.close()


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("file://relative/dir", {}, "not an absolute path"),
        ("file:///tmp/a,/tmp/a", {}, "names a directory twice"),
        ("file:///tmp/a", {"durabel": "true"}, "did you mean 'durable'"),
        ("file:///tmp/a", {"durable": "maybe"}, "use true or false"),
        ("file:///tmp/a", {"threads": "0"}, "must be a number >= 1"),
        ("lmdb:///tmp/a,/tmp/b", {}, "takes one"),
        ("sqlite:///tmp/a", {"threads": "2"}, "unknown setting 'threads'"),
    ],
)
async def test_wrong_settings_say_what_to_change(url: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await open_tier(Wanted(capacity_bytes=8 * MIB).config(url, **options), FakeClock())


async def test_places_that_cannot_be_used_are_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be used.*give store.tiers"):
        await tier_on(tmp_path / "file" / "kv")
    with pytest.raises(ConfigError, match="at least"):
        await tier_on(tmp_path / "kv", capacity=100_000)
    files = FaultyFiles()
    files.errors["open"] = 13
    with pytest.raises(ConfigError, match="cannot be used"):
        await tier_on(tmp_path / "kv", files=files)


async def test_the_real_layer_is_what_runs_by_default(tmp_path: Path) -> None:
    t = await tier_on(tmp_path / "kv", files=OsFiles())
    await t.stored("a")
    await t.tier.close()
