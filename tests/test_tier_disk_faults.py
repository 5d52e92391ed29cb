"""Whatever goes wrong with the disk is a miss and a counter; the tier works again when the disk does."""

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from disk_faults import FaultyFiles

from pdxfer.core.errors import ConfigError
from pdxfer.store.base import Outcome
from pdxfer.store.disk import DiskTier, home_of
from pdxfer.store.disk_files import OsFiles
from pdxfer.store.disk_slab import GROW_AGAIN_S
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.testing.tier_kit import MIB, Opened, Wanted, key_of, on_pages, until, value_of

SIZE = 200_000


@asynccontextmanager
async def opened(
    url: str, files: OsFiles, clock: FakeClock | None = None, capacity: int = 4 * MIB, **options: str
) -> AsyncIterator[Opened]:
    """A tier on `url`, closed at the end, when everything lent is back."""
    clock = clock or FakeClock()
    tier = DiskTier(Wanted(capacity_bytes=capacity).config(url, **options), clock, files=files)
    await tier.open()
    t = Opened(tier, clock)
    yield t
    await t.all_returned()
    await tier.close()


async def put(t: Opened, name: object, num_bytes: int = SIZE) -> Outcome:
    return await t.put(key_of(name), value_of(name, num_bytes))


async def back(t: Opened) -> None:
    """Time passes, calls come, the tier finds its disk again."""
    t.clock.advance(1.5)
    await t.holds("anything")
    await until(lambda: t.tier.stats().reachable, "the tier to find its disk")


@contextmanager
def the_loop_goes_on(seconds: int) -> Iterator[None]:
    """AssertionError where the event loop's thread is when it has not come out of this after so long."""

    def stalled(*_: object) -> None:
        raise AssertionError("the event loop stood still")

    before = signal.signal(signal.SIGALRM, stalled)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# -- errors of system calls -------------------------------------------------------------------------------------------


async def test_a_disk_that_fills_up_lets_values_replace_each_other(tmp_path: Path) -> None:
    """The slab grows with use; where it cannot, what is there is reused, and it grows again when there is room."""
    files = FaultyFiles()
    async with opened(f"file://{tmp_path}/kv", files) as t:
        await t.stored(*range(4), num_bytes=SIZE)
        files.errors["allocate"] = errno.ENOSPC
        await t.stored(*range(10, 24), num_bytes=SIZE)
        stats = t.tier.stats()
        assert stats.failures == {"no_space": 1} and stats.evictions >= 8 and stats.reachable
        t.clock.advance(GROW_AGAIN_S)
        await t.stored(30, num_bytes=SIZE)
        assert t.tier.stats().failures == {"no_space": 2}
        files.errors.clear()
        t.clock.advance(GROW_AGAIN_S)
        evicted = t.tier.stats().evictions
        await t.stored(*range(40, 44), num_bytes=SIZE)
        assert t.tier.stats().evictions == evicted


async def test_a_put_that_comes_as_the_slab_has_just_grown_does_not_stall_the_loop(tmp_path: Path) -> None:
    """The growth's thread has ended, the loop does not know yet, and a put asks for room: the event loop goes on."""
    growing = threading.Event()

    class SlowToGrow(OsFiles):
        def allocate(self, fd: int, offset: int, length: int) -> None:
            growing.wait()
            super().allocate(fd, offset, length)

    tier = DiskTier(
        Wanted(capacity_bytes=4 * MIB).config(f"file://{tmp_path}/kv", threads="1"), FakeClock(), files=SlowToGrow()
    )
    growing.set()
    await tier.open()
    growing.clear()
    t = Opened(tier, FakeClock())
    first = asyncio.ensure_future(put(t, "first"))
    shelf = tier._parts[0]._shelf
    await until(lambda: shelf.jobs.running > 0, "the slab to start growing")
    growing.set()
    shelf.jobs._pool.submit(int).result()  # runs after the growth, in the only thread
    second = asyncio.ensure_future(put(t, "second"))
    with the_loop_goes_on(20):
        assert await asyncio.gather(first, second) == [Outcome.STORED, Outcome.STORED]
    await tier.close()


