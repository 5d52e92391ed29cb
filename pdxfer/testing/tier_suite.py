"""The promises of every tier, as tests: subclass TierSuite and give it a factory.

    class TestMyTier(TierSuite):
        survives_restart = True                       # what this kind promises: see TierBase in tier_kit.py

        def make(self, where: Path, clock: FakeClock, wanted: Wanted) -> Tier:
            return MyTier(wanted.config(f"mytier://{where}"), clock, **wanted.limits())

Run by pytest with pytest-asyncio (asyncio_mode = auto). Room, pins and quotas are in tier_space.py, inherited here.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store.base import KEY_BYTES, Lease, Outcome, Reservation
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.testing.tier_kit import MIB, Opened, key_of, until, value_of
from pdxfer.testing.tier_space import TierSpace

Call = Callable[[Opened, int], Coroutine[Any, Any, object]]
AT_ONCE_S = 5.0
"""A call that asks nobody is back within this, on the slowest machine."""


class TierSuite(TierSpace):
    """All promises. Each test opens its own tier."""

    # -- values ---------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("num_bytes", [0, 1, 4097, MIB, 8 * MIB], ids=["0", "1", "odd", "1MiB", "8MiB"])
    async def test_a_value_comes_back_whole_until_it_is_deleted(self, tmp_path: Path, num_bytes: int) -> None:
        if self.max_value_bytes:
            num_bytes = min(num_bytes, self.max_value_bytes)
        key, value = key_of("k"), value_of("k", num_bytes)
        async with self.opened(tmp_path) as t:
            assert await t.get(key) is None
            assert await t.put(key, value) is Outcome.STORED
            [entry] = await t.entries("k")
            assert entry is not None and (entry.key, entry.num_bytes) == (key, num_bytes)
            assert await t.get(key) == value
            assert await t.tier.delete([key, key_of("other")], t.soon) == 1
            assert await t.holds("k") == [False]
            assert await t.get(key) is None
            assert await t.tier.delete([key], t.soon) == 0

    async def test_a_value_never_changes(self, tmp_path: Path) -> None:
        """A second put under a key is ALREADY, whatever it brings."""
        async with self.opened(tmp_path) as t:
            await t.stored("k")
            assert await t.put(key_of("k"), b"something else") is Outcome.ALREADY
            assert await t.get(key_of("k")) == value_of("k", 1000)

    async def test_every_key_of_32_bytes_is_a_name(self, tmp_path: Path) -> None:
        """Zeros, 0xff, line ends, blanks, quotes, path separators; and keys that differ in one bit."""
        odd = [bytes(KEY_BYTES), b"\xff" * KEY_BYTES, b"\r\n" * 16, b" " * KEY_BYTES, b"/." * 16, b"'\"%\\;:*?" * 4]
        keys = [*odd, bytes(KEY_BYTES - 1) + b"\x01", b"\x01" + bytes(KEY_BYTES - 1)]
        async with self.opened(tmp_path) as t:
            for number, key in enumerate(keys):
                assert await t.put(key, value_of(number, 100)) is Outcome.STORED
            for number, key in enumerate(keys):
                assert await t.get(key) == value_of(number, 100)
            assert await t.tier.delete(keys, t.soon) == len(keys)

    async def test_lookup_answers_each_key_in_order(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as t:
            await t.stored("a", "c")
            assert await t.holds("a", "b", "c", "a") == [True, False, True, True]
            assert await t.tier.lookup([], t.soon) == []

    async def test_figures_follow_what_happened(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as t:
            await t.stored("a", "b")
            await t.get(key_of("a"))
            await t.get(key_of("never"))
            stats = t.tier.stats()
            assert stats.kind == t.tier.kind and stats.reachable
            assert (stats.puts, stats.hits, stats.misses) == (2, 1, 1)
            assert stats.failures == {}
            if self.capacity_bound:
                assert stats.num_values == 2
                assert 2000 <= stats.used_bytes <= stats.capacity_bytes

    # -- writing --------------------------------------------------------------------------------------------------

    async def test_a_reservation_is_invisible_until_it_is_committed(self, tmp_path: Path) -> None:
        key, value = key_of("k"), value_of("k", 5000)
        async with self.opened(tmp_path) as t:
            reservation = await self.reserve(t, key, 5000)
            async with reservation:
                assert len(reservation.view) == 5000 and not reservation.view.readonly
                reservation.view[:] = value
                assert await t.holds("k") == [False]
                assert await t.get(key) is None
                assert await reservation.commit() is Outcome.STORED
            assert await t.get(key) == value

    async def test_an_aborted_reservation_leaves_nothing(self, tmp_path: Path) -> None:
        """By abort, by the end of the block, by an error in it; afterwards the key can be stored."""
        key = key_of("k")
        async with self.opened(tmp_path) as t:
            reservation = await self.reserve(t, key, 5000)
            reservation.abort()
            reservation.abort()
            async with await self.reserve(t, key, 5000):
                pass
            with pytest.raises(ZeroDivisionError):
                async with await self.reserve(t, key, 5000) as open_one:
                    open_one.view[:5] = b"half "
                    raise ZeroDivisionError
            await t.all_returned()
            assert await t.holds("k") == [False]
            await t.stored("k")

    async def test_a_commit_past_its_deadline_gives_everything_back(self, tmp_path: Path) -> None:
        """Whether it stored the value or not: nothing is held any more, and the next writer need not wait."""
        key, value = key_of("k"), value_of("k", 5000)
        async with self.opened(tmp_path) as t:
            reservation = await t.tier.reserve(key, 5000, t.clock.now() + 1.0)
            assert not isinstance(reservation, Outcome)
            reservation.view[:] = value
            t.clock.advance(2.0)
            assert await reservation.commit() in (Outcome.STORED, Outcome.LATE)
            await t.all_returned()
            begun = SYSTEM_CLOCK.now()
            assert await t.put(key, value) in (Outcome.STORED, Outcome.ALREADY)
            assert SYSTEM_CLOCK.now() - begun < AT_ONCE_S
            assert await t.get(key) == value

    async def test_of_many_writers_of_one_key_one_stores(self, tmp_path: Path) -> None:
        """The value is one writer's, whole; the others hear ALREADY."""
        key, values = key_of("k"), [value_of(n, 100_000) for n in range(8)]
        async with self.opened(tmp_path) as t:
            outcomes = await asyncio.gather(*(t.put(key, value) for value in values))
            assert sorted(outcomes) == [Outcome.ALREADY] * 7 + [Outcome.STORED]
            assert await t.get(key) == values[outcomes.index(Outcome.STORED)]

    async def test_a_writer_that_gives_up_leaves_the_key_to_the_next(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as t:
            first = await self.reserve(t, key_of("k"), 1000)
            second = asyncio.ensure_future(t.put(key_of("k"), value_of("k", 1000)))
            await asyncio.sleep(0)
            first.abort()
            assert await second is Outcome.STORED
            assert await t.get(key_of("k")) == value_of("k", 1000)

    async def test_deleting_does_not_touch_what_is_being_written(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as t:
            async with await self.reserve(t, key_of("k"), 1000) as reservation:
                assert await t.tier.delete([key_of("k")], t.soon) == 0
                reservation.view[:] = value_of("k", 1000)
                assert await reservation.commit() is Outcome.STORED
            assert await t.get(key_of("k")) == value_of("k", 1000)

    # -- reading --------------------------------------------------------------------------------------------------

    async def test_a_lease_outlives_the_deletion_of_its_value(self, tmp_path: Path) -> None:
        """Also a new, different value under the key: the lease shows what it showed."""
        async with self.opened(tmp_path) as t:
            await t.stored("k", num_bytes=100_000)
            lease = await self.lease(t, key_of("k"))
            assert await t.tier.delete([key_of("k")], t.soon) == 1
            assert await t.holds("k") == [False]
            assert await t.put(key_of("k"), value_of("new", 100_000)) is Outcome.STORED
            assert bytes(lease.view) == value_of("k", 100_000)
            assert await t.get(key_of("k")) == value_of("new", 100_000)
            lease.release()

    async def test_leases_are_read_only_and_each_its_own(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as t:
            await t.stored("k")
            one, two = await self.lease(t, key_of("k")), await self.lease(t, key_of("k"))
            assert one.view.readonly
            assert t.tier.stats().leases == 2
            one.release()
            one.release()
            assert t.tier.stats().leases == 1
            assert bytes(two.view) == value_of("k", 1000)
            two.release()

    async def test_scan_pages_through_all_keys_in_order(self, tmp_path: Path) -> None:
        self.needs(self.scans, "cannot list its keys")
        keys = sorted(key_of(n) for n in range(25))
        async with self.opened(tmp_path) as t:
            await t.stored(*range(25), num_bytes=10)
            seen: list[bytes] = []
            after = b""
            while page := await t.tier.scan(after, 10, t.soon):
                assert len(page) <= 10 and {entry.num_bytes for entry in page} == {10}
                seen += [entry.key for entry in page]
                after = seen[-1]
            assert seen == keys

    # -- time, cancellation, end ------------------------------------------------------------------------------------

    async def test_a_deadline_that_has_passed_is_answered_at_once(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as t:
            await t.stored("k")
            late, key, new = t.clock.now() - 1.0, key_of("k"), key_of("new")
            before = SYSTEM_CLOCK.now()
            assert await t.tier.put(new, [b"x"], late) is Outcome.LATE
            assert await t.tier.reserve(new, 1, late) is Outcome.LATE
            assert await t.tier.lookup([key, new], late) == [None, None]
            assert await t.tier.get(key, late) is None
            assert await t.tier.delete([key], late) == 0
            assert await t.tier.pin([key], None, late) == 0
            assert await t.tier.unpin([key], late) == 0
            assert await t.tier.scan(b"", 10, late) == []
            assert SYSTEM_CLOCK.now() - before < AT_ONCE_S
            assert await t.holds("k", "new") == [True, False]

    CANCELLED: dict[str, Call] = {
        "put": lambda t, n: t.put(key_of(n), value_of(n, 300_000)),
        "reserve": lambda t, n: t.tier.reserve(key_of(n), 300_000, t.soon),
        "get": lambda t, n: t.tier.get(key_of("k"), t.soon),
        "lookup": lambda t, n: t.tier.lookup([key_of("k"), key_of(n)], t.soon),
        "delete": lambda t, n: t.tier.delete([key_of(n)], t.soon),
        "pin": lambda t, n: t.tier.pin([key_of(n)], 1.0, t.soon),
        "scan": lambda t, n: t.tier.scan(b"", 10, t.soon),
    }

    @pytest.mark.parametrize("call", CANCELLED)
    async def test_a_cancelled_call_returns_everything(self, tmp_path: Path, call: str) -> None:
        """Cancelled after 0, 1, 2 ... turns of the loop; the tier then works as before."""
        async with self.opened(tmp_path) as t:
            await t.stored("k", num_bytes=300_000)
            for turns in range(12):
                task = asyncio.ensure_future(self.CANCELLED[call](t, turns))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                [result] = await asyncio.gather(task, return_exceptions=True)
                self.give_back(result)
            await t.all_returned()
            assert await t.get(key_of("k")) == value_of("k", 300_000)
            await t.stored("after", num_bytes=300_000)

    async def test_a_cancelled_commit_returns_everything(self, tmp_path: Path) -> None:
        """Whether the value is there then is open; if it is, it is whole."""
        async with self.opened(tmp_path) as t:
            for turns in range(8):
                async with await self.reserve(t, key_of(turns), 100_000) as reservation:
                    reservation.view[:] = value_of(turns, 100_000)
                    task = asyncio.ensure_future(reservation.commit())
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            await t.all_returned()
            for turns in range(8):
                assert await t.get(key_of(turns)) in (None, value_of(turns, 100_000))

    async def test_close_is_final_and_may_be_repeated(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as t:
            await t.stored("k")
            await t.tier.close()
            await t.tier.close()
            assert await t.put(key_of("new"), b"x") is Outcome.FAILED
            assert await t.tier.reserve(key_of("new"), 1, t.soon) is Outcome.FAILED
            assert await t.holds("k") == [False]
            assert await t.get(key_of("k")) is None
            assert await t.tier.delete([key_of("k")], t.soon) == 0
            assert await t.tier.pin([key_of("k")], None, t.soon) == 0
            assert await t.tier.scan(b"", 10, t.soon) == []

    async def test_what_is_lent_may_come_back_after_close(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as t:
            await t.stored("k")
            lease, reservation = await self.lease(t, key_of("k")), await self.reserve(t, key_of("new"), 1000)
            await t.tier.close()
            assert await reservation.commit() is Outcome.FAILED
            reservation.abort()
            lease.release()

    async def test_values_are_there_again_after_a_restart(self, tmp_path: Path) -> None:
        self.needs(self.survives_restart, "forgets at the end of its process")
        clock, sizes = FakeClock(), [0, 1, 5000, MIB + 1]
        if self.max_value_bytes:
            sizes = [min(size, self.max_value_bytes) for size in sizes]
        async with self.opened(tmp_path, clock) as t:
            for size in sizes:
                assert await t.put(key_of(("s", size)), value_of(size, size)) is Outcome.STORED
            await t.stored("deleted")
            assert await t.tier.delete([key_of("deleted")], t.soon) == 1
            (await self.reserve(t, key_of("unfinished"), 1000)).abort()
        async with self.opened(tmp_path, clock) as t:
            for size in sizes:
                assert await t.get(key_of(("s", size))) == value_of(size, size)
            assert await t.holds("deleted", "unfinished") == [False, False]

    async def test_random_use_by_many_tasks_never_shows_a_wrong_byte(self, tmp_path: Path) -> None:
        """Eight tasks put, get, delete and look up twelve keys at once; what is read is what belongs to the key."""
        sizes = {n: 3 + 7001 * n for n in range(12)}

        async def use(t: Opened, seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(25):
                n = chance.randrange(12)
                match chance.randrange(4):
                    case 0:
                        outcome = await t.put(key_of(n), value_of(n, sizes[n]))
                        assert outcome in (Outcome.STORED, Outcome.ALREADY)
                    case 1:
                        assert await t.get(key_of(n)) in (None, value_of(n, sizes[n]))
                    case 2:
                        await t.tier.delete([key_of(n)], t.soon)
                    case _:
                        [entry] = await t.entries(n)
                        assert entry is None or entry.num_bytes == sizes[n]

        async with self.opened(tmp_path) as t:
            await asyncio.gather(*(use(t, seed) for seed in range(8)))
            await until(lambda: t.tier.stats().leases == 0, "leases to come back")

    # -- help -----------------------------------------------------------------------------------------------------

    def give_back(self, result: object) -> None:
        """Release or abort what a call returned before it was cancelled."""
        if isinstance(result, BaseException):
            assert isinstance(result, asyncio.CancelledError), result
        elif hasattr(result, "release"):
            result.release()
        elif hasattr(result, "abort"):
            result.abort()

    async def reserve(self, t: Opened, key: bytes, num_bytes: int) -> Reservation:
        """A reservation, insisted upon."""
        got = await t.tier.reserve(key, num_bytes, t.soon)
        assert not isinstance(got, Outcome), got
        return got

    async def lease(self, t: Opened, key: bytes) -> Lease:
        """A lease, insisted upon."""
        got = await t.tier.get(key, t.soon)
        assert got is not None
        return got
