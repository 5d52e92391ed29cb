"""One rank's store side: blocks → tiers → other blocks, every plan and every load answered exactly once."""

import asyncio
import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pdxfer.config.store import StoreConfig, TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.errors import ConfigError
from pdxfer.kv.chunks import chunk_keys, identity_digest
from pdxfer.memory.limits import default_capacity_bytes
from pdxfer.node.plan import SavePlan
from pdxfer.node.store_blocks import HostBlocks
from pdxfer.node.store_side import StoreSettings, StoreSide, _own
from pdxfer.store.base import Entry
from pdxfer.store.disk_options import DEFAULT_CAPACITY_BYTES, GIB
from pdxfer.store.remote.nixl_options import read_nixl_options
from pdxfer.store.tiered import TieredStore
from pdxfer.testing.fake_kv import FakeCache
from pdxfer.wire.halves import ToScheduler
from pdxfer.wire.store_facts import Find, Found, Held, Load, Loaded, Prefetch, Saved, StoreCounts, Unload

BLOCK, CHUNK_BLOCKS, LAYERS = 16, 2, 3
IDENTITY = {"model": "test", "rank": "0/1"}
PROMPT = list(range(1000, 1000 + 8 * BLOCK))
SLOW = 20.0


class Rank:
    """A store side over a fake cache; what it reports goes into a queue."""

    def __init__(self, *tiers: TierConfig, **more: object) -> None:
        self.cache = FakeCache(num_blocks=64, block_size=BLOCK, num_layers=LAYERS, block_bytes=512)
        self.facts: queue.SimpleQueue[ToScheduler] = queue.SimpleQueue()
        self.held: set[bytes] = set()
        self.num_corrupt = 0.0
        config = StoreConfig(enabled=True, tiers=list(tiers) or [TierConfig(url="dram:", capacity_gib=0.05)])
        settings = StoreSettings(config=config, identity=IDENTITY, **more)  # type: ignore[arg-type]
        self.side = StoreSide(settings, 0, BLOCK, HostBlocks(self.cache.region), self.facts.put, SYSTEM_CLOCK)
        self.side.begin()

    def next(self, kind: type[ToScheduler]) -> ToScheduler:
        """The next report of this kind; keeps what is held up to date on the way."""
        while True:
            fact = self.facts.get(timeout=SLOW)
            if isinstance(fact, Held):
                self.held = (set() if fact.restart else self.held) - set(fact.removed) | set(fact.added)
            if isinstance(fact, StoreCounts):
                self.num_corrupt += fact.counts["corrupt_chunks"]
            if isinstance(fact, kind):
                return fact

    def save(self, block_ids: list[int], token_ids: list[int]) -> list[bytes]:
        """Compute and save a prompt; its keys."""
        self.cache.write(block_ids, token_ids)
        keys = keys_of(token_ids)
        plans = tuple(
            SavePlan(
                save_id=i,
                keys=(key,),
                block_ids=tuple(block_ids[i * CHUNK_BLOCKS : (i + 1) * CHUNK_BLOCKS]),
                first_token=i * CHUNK_BLOCKS * BLOCK,
                num_tokens=len(block_ids[i * CHUNK_BLOCKS : (i + 1) * CHUNK_BLOCKS]) * BLOCK,
            )
            for i, key in enumerate(keys)
        )
        self.side.save(plans, None)
        answered = sorted(i for _ in plans for i in self.next(Saved).save_ids)  # type: ignore[union-attr]
        assert answered == list(range(len(plans)))
        while not set(keys) <= self.held:
            self.next(Held)
        return keys

    def load(self, keys: list[bytes], block_ids: list[int], skip: int = 0, name: str = "l") -> Loaded:
        total = len(block_ids) + skip
        counts = [min(CHUNK_BLOCKS, total - i * CHUNK_BLOCKS) for i in range(len(keys))]
        self.side.on_half(
            Load(load_id=name, keys=keys, num_blocks=counts, skip_blocks=skip, block_ids=block_ids, timeout_s=SLOW)
        )
        loaded = self.next(Loaded)
        assert isinstance(loaded, Loaded) and loaded.load_id == name
        return loaded


def keys_of(token_ids: list[int]) -> list[bytes]:
    identity = identity_digest(IDENTITY)
    chunks = chunk_keys(token_ids, [], identity, CHUNK_BLOCKS * BLOCK, block_size=BLOCK)
    return [chunk.key for chunk in chunks]


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.side.close()


