"""The peer tier on a real PeerService: the tier suite's reading half, and an index that follows what peers hold."""

import asyncio
import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from peer_kit import KEY, ME, OTHER, SECRET, Peer, knows, peer_id, peers, read, reading, soon
from servers.kit import RemoteContract

from pdxfer.config.store import TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.errors import ConfigError
from pdxfer.store.base import Buffer, Entry, Lease, Outcome, Reservation, TierStats
from pdxfer.store.events import Batch
from pdxfer.store.open import open_tier
from pdxfer.store.peer import service
from pdxfer.store.peer.links import Link, Links
from pdxfer.store.peer.session import PeerSession, Way
from pdxfer.store.peer.tier import PeerTier
from pdxfer.store.peer.wire import Told
from pdxfer.store.tiered import TieredStore
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.testing.memory_tier import MemoryTier
from pdxfer.testing.tier_kit import MIB, Wanted, key_of, until, value_of
from pdxfer.wire.messages import StoreAddress


class Across:
    """What the suite sees as one tier: put into a peer's memory, read from there by a PeerTier. Sizes, which a lookup
    across nodes does not know, are the peer's own."""

    kind = "peer"

    def __init__(self, clock: FakeClock) -> None:
        self._clock, self._puts, self._reserved = clock, 0, 0
        self._links = Links()
        self._tier = PeerTier(TierConfig(url="peer:"), clock, links=self._links)
        self._closed = False

    async def open(self) -> None:
        self._peer = await asyncio.to_thread(Peer)
        await self._tier.open()
        self._links.join(ME)
        self._links.meet([self._peer.node], SECRET)
        [link] = self._links
        await until(lambda: link.num_snapshots, "what the peer has")

    async def lookup(self, keys: Sequence[bytes], deadline: float) -> list[Entry | None]:
        said = await self._tier.lookup(keys, deadline)
        if not any(said):
            return said
        own = await self._peer.ask(lambda store: store.slots[0].tier.lookup(keys, soon()))
        pairs = zip(said, own, strict=True)
        return [None if a is None or b is None else dataclasses.replace(a, num_bytes=b.num_bytes) for a, b in pairs]

    async def reserve(self, key: bytes, num_bytes: int, deadline: float, tenant: str = "") -> Reservation | Outcome:
        refused = await self._tier.reserve(key, num_bytes, deadline, tenant)
        return refused if refused is not Outcome.TOO_LARGE else _Pending(self, key, num_bytes, deadline)

    async def put(self, key: bytes, parts: Sequence[Buffer], deadline: float, tenant: str = "") -> Outcome:
        refused = await self._tier.put(key, parts, deadline, tenant)
        if refused is not Outcome.TOO_LARGE:
            return refused
        value = b"".join(parts)

        async def run(store: TieredStore) -> Outcome:
            outcome = await store.slots[0].tier.put(key, [value], store.clock.now() + 10)
            store.events.add("dram", [key])
            store.events.flush()
            return outcome

        outcome = await self._peer.ask(run)
        self._puts += outcome is Outcome.STORED
        await self._knows_or_gone(key)
        return outcome

    async def get(self, key: bytes, deadline: float) -> Lease | None:
        return await self._tier.get(key, deadline)

    async def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        if self._closed or deadline <= self._clock.now():
            return 0

        async def run(store: TieredStore) -> int:
            count = await store.slots[0].tier.delete(keys, store.clock.now() + 10)
            store.events.evict("dram", keys)
            store.events.flush()
            return count

        count = await self._peer.ask(run)
        for link in self._links:
            link.index.forget(keys)
        return count

    async def pin(self, keys: Sequence[bytes], ttl_s: float | None, deadline: float) -> int:
        return await self._tier.pin(keys, ttl_s, deadline)

    async def unpin(self, keys: Sequence[bytes], deadline: float) -> int:
        return await self._tier.unpin(keys, deadline)

    async def scan(self, after: bytes, limit: int, deadline: float) -> list[Entry]:
        return await self._tier.scan(after, limit, deadline)

    def stats(self) -> TierStats:
        return dataclasses.replace(self._tier.stats(), puts=self._puts, reservations=self._reserved)

    async def close(self) -> None:
        self._closed = True
        await self._tier.close()
        await asyncio.to_thread(self._peer.close)

    async def _knows_or_gone(self, key: bytes) -> None:
        """Until the news has come; another task may have deleted it meanwhile."""
        end = SYSTEM_CLOCK.now() + 10
        while SYSTEM_CLOCK.now() < end and (await self._tier.lookup([key], self._clock.now() + 10)) == [None]:
            if await self._peer.held(key) == [False]:
                return
            await asyncio.sleep(0.001)


class _Pending:
    """A value on its way into the peer's memory."""

    def __init__(self, across: Across, key: bytes, num_bytes: int, deadline: float) -> None:
        self.view = memoryview(bytearray(num_bytes))
        self._across, self._key, self._deadline, self._open = across, key, deadline, True
        across._reserved += 1

    async def commit(self) -> Outcome:
        assert self._open
        try:
            return await self._across.put(self._key, [self.view], self._deadline)
        finally:
            self.abort()

    def abort(self) -> None:
        self._across._reserved -= self._open
        self._open = False

    async def __aenter__(self) -> "_Pending":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()


