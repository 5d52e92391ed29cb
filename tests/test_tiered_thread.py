"""The store's thread: opened, used from outside, closed; every way in and out is bounded."""

import asyncio
from concurrent.futures import CancelledError

import pytest
from tiered_kit import IDENTITY, chunk, key, raw

from pdxfer.config.store import StoreConfig, TierConfig
from pdxfer.core.errors import ConfigError, DeadlineError
from pdxfer.store.runtime import StoreThread
from pdxfer.store.tiered import TieredStore
from pdxfer.testing.memory_tier import MemoryTier


async def make() -> TieredStore:
    settings = [TierConfig(url="dram:"), TierConfig(url="disk:", write="back")]
    tiers = [MemoryTier(t, kind=t.url[:-1]) for t in settings]
    return TieredStore(tiers, StoreConfig(tiers=settings), IDENTITY)


def test_used_from_a_thread_without_a_loop():
    """Save, look up, read, close; what only memory had is on disk then."""
    thread = StoreThread(make)
    thread.start(5)
    store = thread.store
    soon = store.clock.now() + 20
    assert thread.submit(lambda s: s.save(chunk("a"), soon)).result(20).held
    assert thread.submit(lambda s: s.lookup([key("a"), key("b")], soon)).result(20).num_chunks == 1
    [got] = thread.submit(lambda s: s.get([key("a")], soon)).result(20)
    assert bytes(got.raw) == raw("a")
    got.release()
    thread.close(5)
    thread.close(5)
    assert store.stats().tiers[1].tier.num_values == 1
    with pytest.raises(CancelledError):
        thread.submit(lambda s: s.lookup([], soon)).result(1)


def test_a_setting_that_is_wrong_is_raised_by_start():
    """The thread is gone then."""

    async def wrong() -> TieredStore:
        raise ConfigError("no such tier")

    thread = StoreThread(wrong)
    with pytest.raises(ConfigError, match="no such tier"):
        thread.start(5)
    assert not thread._thread.is_alive()


def test_a_tier_that_hangs_at_open_is_a_deadline():
    """Named, not waited for."""

    async def hang() -> TieredStore:
        await asyncio.Event().wait()
        raise AssertionError

    thread = StoreThread(hang)
    with pytest.raises(DeadlineError, match="0.05 s"):
        thread.start(0.05)