async def test_a_disk_without_any_room_takes_nothing(tmp_path: Path) -> None:
    files = FaultyFiles()
    async with opened(f"file://{tmp_path}/kv", files) as t:
        files.errors["allocate"] = errno.ENOSPC
        assert await put(t, "a") is Outcome.FAILED
        assert await put(t, "a") is Outcome.FULL
        files.errors.clear()
        t.clock.advance(GROW_AGAIN_S)
        assert await put(t, "a") is Outcome.STORED


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "no_space"),
        (errno.EDQUOT, "no_space"),
        (errno.EIO, "io_error"),
        (errno.EROFS, "read_only"),
        (errno.ESTALE, "vanished"),
    ],
)
async def test_a_write_that_fails_is_counted_and_the_next_may_succeed(tmp_path: Path, number: int, reason: str) -> None:
    """What was stored before is still served; room is not lost."""
    files = FaultyFiles()
    async with opened(f"file://{tmp_path}/kv", files) as t:
        await t.stored("before", num_bytes=SIZE)
        files.errors["write"] = number
        for name in range(30):
            assert await put(t, name) is Outcome.FAILED
        assert await t.tier.delete([key_of("before")], t.soon) == 1
        assert t.tier.stats().failures == {reason: 31}
        assert t.tier.stats().used_bytes == 0
        files.errors.clear()
        await t.stored(*range(12), num_bytes=SIZE)
        assert await t.get(key_of(3)) == value_of(3, SIZE)


async def test_only_the_table_fails_and_nothing_becomes_visible(tmp_path: Path) -> None:
    files = FaultyFiles()
    files.only = lambda path: path.endswith("table")
    async with opened(f"file://{tmp_path}/kv", files) as t:
        files.errors["write"] = errno.EIO
        assert await put(t, "a") is Outcome.FAILED
        assert await t.get(key_of("a")) is None
    async with opened(f"file://{tmp_path}/kv", OsFiles()) as t:
        assert await t.holds("a") == [False]


async def test_a_read_that_fails_is_a_miss_and_the_value_stays_for_a_while(tmp_path: Path) -> None:
    files = FaultyFiles()
    async with opened(f"file://{tmp_path}/kv", files) as t:
        await t.stored("a", num_bytes=SIZE)
        files.errors["read"] = errno.EIO
        assert await t.get(key_of("a")) is None
        assert await t.get(key_of("a")) is None
        files.errors.clear()
        assert await t.get(key_of("a")) == value_of("a", SIZE)
        files.errors["read"] = errno.EIO
        for _ in range(3):
            assert await t.get(key_of("a")) is None
        files.errors.clear()
        assert await t.holds("a") == [False], "a place that fails again and again is given up"
        stats = t.tier.stats()
        assert (stats.failures, stats.misses) == ({"io_error": 5}, 5)
        assert t.tier.take_evicted() == [key_of("a")]  # type: ignore[attr-defined]


async def test_a_hung_disk_costs_no_call_more_than_its_deadline(tmp_path: Path) -> None:
    """Buffers and places come back with the threads; what was late is not visible."""
    files = FaultyFiles()
    async with opened(f"file://{tmp_path}/kv", files) as t:
        await t.stored("a", num_bytes=SIZE)
        files.hanging = True
        soon = t.clock.now() + 0.02
        assert await t.tier.get(key_of("a"), soon) is None
        assert await t.tier.put(key_of("b"), [value_of("b", SIZE)], soon) is Outcome.LATE
        assert await t.tier.put(key_of("b"), [value_of("b", SIZE)], soon) is Outcome.LATE
        got = await t.tier.reserve(key_of("c"), SIZE, soon)
        assert not isinstance(got, Outcome)
        async with got as reservation:
            assert await reservation.commit() is Outcome.LATE
        assert await t.holds("a", "b", "c") == [True, False, False]
        assert t.tier.stats().failures == {"late": 3}
        files.hanging = False
        files.hang.set()
        await until(lambda: t.tier.stats().used_bytes < 2 * SIZE, "places of late values to come back")
        assert await t.get(key_of("a")) == value_of("a", SIZE)
        assert await put(t, "b") is Outcome.STORED
    async with opened(f"file://{tmp_path}/kv", OsFiles()) as t:
        assert await t.holds("a", "b", "c") == [True, True, False]


