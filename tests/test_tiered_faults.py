"""What tiers do wrong: damaged or foreign values are counted misses; a tier that is away costs no request its time."""

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
from tiered_kit import IDENTITY, OTHER, RAW_BYTES, Rig, chunk, key, raw, rig, until

from pdxfer.codec import frame as framing
from pdxfer.codec.frame import FrameHeader, read_header, seal
from pdxfer.config.store import StoreConfig, TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.store.base import Buffer, Entry, Outcome
from pdxfer.store.lease import PooledBuffer
from pdxfer.store.open import open_tier
from pdxfer.store.remote.errors import Reason, ServerError
from pdxfer.store.remote.server import Server
from pdxfer.store.remote.session import Lend
from pdxfer.store.remote.tier import RemoteTier
from pdxfer.store.tiered import TieredStore
from pdxfer.store.transcode import Transcoder
from pdxfer.testing.faulty_tier import FaultyTier

Damage = Callable[[bytes], bytes]


def _sealed(**changes: object) -> Damage:
    """The same payload under a header that is valid in itself and says something else."""

    def change(frame: bytes) -> bytes:
        header: FrameHeader = dataclasses.replace(read_header(frame), **changes)  # type: ignore[arg-type]
        return seal(header) + frame[framing.HEADER_BYTES :]

    return change


def _flip(at: int) -> Damage:
    return lambda frame: frame[:at] + bytes([frame[at] ^ 4]) + frame[at + 1 :]


def _foreign(identity: bytes) -> Damage:
    return lambda frame: bytes(Transcoder(identity).raw_frame(chunk("a")))


DAMAGES: dict[str, Damage] = {
    "flipped header bit": _flip(45),
    "flipped checksum bit": _flip(129),
    "flipped first payload bit": _flip(160),
    "flipped last payload bit": _flip(160 + RAW_BYTES - 1),
    "cut by one": lambda frame: frame[:-1],
    "cut to its header": lambda frame: frame[:160],
    "cut in its header": lambda frame: frame[:90],
    "empty": lambda frame: b"",
    "too long": lambda frame: frame + b"\0",
    "zeros": lambda frame: bytes(len(frame)),
    "another chunk's value": lambda frame: bytes(Transcoder(IDENTITY).raw_frame(chunk("b"))),
    "another model, its key ours": _foreign(OTHER),
    "another model's header": _sealed(identity=OTHER),
    "other number of tokens": _sealed(num_tokens=32),
    "other raw length": _sealed(raw_bytes=RAW_BYTES + 1),
    "huge raw length": _sealed(raw_bytes=1 << 31, codec="zstd"),
    "unknown codec": _sealed(codec="nobody"),
    "codec of a module": _sealed(codec="os:system"),
    "values of another dtype": _sealed(codec="int8", dtype="float16", shape=(1, 2, 1, 16, 1)),
    "newer frame version": lambda frame: frame[:4] + b"\2\0" + frame[6:],
}
LOCAL = {"dram": "dram:", "disk": "file://{0}/slab", "lmdb": "lmdb://{0}/lmdb", "sqlite": "sqlite://{0}/db"}


@pytest.mark.parametrize("name", DAMAGES)
async def test_a_wrong_value_is_a_counted_miss(name: str) -> None:
    """Never a byte of it, never an error; it is removed, and the next tier answers."""
    async with rig() as r:
        await r.saved("a", "b")
        value = r.memory(0).values[key("a")]
        value.data = bytearray(DAMAGES[name](bytes(value.data)))
        assert await r.load("a", "b") == {"a": "disk", "b": "dram"}
        assert r.store.slots[0].counts["corrupt"] == 1
        await r.settled()
        assert await r.load("a") == {"a": "dram"}, "repaired from the good copy"
        r.nothing_is_out()


@pytest.mark.parametrize("kind", LOCAL)
async def test_wrong_values_in_real_tiers(kind: str, tmp_path: Path) -> None:
    """Each damage in each local kind: alone there, it is a miss and is removed; a fresh save is then good again."""
    settings = TierConfig(url=LOCAL[kind].format(tmp_path), capacity_gib=0.0625)
    tier = await open_tier(settings, SYSTEM_CLOCK)
    store = TieredStore([tier], StoreConfig(tiers=[settings]), IDENTITY)
    r = Rig(store, [FaultyTier(tier)])
    await store.open()
    try:
        good = bytes(Transcoder(IDENTITY).raw_frame(chunk("a")))
        for number, (name, damage) in enumerate(DAMAGES.items()):
            assert await tier.put(key("a"), [damage(good)], r.soon) is Outcome.STORED, name
            assert await r.load("a") == {}, name
            assert store.slots[0].counts["corrupt"] == number + 1, name
            assert await r.found("a") == [], name
        await r.saved("a")
        assert list(await r.load("a")) == ["a"]
        r.nothing_is_out()
    finally:
        await store.close(r.soon)