def test_what_was_saved_is_loaded_into_other_blocks(rank: Rank) -> None:
    """Bit for bit, whatever blocks it came from."""
    keys = rank.save([9, 3, 4, 5, 20, 8, 7, 6], PROMPT)
    target = [30, 31, 33, 32, 50, 51, 52, 40]
    loaded = rank.load(keys, target)
    assert (loaded.num_valid, loaded.num_chunks, loaded.reason) == (8, 4, "")
    assert rank.cache.first_wrong(target, PROMPT) is None


def test_an_incomplete_last_chunk_and_blocks_that_are_not_wanted(rank: Rank) -> None:
    """Seven blocks: the last chunk has one; the first block of all is already there."""
    prompt = PROMPT[: 7 * BLOCK]
    keys = rank.save([1, 2, 3, 4, 5, 6, 7], prompt)
    rank.cache.write([40], prompt[:BLOCK])
    loaded = rank.load(keys, [41, 42, 43, 44, 45, 46], skip=1)
    assert loaded.num_valid == 6 and not loaded.reason
    assert rank.cache.first_wrong([40, 41, 42, 43, 44, 45, 46], prompt) is None


def test_a_chunk_that_no_tier_has_ends_what_is_good(rank: Rank) -> None:
    """What lies behind the gap does not count."""
    keys = rank.save([1, 2, 3, 4, 5, 6, 7, 8], PROMPT)
    loaded = rank.load([keys[0], bytes(32), keys[2], keys[3]], [40, 41, 42, 43, 44, 45, 46, 47])
    assert loaded.num_valid == 2 and "no tier" in loaded.reason
    assert rank.cache.first_wrong([40, 41], PROMPT[: 2 * BLOCK]) is None


def test_a_stopped_load_answers_once_and_writes_no_more(rank: Rank) -> None:
    """Unload before, during or after: one Loaded."""
    keys = rank.save([1, 2, 3, 4, 5, 6, 7, 8], PROMPT)
    for round_ in range(20):
        name = f"stop-{round_}"
        rank.side.on_half(
            Load(load_id=name, keys=keys, num_blocks=[2] * 4, skip_blocks=0, block_ids=[40, 41, 42, 43, 44, 45, 46, 47],
                 timeout_s=SLOW)
        )  # fmt: skip
        rank.side.on_half(Unload(load_id=name))
        loaded = rank.next(Loaded)
        assert isinstance(loaded, Loaded) and loaded.load_id == name
        good = list(range(40, 40 + loaded.num_valid))
        assert rank.cache.first_wrong(good, PROMPT[: loaded.num_valid * BLOCK]) is None
    rank.side.on_half(Find(find_id="end", keys=keys, timeout_s=20.0))
    fact = rank.next(Found)
    assert isinstance(fact, Found) and fact.num_keys == 4
    assert rank.facts.empty(), "a load was answered twice"


def test_find_counts_the_leading_keys(rank: Rank) -> None:
    keys = rank.save([1, 2, 3, 4], PROMPT[: 4 * BLOCK])
    for asked, count in (([*keys, bytes(32)], 2), ([bytes(32), *keys], 0), ([], 0)):
        rank.side.on_half(Find(find_id="f", keys=asked, timeout_s=20.0))
        fact = rank.next(Found)
        assert isinstance(fact, Found) and fact.num_keys == count


def test_damaged_values_are_counted_and_told_before_the_load_is_over(rank: Rank) -> None:
    """The scheduler half hears that the key is gone before it hears that the load came up short."""
    keys = rank.save([1, 2, 3, 4], PROMPT[: 4 * BLOCK])

    async def damage(store: object) -> None:
        slot = rank.side.thread.store.slots[0]
        lease = await slot.get(keys[1], SYSTEM_CLOCK.now() + 1)
        assert lease is not None
        frame = bytearray(lease.view)
        lease.release()
        frame[-1] ^= 1
        await slot.delete([keys[1]], SYSTEM_CLOCK.now() + 1)
        await slot.put(keys[1], [frame], SYSTEM_CLOCK.now() + 1)

    rank.side.thread.submit(damage).result(SLOW)
    loaded = rank.load(keys, [40, 41, 42, 43])
    assert loaded.num_valid == 2 and keys[1] not in rank.held and rank.num_corrupt == 1


def test_counts_of_two_threads_never_go_back(rank: Rank) -> None:
    """The heartbeat's thread may look before the store's and tell after it: nothing is taken back, nor told twice."""
    told = []
    for stored in (0, 5, 3, 5, 6):
        rank.side._count({"corrupt_chunks": 0, "stored_values": stored})
    while not rank.facts.empty():
        fact = rank.facts.get()
        if isinstance(fact, StoreCounts):
            told.append(fact.counts["stored_values"])
    assert told == [5, 1]