async def test_a_disk_that_hangs_in_its_table_does_not_hold_up_the_loop(tmp_path: Path) -> None:
    """What is deleted or evicted meanwhile needs no thread; its entries are erased when the disk goes on."""
    files = FaultyFiles()
    async with opened(f"file://{tmp_path}/kv", files) as t:
        while not t.tier.stats().evictions:
            await t.stored(t.tier.stats().puts, num_bytes=SIZE)
        last = t.tier.stats().puts - 1
        files.hung, files.hanging = (lambda call, path: path.endswith("table")), True
        hung = asyncio.ensure_future(put(t, "hung"))
        await until(lambda: files.waiting, "a put to hang in the table")
        evictions = t.tier.stats().evictions
        with the_loop_goes_on(10):
            assert await t.tier.delete([key_of(last)], t.clock.now() + 0.05) == 1
            for name in ("in its place", "in another's"):
                late = t.tier.put(key_of(name), [value_of(name, SIZE)], t.clock.now() + 0.05)
                assert await late is Outcome.LATE
        assert t.tier.stats().evictions > evictions
        there = await t.holds(*range(last + 1))
        assert there.count(True) >= 8 and not there[last]
        files.hanging = False
        files.hang.set()
        assert await hung is Outcome.STORED
        assert await put(t, "after") is Outcome.STORED
        there = await t.holds(*range(last + 1))
    async with opened(f"file://{tmp_path}/kv", OsFiles()) as t:
        assert await t.holds(*range(last + 1)) == there
        assert await t.holds("hung", "after", "in its place", "in another's") == [True, True, False, False]
        assert not t.tier.stats().failures


async def test_memory_that_is_used_again_after_a_late_put_is_never_a_value(tmp_path: Path) -> None:
    """The thread that hangs may still write from it."""
    files = FaultyFiles()
    async with opened(f"file://{tmp_path}/kv", files) as t:
        await t.stored("a", num_bytes=SIZE)
        files.hanging = True
        value = on_pages(value_of("b", SIZE))
        assert await t.tier.put(key_of("b"), [value], t.clock.now() + 0.02) is Outcome.LATE
        value[:] = bytes(SIZE)
        files.hanging = False
        files.hang.set()
        await until(lambda: t.tier.stats().used_bytes < 2 * SIZE, "the place of the late value to come back")
        assert await t.holds("a", "b") == [True, False]
    async with opened(f"file://{tmp_path}/kv", OsFiles()) as t:
        assert await t.holds("a", "b") == [True, False]
        assert not t.tier.stats().failures


async def test_cancelled_calls_give_everything_back(tmp_path: Path) -> None:
    """At any moment: what was cancelled is stored and readable, or not there; no buffer, place or key stays."""
    async with opened(f"file://{tmp_path}/kv", OsFiles()) as t:
        await t.stored("a", num_bytes=SIZE)
        for turns in range(60):
            name = f"v{turns}"
            calls = [
                asyncio.ensure_future(t.tier.put(key_of(name), [on_pages(value_of(name, SIZE))], t.soon)),
                asyncio.ensure_future(t.tier.get(key_of("a"), t.soon)),
            ]
            for _ in range(turns):
                await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            ended = await asyncio.gather(*calls, return_exceptions=True)
            if not isinstance(ended[1], BaseException):
                assert ended[1] is not None
                ended[1].release()
            await until(lambda: not t.tier._parts[0]._pool.lent_bytes, "buffers to come back")  # type: ignore[attr-defined]
            assert await t.get(key_of(name)) in (None, value_of(name, SIZE))
            if isinstance(ended[0], asyncio.CancelledError):
                assert await put(t, name) in (Outcome.STORED, Outcome.ALREADY)
            assert await t.get(key_of(name)) == value_of(name, SIZE)
            await t.tier.delete([key_of(name)], t.soon)
        assert not t.tier.stats().failures


async def test_gets_beyond_the_buffers_wait_and_are_misses_at_their_deadline(tmp_path: Path) -> None:
    async with opened(f"file://{tmp_path}/kv", FaultyFiles(), buffers_mib="1") as t:
        await t.stored("a", "b", num_bytes=700_000)
        lease = await t.tier.get(key_of("a"), t.soon)
        assert lease is not None
        assert await t.tier.get(key_of("b"), t.clock.now() + 0.02) is None
        assert t.tier.stats().failures == {"no_buffer": 1}
        waiting = asyncio.ensure_future(t.get(key_of("b")))
        await asyncio.sleep(0)
        lease.release()
        assert await waiting == value_of("b", 700_000)


# -- the place goes away ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENOSPC])
async def test_a_disk_that_is_away_at_the_start_is_found_later(tmp_path: Path, number: int) -> None:
    files = FaultyFiles()
    files.errors["open"] = number
    async with opened(f"file://{tmp_path}/kv", files) as t:
        assert not t.tier.stats().reachable
        assert await put(t, "a") is Outcome.FAILED
        assert await t.get(key_of("a")) is None
        files.errors.clear()
        await back(t)
        assert await put(t, "a") is Outcome.STORED


