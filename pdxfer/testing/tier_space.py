"""The promises of tiers about room: eviction, limits, pins, quotas, age. Inherited by TierSuite (tier_suite.py)."""

import asyncio
import random
from pathlib import Path

from pdxfer.store.base import Lease, Outcome
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.testing.tier_kit import Opened, TierBase, key_of, value_of


class TierSpace(TierBase):
    """Mostly for tiers that keep to a capacity of their own."""

    @property
    def piece(self) -> int:
        """A value of which at least twelve and at most sixteen fit."""
        return self.capacity_bytes // 16 - 64

    async def fill(self, t: Opened, count: int, start: int = 0, tenant: str = "") -> None:
        """Store values `start` ... `start + count - 1` of one piece each, watching the limit."""
        for number in range(start, start + count):
            await t.stored(number, num_bytes=self.piece, tenant=tenant)
            stats = t.tier.stats()
            assert stats.used_bytes <= stats.capacity_bytes

    # -- eviction ---------------------------------------------------------------------------------------------------

    async def test_a_full_tier_forgets_what_was_used_least_recently(self, tmp_path: Path) -> None:
        """lru: a get counts as use, a lookup does not."""
        self.needs(self.capacity_bound, "has no limit of its own")
        async with self.opened(tmp_path) as t:
            await self.fill(t, 8)
            assert await t.get(key_of(0)) == value_of(0, self.piece)
            await t.holds(*range(8))
            await self.fill(t, 12, start=8)
            order = [1, 2, 3, 4, 5, 6, 7, 0, *range(8, 20)]
            alive = [n for n, held in zip(order, await t.holds(*order), strict=True) if held]
            assert 12 <= len(alive) <= 16
            assert alive == order[-len(alive) :]
            assert t.tier.stats().evictions == 20 - len(alive)

    async def test_the_limit_holds_for_values_of_any_size(self, tmp_path: Path) -> None:
        """Random sizes, five times the capacity: used never exceeds capacity, what is held is right."""
        self.needs(self.capacity_bound, "has no limit of its own")
        chance = random.Random(7)
        async with self.opened(tmp_path) as t:
            total, number = 0, 0
            sizes: list[int] = []
            while total < 5 * self.capacity_bytes:
                sizes.append(chance.randrange(1, 2 * self.piece))
                assert await t.put(key_of(number), value_of(number % 7, sizes[-1])) is Outcome.STORED
                stats = t.tier.stats()
                assert stats.used_bytes <= stats.capacity_bytes
                total, number = total + sizes[-1], number + 1
            for n in chance.sample(range(number), 20):
                assert await t.get(key_of(n)) in (None, value_of(n % 7, sizes[n]))

    async def test_a_lease_outlives_the_eviction_of_its_value(self, tmp_path: Path) -> None:
        self.needs(self.capacity_bound, "has no limit of its own")
        async with self.opened(tmp_path) as t:
            await self.fill(t, 1)
            lease = await self.lease_of(t, 0)
            await self.fill(t, 24, start=1)
            assert bytes(lease.view) == value_of(0, self.piece)
            lease.release()
            await self.fill(t, 24, start=100)

    async def test_who_needs_room_waits_for_leases_to_end(self, tmp_path: Path) -> None:
        """Where leases occupy the room: by the deadline FULL or LATE, and stored as soon as one lease ends."""
        self.needs(self.capacity_bound and self.in_place, "leases do not occupy room")
        async with self.opened(tmp_path) as t:
            leases = await self.lease_everything(t)
            soon = t.clock.now() + 0.05
            outcome = await t.tier.put(key_of("more"), [value_of("more", self.piece)], soon)
            assert outcome in (Outcome.FULL, Outcome.LATE)
            waiting = asyncio.ensure_future(t.put(key_of("more"), value_of("more", self.piece)))
            await asyncio.sleep(0)
            assert not waiting.done()
            leases[0].release()
            assert await waiting is Outcome.STORED
            for lease in leases[1:]:
                lease.release()

    async def test_a_value_that_can_never_fit_is_refused_and_evicts_nothing(self, tmp_path: Path) -> None:
        limit = self.max_value_bytes or (self.capacity_bytes if self.capacity_bound else 0)
        self.needs(limit > 0, "takes any size")
        async with self.opened(tmp_path) as t:
            await t.stored("small")
            assert await t.tier.put(key_of("large"), [bytes(limit + 1)], t.soon) is Outcome.TOO_LARGE
            assert await t.tier.reserve(key_of("large"), limit + 1, t.soon) is Outcome.TOO_LARGE
            assert await t.holds("small", "large") == [True, False]

    async def test_values_older_than_the_ttl_are_gone(self, tmp_path: Path) -> None:
        self.needs(self.expires, "expiry is the server's")
        async with self.opened(tmp_path, ttl_s=60.0) as t:
            await t.stored("old")
            t.clock.advance(40.0)
            await t.stored("young")
            t.clock.advance(30.0)
            assert await t.holds("old", "young") == [False, True]
            assert await t.get(key_of("old")) is None
            assert await t.get(key_of("young")) is not None
            await t.stored("old")

    async def test_what_is_too_old_is_stored_again_while_an_older_one_is_pinned(self, tmp_path: Path) -> None:
        self.needs(self.pins and self.expires, "pins or expiry are the server's")
        async with self.opened(tmp_path, ttl_s=60.0) as t:
            await t.stored("pinned")
            assert await t.tier.pin([key_of("pinned")], None, t.soon) == 1
            await t.stored("again", "forgotten")
            t.clock.advance(70.0)
            await t.stored("again")
            assert await t.holds("again", "forgotten") == [True, False]
            assert await t.get(key_of("again")) == value_of("again", 1000)
            assert t.tier.stats().num_values <= 2, "what is too old is gone, not only hidden"

    async def test_what_is_too_old_is_stored_again_after_the_time_of_day_was_set_back(self, tmp_path: Path) -> None:
        """The value stored before that seems to be the younger one."""
        self.needs(self.expires, "expiry is the server's")
        async with self.opened(tmp_path, ttl_s=60.0) as t:
            await t.stored("before")
            t.clock.shift_wall(-30.0)
            await t.stored("after")
            t.clock.advance(70.0)
            assert await t.holds("after") == [False]
            await t.stored("after")
            assert await t.get(key_of("after")) == value_of("after", 1000)

    # -- pins -------------------------------------------------------------------------------------------------------

    async def test_pinned_values_stay_until_unpinned(self, tmp_path: Path) -> None:
        self.needs(self.pins and self.capacity_bound, "pins or limits are the server's")
        async with self.opened(tmp_path) as t:
            await self.fill(t, 2)
            assert await t.tier.pin([key_of(0), key_of("absent")], None, t.soon) == 1
            [entry] = await t.entries(0)
            assert entry is not None and entry.pinned
            assert t.tier.stats().pinned_bytes >= self.piece
            await self.fill(t, 24, start=10)
            assert await t.holds(0, 1) == [True, False]
            assert await t.tier.unpin([key_of(0), key_of(23)], t.soon) == 1
            assert t.tier.stats().pinned_bytes == 0
            await self.fill(t, 24, start=100)
            assert await t.holds(0) == [False]

    async def test_a_pin_ends_with_its_ttl(self, tmp_path: Path) -> None:
        self.needs(self.pins and self.expires and self.capacity_bound, "pins or expiry are the server's")
        async with self.opened(tmp_path) as t:
            await self.fill(t, 1)
            assert await t.tier.pin([key_of(0)], 60.0, t.soon) == 1
            t.clock.advance(59.0)
            await self.fill(t, 24, start=10)
            assert await t.holds(0) == [True]
            t.clock.advance(2.0)
            [entry] = await t.entries(0)
            assert entry is not None and not entry.pinned
            await self.fill(t, 24, start=100)
            assert await t.holds(0) == [False]

    async def test_pins_beyond_their_quota_are_not_taken(self, tmp_path: Path) -> None:
        """A quarter of the tier may be pinned: the rest stays evictable, so the tier goes on working."""
        self.needs(self.pins and self.capacity_bound, "pins or limits are the server's")
        async with self.opened(tmp_path, pin_fraction=0.25) as t:
            await self.fill(t, 12)
            pinned = await t.tier.pin([key_of(n) for n in range(12)], None, t.soon)
            assert 3 <= pinned <= 4
            assert t.tier.stats().pinned_bytes <= self.capacity_bytes // 4
            await self.fill(t, 24, start=100)
            assert (await t.holds(*range(12))).count(True) == pinned
            assert await t.tier.pin([key_of(n) for n in range(12)], None, t.soon) == pinned

    async def test_deleting_takes_pinned_values_too(self, tmp_path: Path) -> None:
        self.needs(self.pins, "cannot pin")
        async with self.opened(tmp_path) as t:
            await t.stored("k")
            assert await t.tier.pin([key_of("k")], None, t.soon) == 1
            assert await t.tier.delete([key_of("k")], t.soon) == 1
            assert t.tier.stats().pinned_bytes == 0
            await t.stored("k")
            [entry] = await t.entries("k")
            assert entry is not None and not entry.pinned

    async def test_a_tier_full_of_pins_says_full(self, tmp_path: Path) -> None:
        self.needs(self.pins and self.capacity_bound, "pins or limits are the server's")
        async with self.opened(tmp_path, pin_fraction=1.0) as t:
            number = 0
            while number < 20:
                outcome = await t.put(key_of(number), value_of(number, self.piece))
                if outcome is Outcome.FULL:
                    break
                assert outcome is Outcome.STORED
                assert await t.tier.pin([key_of(number)], None, t.soon) == 1
                number += 1
            assert 12 <= number <= 16
            assert all(await t.holds(*range(number)))

    async def test_pins_survive_a_restart_where_values_do(self, tmp_path: Path) -> None:
        self.needs(self.pins and self.survives_restart and self.capacity_bound, "forgets, or pins are the server's")
        clock = FakeClock()
        async with self.opened(tmp_path, clock) as t:
            await self.fill(t, 2)
            assert await t.tier.pin([key_of(0)], None, t.soon) == 1
        async with self.opened(tmp_path, clock) as t:
            assert t.tier.stats().pinned_bytes >= self.piece
            await self.fill(t, 24, start=10)
            assert await t.holds(0, 1) == [True, False]

    # -- tenants ----------------------------------------------------------------------------------------------------

    async def test_a_tenant_at_its_quota_evicts_only_its_own(self, tmp_path: Path) -> None:
        self.needs(self.capacity_bound, "has no limit of its own")
        quota = {"greedy": self.capacity_bytes // 4}
        async with self.opened(tmp_path, tenant_quota=quota) as t:
            await self.fill(t, 4, tenant="modest")
            await self.fill(t, 12, start=100, tenant="greedy")
            assert all(await t.holds(*range(4)))
            held = await t.holds(*range(100, 112))
            assert 3 <= held.count(True) <= 4
            assert held == [False] * (12 - held.count(True)) + [True] * held.count(True)
            large = [bytes(quota["greedy"] + 1)]
            assert await t.tier.put(key_of("large"), large, t.soon, "greedy") is Outcome.TOO_LARGE

    # -- help -------------------------------------------------------------------------------------------------------

    async def lease_of(self, t: Opened, name: object) -> Lease:
        """A lease, insisted upon."""
        got = await t.tier.get(key_of(name), t.soon)
        assert got is not None
        return got

    async def lease_everything(self, t: Opened) -> list[Lease]:
        """Store and lease pieces until no more fit."""
        leases: list[Lease] = []
        for number in range(20):
            soon = t.clock.now() + 0.05
            if await t.tier.put(key_of(number), [value_of(number, self.piece)], soon) is not Outcome.STORED:
                break
            leases.append(await self.lease_of(t, number))
        assert 12 <= len(leases) <= 16
        return leases