async def test_another_engine_shares_tiers_but_not_values():
    """The same tiers under two identities: keys differ by themselves; even the same key is a miss."""
    async with rig(kinds=("redis",)) as ours:
        await ours.saved("a")
        config = StoreConfig(tiers=[TierConfig(url="redis:")])
        theirs = Rig(TieredStore(ours.tiers, config, OTHER), ours.tiers)
        await theirs.store.open()
        assert await theirs.load("a") == {}
        assert theirs.store.slots[0].counts["corrupt"] == 1
        theirs.store.workers.close()
        await theirs.store.writer.close()
        theirs.store._ticker.cancel()


# ---- tiers that are away ---------------------------------------------------------------------------------------------

FAULTS: dict[str, Callable[[FaultyTier], None]] = {
    "down": lambda tier: setattr(tier, "down", True),
    "frozen": lambda tier: setattr(tier, "frozen", True),
    "deaf": lambda tier: setattr(tier, "deaf", True),
    "raising": lambda tier: setattr(tier, "raising", True),
    "slow": lambda tier: setattr(tier, "slow_s", 30.0),
}


@pytest.mark.parametrize(
    "fault", ["frozen", *(pytest.param(f, marks=pytest.mark.slow) for f in FAULTS if f != "frozen")]
)
async def test_a_tier_that_is_away_costs_its_timeout_a_few_times_and_then_nothing(fault: str) -> None:
    """Serving goes on from the other tiers; the breaker opens; the tier is used again soon after it is back."""
    away = TierConfig(url="redis:", get_timeout_s=0.06, put_timeout_s=0.06)
    settings = [TierConfig(url="dram:"), away, TierConfig(url="disk:")]
    async with rig(*settings, kinds=("dram", "redis", "disk")) as r:
        await r.saved("a")
        FAULTS[fault](r.tiers[1])
        for name in range(4):
            await r.saved(name)
            assert (await r.store.lookup([key("a"), key("never")], r.soon)).num_chunks == 1
        assert not r.store.slots[1].readable
        begin, asked = time.monotonic(), len(r.tiers[1].calls)
        for name in range(200):
            assert await r.found("a", "never") == ["dram"]
        assert len(r.tiers[1].calls) - asked <= 8, "only probes"
        assert await r.load("a", 0, 3) == {"a": "dram", 0: "dram", 3: "dram"}

        r.tiers[1].down = r.tiers[1].raising = False
        r.tiers[1].slow_s = 0
        r.tiers[1].thaw()
        await until(lambda: r.store.slots[1].readable, "the tier to be used again")
        await r.saved("new")
        assert key("new") in r.memory(1).values
        assert time.monotonic() - begin < 30
        await until(lambda: r.store.slots[1].strays == 0, "given up calls to end")
        r.nothing_is_out()


async def test_no_call_outlives_the_callers_deadline():
    """A frozen tier with long timeouts of its own: the request's deadline counts."""
    async with rig() as r:
        await r.saved("a")
        r.tiers[1].frozen = r.tiers[2].frozen = True
        begin = time.monotonic()
        prefix = await r.store.lookup([key("a"), key("b")], r.store.clock.now() + 0.3)
        assert (prefix.num_chunks, prefix.complete) == (1, False)
        assert await r.load("a", "b", within=0.3) == {"a": "dram"}
        assert time.monotonic() - begin < 10


async def test_a_deadline_that_has_passed_asks_nobody():
    """Late requests are not made later by us."""
    async with rig() as r:
        await r.saved("a")
        for tier in r.tiers:
            tier.calls.clear()
        past = r.store.clock.now() - 1
        assert (await r.store.lookup([key("a")], past)).num_chunks == 0
        assert (await r.store.get([key("a")], past)) == []
        assert await r.load("a", within=-1) == {}
        assert (await r.store.save(chunk("z"), past)).outcome.value != "held"
        assert [tier.calls for tier in r.tiers[1:]] == [[], []]
        await r.settled()


@pytest.mark.slow
async def test_a_full_tier_still_serves():
    """Writes are refused, reads go on: their breakers are two."""
    async with rig() as r:
        await r.saved("a")
        r.store.events.evict("dram", [key("a")])
        del r.memory(0).values[key("a")]
        original = r.tiers[1].inner.put

        async def full(*args: object, **more: object) -> Outcome:
            return Outcome.FAILED

        r.tiers[1].inner.put = full  # type: ignore[method-assign]
        await r.saved(*range(10))
        assert r.store.slots[1].writes.state.value == "open" and r.store.slots[1].readable
        assert await r.load("a") == {"a": "disk"}
        r.tiers[1].inner.put = original  # type: ignore[method-assign]

        async def writes_again() -> bool:
            await r.saved(random.random())
            return r.store.slots[1].writes.state.value == "closed"

        end = time.monotonic() + 5
        while not await writes_again():
            assert time.monotonic() < end
            await asyncio.sleep(0.02)