@pytest.mark.parametrize("victim", ["slab", "table", "lock", ""])
async def test_files_removed_under_it_are_noticed_and_begun_again(tmp_path: Path, victim: str) -> None:
    """Values are misses from then on, never bytes of an unlinked file that is counted by nobody."""
    place = tmp_path / "kv"
    async with opened(f"file://{place}", FaultyFiles()) as t:
        await t.stored("a", num_bytes=SIZE)
        os.unlink(place / victim) if victim else shutil.rmtree(place)
        t.clock.advance(1.5)
        await t.holds("a")
        await until(lambda: not t.tier.stats().reachable, "the loss to be noticed")
        assert t.tier.stats().failures == {"vanished": 1}
        assert await t.holds("a") == [False]
        assert t.tier.take_evicted() is None  # type: ignore[attr-defined]
        await back(t)
        assert await t.holds("a") == [victim == "lock"]
        await t.stored("b", num_bytes=SIZE)
        assert sorted(os.listdir(place)) == ["lock", "slab", "table"]


async def test_a_reservation_of_a_lost_disk_fails_and_room_is_right_afterwards(tmp_path: Path) -> None:
    place = tmp_path / "kv"
    async with opened(f"file://{place}", FaultyFiles()) as t:
        got = await t.tier.reserve(key_of("a"), SIZE, t.soon)
        assert not isinstance(got, Outcome)
        shutil.rmtree(place)
        t.clock.advance(1.5)
        await t.holds("a")
        await until(lambda: not t.tier.stats().reachable, "the loss to be noticed")
        await back(t)
        assert await got.commit() is Outcome.FAILED
        assert t.tier.stats().used_bytes == 0
        assert await put(t, "a") is Outcome.STORED


async def test_one_directory_that_fails_costs_its_own_values_only(tmp_path: Path) -> None:
    files = FaultyFiles()
    places = [tmp_path / "one", tmp_path / "two", tmp_path / "three"]
    url = "file://" + ",".join(map(str, places))
    async with opened(url, files, capacity=24 * MIB) as t:
        await t.stored(*range(30), num_bytes=SIZE)
        homes = [home_of(key_of(n), 3) for n in range(30)]
        assert all(homes.count(number) >= 4 for number in range(3))
        files.only = lambda path: "/two/" in path
        files.errors = {"read": errno.EIO, "write": errno.EIO}
        for n in range(30):
            assert (await t.get(key_of(n)) is not None) == (homes[n] != 1)
        shutil.rmtree(places[1])
        t.clock.advance(1.5)
        await t.holds(*range(30))
        await until(lambda: t.tier.stats().num_values < 30, "the loss to be noticed")
        assert await t.holds(*range(30)) == [home != 1 for home in homes]
        assert t.tier.stats().reachable
        files.errors.clear()
        t.clock.advance(1.5)
        await t.holds(*range(30))
        gone = [n for n in range(30) if homes[n] == 1]
        await until(lambda: (places[1] / "slab").exists(), "the directory to be begun again")
        while await put(t, gone[0]) is Outcome.FAILED:
            await asyncio.sleep(0)
        await t.stored(*gone[1:], num_bytes=SIZE)
        assert all(await t.holds(*range(30)))
    async with opened(url, OsFiles(), capacity=24 * MIB) as t:
        assert all(await t.holds(*range(30)))
    async with opened(f"{url},{tmp_path}/four", OsFiles(), capacity=24 * MIB) as t:
        assert await t.holds(*range(30)) == [home_of(key_of(n), 4) != 3 for n in range(30)]


# -- who may use it ---------------------------------------------------------------------------------------------------