@pytest.mark.slow
class TestReading(RemoteContract):
    survives_restart = False
    scans = False

    def make(self, where: Path, clock: FakeClock, wanted: Wanted) -> Across:  # type: ignore[override]
        return Across(clock)


async def test_what_a_peer_tells_is_found_and_what_it_drops_is_not() -> None:
    """Before and after the connection was made; a value of no bytes, too."""
    async with peers() as [peer]:
        await peer.put(KEY, b"")
        async with reading(peer.node) as (tier, _):
            await knows(tier, KEY)
            assert await read(tier, KEY) == b""
            await peer.put(OTHER, value_of("o", 3 * MIB))
            await knows(tier, KEY, OTHER)
            assert await read(tier, OTHER) == value_of("o", 3 * MIB)
            await peer.drop(KEY)
            await knows(tier, KEY, held=False)
            assert await peer.leases() == 0


async def test_a_value_evicted_between_lookup_and_get_is_a_counted_miss() -> None:
    """The peer is not asked for it again; another peer that has it still serves it."""
    async with peers("a", "b") as [a, b]:
        for peer in (a, b):
            await peer.put(KEY, b"value")
            await peer.put(OTHER, b"other")
        async with reading(a.node, b.node) as (tier, links):
            await until(lambda: all(link.among({KEY, OTHER}) == {KEY, OTHER} for link in links), "news")
            first = tier._holders(KEY)[0].way.peer.engine_id
            await (a if first == "a" else b).drop(KEY, tell=False)
            assert await read(tier, KEY) == b"value"
            assert tier.stats().failures == {"stale": 1}
            await (b if first == "a" else a).drop(KEY, tell=False)
            assert await read(tier, KEY) is None
            assert tier.stats().failures == {"stale": 2}
            assert await tier.lookup([KEY], soon()) == [None]


async def test_a_value_that_comes_back_while_a_peer_says_it_is_gone_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer is older than the news, and the peer tells of a value only once."""
    async with peers() as [peer]:
        await peer.put(KEY, b"value")
        async with reading(peer.node) as (tier, [link]):
            await knows(tier, KEY)

            async def absent_then_news(*_: object, **__: object) -> None:
                link.index.apply(Batch(seq=1 << 40, tier="dram", added=[KEY], restart=True))

            with monkeypatch.context() as asked:
                asked.setattr(link.server, "run", absent_then_news)
                assert await read(tier, KEY) is None
            assert tier.stats().failures == {"stale": 1}
            assert await read(tier, KEY) == b"value"


class Slow(MemoryTier):
    """Has a value, and does not give it in time."""

    is_slow = True

    async def get(self, key: bytes, deadline: float) -> Lease | None:
        return None if self.is_slow else await super().get(key, deadline)


async def test_a_value_that_a_peer_has_and_does_not_give_now_is_found_again() -> None:
    """A miss, but not forgotten: the peer says what it holds only once."""
    slow = Slow(TierConfig(url="dram:"))
    peer = await asyncio.to_thread(Peer, "peer", 64 * MIB, 1, slow)
    try:
        await peer.put(KEY, b"value")
        async with reading(peer.node) as (tier, [link]):
            await knows(tier, KEY)
            assert await read(tier, KEY) is None
            assert "stale" not in tier.stats().failures and link.server.up
            slow.is_slow = False
            assert await read(tier, KEY) == b"value"
    finally:
        await asyncio.to_thread(peer.close)


async def test_a_connection_that_is_made_while_its_link_closes_is_not_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that follows ends, although nobody aborts this one."""
    connecting, connected, ended = threading.Event(), threading.Event(), threading.Event()

    class Session:
        def __init__(self, *_: object) -> None:
            connecting.set()
            connected.wait()

        def follow(self, heard: object) -> None:
            ended.wait()

        def abort(self) -> None:
            ended.set()

        close = abort

    monkeypatch.setattr("pdxfer.store.peer.links.PeerSession", Session)
    way = Way(me=ME, peer=peer_id("peer"), address=StoreAddress(host="127.0.0.1", port=1), secret=SECRET)
    link = Link(way, 1, lambda reason: None)
    link.follow()
    assert link._thread is not None
    await asyncio.to_thread(connecting.wait)
    await link.close()
    connected.set()
    try:
        await asyncio.to_thread(link._thread.join, 10)
        assert not link._thread.is_alive()
    finally:
        ended.set()