async def _aborted(r: Rig, times: int) -> None:
    """Loads, lookups, gets and prefetches cancelled at any point, or late, or of what is not there."""
    rng = random.Random(7)
    names = [*range(6), "no", "neither"]
    for count in range(times):
        some = rng.sample(names, 3)
        keys = [key(n) for n in some]
        until_ = r.store.clock.now() + rng.choice((-1.0, 0.0, 0.0005, 20.0))
        work = rng.choice((
            lambda: r.store.lookup(keys, until_),
            lambda: r.store.prefetch(keys, "t", until_),
            lambda: r.load(*some, within=until_ - r.store.clock.now()),
            lambda: _get(r, keys, until_),
        ))  # fmt: skip
        task = asyncio.create_task(work())
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)
        if rng.random() < 0.7:
            task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        if count % 50 == 0:
            r.memory(0).values.pop(key(rng.randrange(6)), None)
    await r.settled()
    await until(lambda: all(s.strays == 0 for s in r.store.slots), "given up calls to end")
    r.nothing_is_out()


async def _get(r: Rig, keys: list[bytes], deadline: float) -> None:
    for got in await r.store.get(keys, deadline):
        got.release()


async def test_aborted_requests_return_everything():
    """Every lease, reservation and byte."""
    async with rig() as r:
        await r.saved(*range(6))
        await _aborted(r, 1500)
        assert bytes((await r.store.get([key(0)], r.soon))[0].raw) == raw(0)


@pytest.mark.slow
async def test_a_hundred_thousand_aborted_requests_return_everything():
    """The same, long enough for a leak of one in 10^5."""
    async with rig() as r:
        await r.saved(*range(6))
        await _aborted(r, 100_000)


class Half(RemoteTier):
    """Keys spread over two pretend servers, of which one does not answer."""

    def __init__(self) -> None:
        super().__init__(TierConfig(url="memcached://a,b"), SYSTEM_CLOCK)
        self.values: dict[bytes, bytes] = {}
        self.both = [self.server("a", lambda end: HalfSession(self.values)), self.server("b", _nobody)]

    def servers(self) -> Iterable[Server]:
        return self.both

    def place(self, key: bytes) -> Server | None:
        return self.both[key[0] % 2]


class HalfSession:
    """With the one that does."""

    def __init__(self, values: dict[bytes, bytes]) -> None:
        self._values = values

    def ping(self, end: float) -> None: ...

    def lookup(self, keys: Sequence[bytes], end: float) -> list[Entry | None]:
        return [Entry(key=key, num_bytes=len(self._values[key])) if key in self._values else None for key in keys]

    def read(self, key: bytes, lend: Lend, end: float) -> PooledBuffer | None:
        if (value := self._values.get(key)) is None:
            return None
        buffer = lend(len(value))
        buffer.view[:] = value
        return buffer

    def write(self, key: bytes, parts: Sequence[Buffer], num_bytes: int, end: float) -> Outcome:
        self._values[key] = b"".join(parts)
        return Outcome.STORED

    def remove(self, keys: Sequence[bytes], end: float) -> int:
        return 0

    def scan(self, after: bytes, limit: int, end: float) -> list[Entry]:
        return []

    def abort(self) -> None: ...

    def close(self) -> None: ...


def _nobody(end: float) -> HalfSession:
    raise ServerError(Reason.UNREACHABLE, "no connection")


async def test_one_of_several_servers_that_is_away_does_not_stop_the_others():
    """What they have is found, loaded and saved as before."""
    tier, settings = Half(), [TierConfig(url="memcached://a,b")]
    await tier.open()
    store = TieredStore([tier], StoreConfig(tiers=settings), IDENTITY)
    await store.open()
    r = Rig(store, [FaultyTier(tier)])
    there = [name for name in range(24) if key(name)[0] % 2 == 0]
    away = [name for name in range(24) if key(name)[0] % 2 == 1]
    try:
        await r.saved(*away[:6])
        await r.saved(*there)
        assert len(tier.values) == len(there)
        for _ in range(5):
            assert await r.found(*away) == []
        assert list(await r.load(*there)) == there
        [slot] = store.slots
        assert slot.readable and slot.writes.times_opened == 0 and not tier.stats().reachable
    finally:
        await store.close(r.soon)
