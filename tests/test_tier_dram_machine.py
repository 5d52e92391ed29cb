"""The DRAM tier under any order of calls: bytes, pins, leases, tenants and ages always add up; nothing ever leaks."""

import asyncio
import os
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from pdxfer.config.store import TierConfig
from pdxfer.store.base import Outcome
from pdxfer.store.dram import DramTier
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.testing.tier_kit import Opened, key_of

CAPACITY_BYTES = 1 << 20
QUOTA_BYTES = CAPACITY_BYTES // 3
PIN_FRACTION = 0.4
NAMES = st.integers(0, 15)
SIZES = st.sampled_from([0, 1, 4096, 5000, 40_000, 70_000, 200_000, CAPACITY_BYTES, CAPACITY_BYTES + 1])


def small_tier(eviction: str = "lru", ttl_s: float = 0.0) -> tuple[DramTier, FakeClock]:
    clock = FakeClock()
    config = TierConfig(
        url="dram:",
        capacity_gib=CAPACITY_BYTES / (1 << 30),
        eviction=eviction,
        ttl_s=ttl_s,
        options={"populate": "false"},
    )
    return DramTier(config, clock, tenant_quota={"small": QUOTA_BYTES}, pin_fraction=PIN_FRACTION), clock


def pattern(name: int, num_bytes: int) -> bytes:
    return bytes([name + 1]) * num_bytes