def test_a_device_is_waited_for_off_the_compute_thread(rank: Rank) -> None:
    """Nothing is read from the blocks before `ready` has returned."""
    stream, prompt = threading.Event(), PROMPT[: 2 * BLOCK]
    (key,) = keys_of(prompt)
    plan = SavePlan(save_id=1, keys=(key,), block_ids=(1, 2), first_token=0, num_tokens=2 * BLOCK)
    rank.side.save((plan,), lambda: stream.wait(SLOW) and None)
    rank.cache.write([1, 2], prompt)
    stream.set()
    rank.next(Saved)
    assert rank.load([key], [40, 41]).num_valid == 2
    assert rank.cache.first_wrong([40, 41], prompt) is None


def test_prefetch_brings_what_only_the_disk_has_into_memory(tmp_path: Path) -> None:
    """After a restart memory is empty; a waiting request's chunks are there when its turn comes."""
    tiers = (TierConfig(url="dram:", capacity_gib=0.05), TierConfig(url=f"file://{tmp_path}", capacity_gib=0.1))
    first = Rank(*tiers)
    keys = first.save([1, 2, 3, 4], PROMPT[: 4 * BLOCK])
    first.side.close()
    second = Rank(*tiers)
    try:
        while not set(keys) <= second.held:
            second.next(Held)
        second.side.on_half(Prefetch(find_id="p", keys=keys))
        front = second.side.thread.store.slots[0].name
        while True:
            fact = second.next(Held)
            if isinstance(fact, Held) and fact.tier == front and set(keys) <= set(fact.added):
                break
        assert second.load(keys, [40, 41, 42, 43]).num_valid == 4
        assert second.cache.first_wrong([40, 41, 42, 43], PROMPT[: 4 * BLOCK]) is None
    finally:
        second.side.close()


def test_ranks_have_directories_of_their_own(tmp_path: Path) -> None:
    """One process at a time may use a disk tier's directory."""
    tiers = [TierConfig(url=f"file://{tmp_path}", capacity_gib=0.2)]
    ranks = [Rank(*tiers, subdirectory=f"rank{i}", shares=2) for i in range(2)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank0", "rank1"]
    with pytest.raises(ConfigError, match="store"):
        Rank(*tiers, subdirectory="rank0")
    for rank in ranks:
        rank.side.close()


def test_ranks_share_what_a_tier_takes_where_nobody_said_how_much() -> None:
    """A quarter of the memory is for all of them."""
    tiers = [TierConfig(url=url) for url in ("dram:", "file:///kv", "redis://h")]
    own = _own(StoreSettings(config=StoreConfig(tiers=tiers), identity=IDENTITY, subdirectory="rank0", shares=8))
    memory, disk, server = (int(tier.capacity_gib * GIB) for tier in own.tiers)
    assert memory == default_capacity_bytes() // 8 and disk == DEFAULT_CAPACITY_BYTES // 8 and server == 0
    alone = _own(StoreSettings(config=StoreConfig(tiers=tiers), identity=IDENTITY))
    assert [tier.capacity_gib for tier in alone.tiers] == [0, 0, 0]


def test_ranks_have_nixl_directories_of_their_own() -> None:
    """Of each of these one process may use a directory."""
    tiers = [
        TierConfig(url="nixl-posix:///kv?durable=true"),
        TierConfig(url="nixl-obj://bucket/p?index=/kv/&region=r"),
        TierConfig(url="nixl-obj://bucket/p", options={"index": "/kv"}),
    ]
    own = _own(StoreSettings(config=StoreConfig(tiers=tiers), identity=IDENTITY, subdirectory="rank1", shares=2))
    assert [read_nixl_options(tier).directory for tier in own.tiers] == ["/kv/rank1"] * 3
    assert read_nixl_options(own.tiers[0]).durable and own.tiers[1].url.endswith("&region=r")


def test_a_prefetch_that_is_called_off_at_once_is_not_begun(rank: Rank) -> None:
    """Both words come before the store's thread gets to the first."""
    held, free = threading.Event(), threading.Event()

    def busy(store: TieredStore) -> None:
        held.set()
        free.wait(SLOW)

    rank.side.thread.call_soon(busy)
    assert held.wait(SLOW)
    rank.side.on_half(Prefetch(find_id="p", keys=[bytes(32)]))
    rank.side.on_half(Prefetch(find_id="p", keys=[], on=False))
    front = rank.side.thread.store.slots[0].tier
    calls: list[int] = []
    lookup = front.lookup

    async def looked(keys: Sequence[bytes], deadline: float) -> list[Entry | None]:
        calls.append(1)
        return await lookup(keys, deadline)

    front.lookup = looked  # type: ignore[method-assign]
    free.set()

    async def turns(store: TieredStore) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    rank.side.thread.submit(turns).result(SLOW)
    assert not calls