async def test_a_bug_while_a_batch_is_taken_in_does_not_end_the_following(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is logged, and begins anew; what the peer holds would else be as of then for ever."""
    monkeypatch.setattr("pdxfer.store.peer.links.MAX_REST_S", 0.01)
    apply, left = Link._apply, [True]

    def once_wrong(link: Link, told: Told) -> bool:
        if left:
            left.pop()
            raise ZeroDivisionError
        return apply(link, told)

    monkeypatch.setattr(Link, "_apply", once_wrong)
    async with peers() as [peer]:
        await peer.put(KEY, b"value")
        async with reading(peer.node) as (tier, _):
            await knows(tier, KEY)
            assert not left and await read(tier, KEY) == b"value"


async def test_a_batch_that_is_missing_makes_the_listener_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It forgets, comes back and is told everything."""
    monkeypatch.setattr("pdxfer.store.peer.links.MAX_REST_S", 0.01)
    async with peers() as [peer]:
        async with reading(peer.node) as (tier, [link]):
            await peer.put(KEY, b"value")
            await knows(tier, KEY)
            assert link.num_snapshots == 1
            link.index.apply(Batch(seq=0, tier="dram", restart=True))  # as if nothing had been heard since 0
            await peer.put(OTHER, b"other")
            await until(lambda: link.num_snapshots == 2, "a second snapshot")
            await knows(tier, KEY, OTHER)


async def test_a_listener_that_falls_behind_is_cut_off_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer never waits for it, and keeps a bounded number of batches for it."""
    monkeypatch.setattr("pdxfer.store.peer.links.MAX_REST_S", 0.01)
    monkeypatch.setattr(service, "MAX_BEHIND", 2)
    async with peers() as [peer]:
        async with reading(peer.node) as (tier, [link]):
            await until(lambda: link.num_snapshots == 1, "the snapshot")

            async def burst(store: TieredStore) -> None:
                for number in range(50):
                    store.events.add("dram", [key_of(number)])
                    store.events.flush()

            await peer.ask(burst)
            await until(lambda: link.num_snapshots >= 2, "another snapshot")
            await knows(tier, *map(key_of, range(50)))


async def test_a_peer_in_another_life_is_another_peer() -> None:
    """What its former life held is forgotten with it; its new life is not served under the old name."""
    async with peers() as [peer]:
        await peer.put(KEY, b"value")
        async with reading(peer.node) as (tier, links):
            await knows(tier, KEY)
            again = await asyncio.to_thread(Peer, "peer", 64 * MIB, 2)
            try:
                links.meet([again.node], SECRET)
                assert await tier.lookup([KEY], soon()) == [None]
                await again.put(OTHER, b"new")
                await knows(tier, OTHER)
                assert await read(tier, OTHER) == b"new" and await read(tier, KEY) is None
                links.meet([], SECRET)
                assert await tier.lookup([OTHER], soon()) == [None]
            finally:
                await asyncio.to_thread(again.close)


@pytest.mark.parametrize("secret", [b"x" * 32, b""], ids=["wrong", "none"])
async def test_who_does_not_know_the_secret_gets_nothing(secret: bytes) -> None:
    """The peer counts it; nothing here waits for it."""
    async with peers() as [peer]:
        await peer.put(KEY, b"value")
        async with reading() as (tier, links):
            links.meet([peer.node], secret)
            await until(lambda: peer.service.admission.refused["wrong proof"], "a refusal")
            assert await tier.lookup([KEY], soon()) == [None]
            links.meet([], secret)


async def test_nothing_is_put_and_a_delete_only_forgets() -> None:
    async with peers() as [peer]:
        await peer.put(KEY, b"value")
        async with reading(peer.node) as (tier, _):
            await knows(tier, KEY)
            assert await tier.put(OTHER, [b"x"], soon()) is Outcome.TOO_LARGE
            assert await tier.reserve(OTHER, 1, soon()) is Outcome.TOO_LARGE
            assert await tier.delete([KEY, OTHER], soon()) == 1
            assert await tier.lookup([KEY], soon()) == [None]
            assert await peer.held(KEY) == [True]


async def test_without_a_router_there_are_no_peers() -> None:
    with pytest.raises(ConfigError, match="router"):
        await open_tier(TierConfig(url="peer:"), SYSTEM_CLOCK)


async def test_memory_that_engines_share_is_not_emptied_by_a_move() -> None:
    """Who takes the values over may be reading the same memory: they stay, and the mover is told."""
    shared = MemoryTier(TierConfig(url="dram:"))  # of kind dram, and not this process's arena: shared, to the store
    peer = await asyncio.to_thread(Peer, "peer", 64 * MIB, 1, shared)
    try:
        await peer.put(KEY, b"value")
        async with reading(peer.node) as (_, [link]):
            said = await link.server.run(lambda session: PeerSession.of(session).moved([KEY, OTHER], ""), soon())
            assert said == ["kept_shared", "absent"]
            assert await peer.held(KEY) == [True]
    finally:
        await asyncio.to_thread(peer.close)


async def test_a_listing_is_paged_and_a_lookup_knows_sizes() -> None:
    """What a move of everything asks for."""
    keys = sorted(key_of(number) for number in range(10))
    async with peers() as [peer]:
        for number, key in enumerate(keys):
            await peer.put(key, bytes(number))
        async with reading(peer.node) as (_, [link]):
            page = await link.server.run(lambda session: session.scan(keys[2], 5, soon()), soon())
            assert [(entry.key, entry.num_bytes) for entry in page] == list(zip(keys[3:8], range(3, 8), strict=True))
            found = await link.server.run(lambda session: session.lookup([keys[9], OTHER], soon()), soon())
            assert found[0] is not None and found[0].num_bytes == 9 and found[1] is None