HOLDER = """
import asyncio, sys
from pdxfer.config.store import TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store.open import open_tier

async def main():
    tier = await open_tier(TierConfig(url=sys.argv[1], capacity_gib=0.01), SYSTEM_CLOCK)
    print("open", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "lmdb", "sqlite"])
async def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path, kind: str) -> None:
    from pdxfer.store.open import open_tier

    url = f"{kind}://{tmp_path}/kv"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, url], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"open\n"
        config = Wanted(capacity_bytes=10 * MIB).config(url)
        with pytest.raises(ConfigError, match=rf"in use by process {holder.pid}; give each engine its own"):
            await open_tier(config, FakeClock())
    finally:
        holder.kill()
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()
    tier = await open_tier(config, FakeClock())
    await Opened(tier, FakeClock()).stored("a")
    await tier.close()


async def test_a_second_tier_in_one_process_is_refused_too(tmp_path: Path) -> None:
    async with opened(f"file://{tmp_path}/kv", OsFiles()):
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
            async with opened(f"file://{tmp_path}/kv", OsFiles()):
                pass


# -- real filesystems -------------------------------------------------------------------------------------------------


@pytest.fixture
def mount(tmp_path: Path) -> "AsyncIterator[Callable[..., Path]]":
    """Mounts a tmpfs: mount("size=8m") → its directory. Needs root."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    point = tmp_path / "mounted"
    point.mkdir()

    def mount_it(options: str) -> Path:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "pdxfer-test", str(point)], check=True)
        return point

    yield mount_it  # type: ignore[misc]
    while os.path.ismount(point):
        subprocess.run(["umount", "-l", str(point)], check=True)


@pytest.mark.slow
async def test_a_real_full_filesystem(mount: Callable[[str], Path]) -> None:
    """5 MiB for a tier of 16: values replace each other in what there is; when another file goes, the tier grows."""
    point = mount("size=5m")
    (point / "filler").write_bytes(bytes(2 * MIB))
    async with opened(f"file://{point}/kv", OsFiles(), capacity=16 * MIB) as t:
        await t.stored(*range(30), num_bytes=SIZE)
        first = t.tier.stats()
        assert first.failures.keys() == {"no_space"} and first.num_values >= 5
        os.unlink(point / "filler")
        t.clock.advance(1.5)
        await t.stored(*range(100, 130), num_bytes=SIZE)
        assert t.tier.stats().num_values >= first.num_values + 8
        assert await t.get(key_of(129)) == value_of(129, SIZE)


@pytest.mark.slow
async def test_a_filesystem_that_is_full_from_the_start(mount: Callable[[str], Path]) -> None:
    point = mount("size=1m")
    (point / "filler").write_bytes(bytes(MIB))
    async with opened(f"file://{point}/kv", OsFiles(), capacity=16 * MIB) as t:
        assert await put(t, "a") is Outcome.FAILED
        os.unlink(point / "filler")
        await back(t)
        assert await put(t, "a") is Outcome.STORED


@pytest.mark.slow
async def test_a_filesystem_that_is_unmounted_is_not_written_beneath(mount: Callable[[str], Path]) -> None:
    """Nothing is written to the disk under the mount point; mounted again, the tier goes on."""
    point = mount("size=8m")
    async with opened(f"file://{point}/kv", OsFiles(), capacity=6 * MIB) as t:
        await t.stored("a", num_bytes=SIZE)
        subprocess.run(["umount", "-l", str(point)], check=True)
        t.clock.advance(1.5)
        await t.holds("a")
        await until(lambda: not t.tier.stats().reachable, "the loss to be noticed")
        for _ in range(3):
            t.clock.advance(1.5)
            assert await put(t, "b") is Outcome.FAILED
            await until(lambda: not t.tier._parts[0]._shelf._recovery, "the attempt to end")  # type: ignore[attr-defined]
        assert os.listdir(point) == []


@pytest.mark.slow
async def test_a_filesystem_that_becomes_read_only(mount: Callable[[str], Path]) -> None:
    """Values are still served. (A mount with open files cannot be made read-only; a bind of the directory can.)"""
    point = mount("size=8m")
    files = FaultyFiles()
    async with opened(f"file://{point}/kv", files, capacity=6 * MIB) as t:
        await t.stored("a", num_bytes=SIZE)
        files.errors |= {"write": errno.EROFS, "allocate": errno.EROFS}
        assert await put(t, "b") is Outcome.FAILED
        assert await t.get(key_of("a")) == value_of("a", SIZE)
    subprocess.run(["mount", "-o", "remount,ro", str(point)], check=True)
    async with opened(f"file://{point}/kv", OsFiles(), capacity=6 * MIB) as t:
        assert not t.tier.stats().reachable and t.tier.stats().failures == {"read_only": 1}
        assert await put(t, "b") is Outcome.FAILED
        subprocess.run(["mount", "-o", "remount,rw", str(point)], check=True)
        await back(t)
        assert await t.get(key_of("a")) == value_of("a", SIZE)