class DramMachine(RuleBasedStateMachine):
    """The model: what each lease must show, which reservations are open. The tier's own check does the sums."""

    leases = Bundle("leases")
    reservations = Bundle("reservations")
    eviction = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.tier, self.clock = small_tier(self.eviction, ttl_s=100.0)
        self.do(self.tier.open())
        self.num_leases = self.num_reservations = 0
        self.sizes: dict[int, int] = {}
        self.tenants: dict[int, str] = {}

    def do(self, call):
        return self.loop.run_until_complete(call)

    @property
    def now(self) -> float:
        """A deadline that leaves no time to wait."""
        return self.clock.now() + 1e-6

    @rule(name=NAMES, num_bytes=SIZES, tenant=st.sampled_from(["", "small", "other"]))
    def put(self, name: int, num_bytes: int, tenant: str) -> None:
        held = self.do(self.tier.lookup([key_of(name)], self.now))[0]
        outcome = self.do(self.tier.put(key_of(name), [pattern(name, num_bytes)], self.now, tenant))
        if outcome is Outcome.STORED:
            assert held is None
            self.sizes[name] = num_bytes
        elif outcome is Outcome.ALREADY:
            assert held is not None
        else:
            assert outcome in (Outcome.FULL, Outcome.TOO_LARGE, Outcome.LATE)
        limit = QUOTA_BYTES if tenant == "small" else CAPACITY_BYTES
        assert (outcome is Outcome.TOO_LARGE) == (num_bytes > limit)

    @rule(name=NAMES, num_bytes=SIZES, target=reservations)
    def reserve(self, name: int, num_bytes: int):
        got = self.do(self.tier.reserve(key_of(name), num_bytes, self.now))
        if isinstance(got, Outcome):
            return multiple()
        self.num_reservations += 1
        got.view[:] = pattern(name, num_bytes)
        return name, num_bytes, got

    @rule(reserved=consumes(reservations))
    def commit(self, reserved) -> None:
        name, num_bytes, reservation = reserved
        assert self.do(reservation.commit()) is Outcome.STORED
        self.sizes[name] = num_bytes
        self.num_reservations -= 1

    @rule(reserved=consumes(reservations))
    def abort(self, reserved) -> None:
        reserved[2].abort()
        self.num_reservations -= 1

    @rule(name=NAMES, target=leases)
    def get(self, name: int):
        lease = self.do(self.tier.get(key_of(name), self.now))
        if lease is None:
            return multiple()
        self.num_leases += 1
        assert len(lease.view) == self.sizes[name]
        return name, self.sizes[name], lease

    @rule(leased=consumes(leases))
    def release(self, leased) -> None:
        """What it shows now is what it showed at first."""
        name, num_bytes, lease = leased
        assert bytes(lease.view) == pattern(name, num_bytes)
        lease.release()
        self.num_leases -= 1

    @rule(name=NAMES)
    def delete(self, name: int) -> None:
        self.do(self.tier.delete([key_of(name)], self.now))
        assert self.do(self.tier.lookup([key_of(name)], self.now)) == [None]

    @rule(name=NAMES, ttl_s=st.sampled_from([None, 10.0, 500.0]))
    def pin(self, name: int, ttl_s: float | None) -> None:
        self.do(self.tier.pin([key_of(name)], ttl_s, self.now))

    @rule(name=NAMES)
    def unpin(self, name: int) -> None:
        self.do(self.tier.unpin([key_of(name)], self.now))

    @rule(seconds=st.sampled_from([1.0, 11.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def adds_up(self) -> None:
        self.tier.check()
        stats = self.tier.stats()
        assert (stats.leases, stats.reservations) == (self.num_leases, self.num_reservations)
        assert stats.used_bytes <= CAPACITY_BYTES
        assert stats.pinned_bytes <= PIN_FRACTION * CAPACITY_BYTES
        assert self.tier.arena.used_by("small") <= QUOTA_BYTES

    def teardown(self) -> None:
        self.do(self.tier.close())
        self.loop.close()


class LfuMachine(DramMachine):
    eviction = "lfu"


class S3FifoMachine(DramMachine):
    eviction = "s3fifo"


EXAMPLES = 1000 if os.environ.get("PDXFER_TIER") == "full" else 25
for machine in (DramMachine, LfuMachine, S3FifoMachine):
    machine.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
TestLru = pytest.mark.slow(DramMachine.TestCase)
TestLfu = pytest.mark.slow(LfuMachine.TestCase)
TestS3Fifo = pytest.mark.slow(S3FifoMachine.TestCase)


@pytest.mark.parametrize("rounds", [1_000, pytest.param(100_000, marks=pytest.mark.full)])
async def test_aborted_and_failed_calls_return_everything(rounds: int) -> None:
    """Misses, refusals, cancelled waits, aborted and late reservations, forgotten commits, in any order."""
    tier, clock = small_tier()
    await tier.open()
    t, chance = Opened(tier, clock), random.Random(11)
    await t.stored(*range(4), num_bytes=100_000)
    for number in range(rounds):
        key = key_of(chance.randrange(8))
        match chance.randrange(7):
            case 0:
                assert await tier.get(key_of(("never", number)), t.soon) is None
            case 1:
                assert await tier.reserve(key, 10, clock.now() - 1) is Outcome.LATE
            case 2:
                assert await tier.reserve(key_of("large"), CAPACITY_BYTES + 1, t.soon) is Outcome.TOO_LARGE
            case 3:
                got = await tier.reserve(key_of(("aborted", number)), chance.randrange(300_000), t.soon)
                assert not isinstance(got, Outcome)
                got.abort()
            case 4:
                blocker = await tier.reserve(key_of("contended"), 1000, t.soon)
                assert not isinstance(blocker, Outcome)
                waiting = asyncio.ensure_future(t.put(key_of("contended"), b"x"))
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
                blocker.abort()
            case 5:
                lease = await tier.get(key, t.soon)
                if lease is not None:
                    await tier.delete([key], t.soon)
                    lease.release()
            case _:
                task = asyncio.ensure_future(t.put(key, bytes(chance.randrange(50_000))))
                for _ in range(chance.randrange(3)):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
    stats = tier.stats()
    assert (stats.leases, stats.reservations) == (0, 0)
    tier.check()
    await tier.delete([key_of(n) for n in range(8)], t.soon)
    while page := await tier.scan(b"", 100, t.soon):
        await tier.delete([entry.key for entry in page], t.soon)
    assert tier.arena.used_bytes == 0 and tier.stats().num_values == 0
    assert not tier._writing and not tier._news._waiting
    await tier.close()
