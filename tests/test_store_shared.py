"""The shared DRAM tier against a store server in this process: the suite, several engines, strangers."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from pdxfer.config.store import TierConfig
from pdxfer.core.errors import ConfigError
from pdxfer.store import shared_link
from pdxfer.store.base import Outcome, Tier
from pdxfer.store.dram import DramTier
from pdxfer.store.server import StoreServer, shared_segment
from pdxfer.store.server_session import Session
from pdxfer.store.shared import SharedDramTier
from pdxfer.store.shared_link import SharedLink
from pdxfer.store.shared_wire import Answer
from pdxfer.store.slot import TierSlot
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.testing.tier_kit import MIB, Opened, Wanted, closing, key_of, until, value_of
from pdxfer.testing.tier_suite import TierSuite


class HostedTier(SharedDramTier):
    """A client that brings its server along."""

    def __init__(self, path: Path, clock: FakeClock, wanted: Wanted) -> None:
        super().__init__(TierConfig(url=f"shm:{path}"), clock)
        config = wanted.config("dram:", populate="false")
        self.hosted = DramTier(config, clock, **wanted.limits(), make_segment=shared_segment)
        self.server = StoreServer(self.hosted, clock, path)

    async def open(self) -> None:
        await self.hosted.open()
        await self.server.start()
        await super().open()

    async def close(self) -> None:
        await super().close()
        if self.hosted.stats().reachable:
            await until(lambda: self.server.num_engines == 0, "the server to see the end")
            stats = self.hosted.stats()
            assert (stats.leases, stats.reservations) == (0, 0)
            self.hosted.check()
        await self.server.close()


class TestSharedDramTier(TierSuite):
    in_place = True

    def make(self, where: Path, clock: FakeClock, wanted: Wanted) -> Tier:
        return HostedTier(where / "store.sock", clock, wanted)


class Host:
    """One server, several engines."""

    def __init__(self, where: Path, capacity_bytes: int = 16 * MIB) -> None:
        self.path = where / "store.sock"
        self.clock = FakeClock()
        wanted = Wanted(capacity_bytes=capacity_bytes)
        self.tier = DramTier(wanted.config("dram:", populate="false"), self.clock, make_segment=shared_segment)
        self.server = StoreServer(self.tier, self.clock, self.path)

    async def __aenter__(self) -> "Host":
        await self.tier.open()
        await self.server.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.server.close()

    async def engine(self) -> Opened:
        tier = SharedDramTier(TierConfig(url=f"shm:{self.path}"), self.clock)
        await tier.open()
        return Opened(tier, self.clock)

    async def lent(self, leases: int, reservations: int) -> None:
        await until(
            lambda: (self.tier.stats().leases, self.tier.stats().reservations) == (leases, reservations),
            f"{leases} leases and {reservations} reservations, not {self.tier.stats()}",
        )


async def test_what_one_engine_stores_all_read_in_place(tmp_path: Path) -> None:
    """Same bytes of memory: a lease of the one shows what the other wrote, without a copy."""
    async with Host(tmp_path) as host:
        one, two = await host.engine(), await host.engine()
        async with closing(one.tier), closing(two.tier):
            await one.stored("k", num_bytes=MIB)
            assert await two.put(key_of("k"), b"x") is Outcome.ALREADY
            lease = await two.tier.get(key_of("k"), two.soon)
            assert lease is not None and bytes(lease.view) == value_of("k", MIB)
            piece = host.tier._index.find(key_of("k")).piece
            piece.view[:5] = b"patch"
            assert bytes(lease.view[:5]) == b"patch"
            assert await one.tier.delete([key_of("k")], one.soon) == 1
            assert await two.holds("k") == [False]
            assert bytes(lease.view[5:]) == value_of("k", MIB)[5:]
            lease.release()
            await host.lent(0, 0)
            assert host.tier.arena.used_bytes == 0


async def test_an_engine_that_goes_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its leases, its half-written values and its waiting reservations; what it had committed stays."""
    async with Host(tmp_path) as host:
        one, two = await host.engine(), await host.engine()
        async with closing(two.tier):
            await one.stored("kept")
            lease = await one.tier.get(key_of("kept"), one.soon)
            half = await one.tier.reserve(key_of("half"), 1000, one.soon)
            waiting = asyncio.ensure_future(one.put(key_of("half"), b"again"))
            await host.lent(1, 1)
            following = asyncio.ensure_future(two.put(key_of("half"), value_of("half", 1000)))
            await one.tier.close()
            assert await following is Outcome.STORED
            assert await waiting is Outcome.FAILED
            await host.lent(0, 0)
            host.tier.check()
            assert await two.holds("kept", "half") == [True, True]
            assert lease is not None and not isinstance(half, Outcome)
            lease.release()
            half.abort()


async def test_leases_may_be_released_on_any_thread(tmp_path: Path) -> None:
    async with Host(tmp_path) as host:
        one = await host.engine()
        async with closing(one.tier):
            await one.stored("k")
            lease = await one.tier.get(key_of("k"), one.soon)
            assert lease is not None
            await asyncio.to_thread(lease.release)
            await host.lent(0, 0)


async def test_engines_hear_what_was_evicted(tmp_path: Path) -> None:
    async with Host(tmp_path) as host:
        one, two = await host.engine(), await host.engine()
        async with closing(one.tier), closing(two.tier):
            await one.stored(*range(24), num_bytes=MIB)
            heard: list[bytes] = []

            def all_heard() -> bool:
                heard.extend(two.tier.take_evicted() or [])
                return len(heard) == 8

            await until(all_heard, "8 evictions to be told")
            assert sorted(heard) == sorted(key_of(n) for n in range(8))


async def test_a_second_store_process_is_refused(tmp_path: Path) -> None:
    async with Host(tmp_path) as host:
        other = StoreServer(host.tier, host.clock, host.path)
        with pytest.raises(ConfigError, match="another store process serves"):
            await other.start()


async def test_the_socket_is_the_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its mode, and by the user id the kernel reports."""
    async with Host(tmp_path) as host:
        assert host.path.stat().st_mode & 0o777 == 0o600
        mine = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
        with pytest.raises(ConfigError, match=f"runs as user {mine}, the store as user {mine + 1}"):
            await host.engine()


async def test_another_version_is_refused_naming_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Host(tmp_path) as host:
        monkeypatch.setattr(shared_link, "VERSION", 9)
        with pytest.raises(ConfigError, match="speaks version 1, we speak 9"):
            await host.engine()


@pytest.mark.parametrize(
    "bytes_sent",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1", b"\x03\x00\x00\x00\x92\xa4drop"],
    ids=["http", "endless", "garbage", "cut"],
)
async def test_a_stranger_is_detached_and_harms_nobody(tmp_path: Path, bytes_sent: bytes) -> None:
    async with Host(tmp_path) as host:
        one = await host.engine()
        async with closing(one.tier):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            stranger.connect(str(host.path))
            await until(lambda: host.server.num_engines == 2, "the stranger to be attached")
            stranger.sendall(bytes_sent)
            stranger.shutdown(socket.SHUT_WR)
            await until(lambda: host.server.num_engines == 1, "the stranger to be detached")
            stranger.close()
            await one.stored("k")


async def test_a_handle_that_is_not_ours_ends_the_connection_only(tmp_path: Path) -> None:
    async with Host(tmp_path) as host:
        one, two = await host.engine(), await host.engine()
        async with closing(one.tier), closing(two.tier):
            await one.stored("k")
            two.tier._link.drop(4711)
            await until(lambda: host.server.num_engines == 1, "the engine to be detached")
            assert await one.get(key_of("k")) == value_of("k", 1000)
            await until(lambda: two.tier.stats().reachable, "the engine to attach again")
            assert await two.get(key_of("k")) == value_of("k", 1000)


async def test_without_a_store_process_everything_is_a_miss_until_it_comes(tmp_path: Path) -> None:
    host = Host(tmp_path)
    one = await host.engine()
    async with closing(one.tier):
        assert not one.tier.stats().reachable
        assert await one.put(key_of("k"), b"x") is Outcome.FAILED
        assert await one.get(key_of("k")) is None
        assert await one.holds("k") == [False]
        assert one.tier.stats().failures["unreachable"] >= 3
        async with host:
            await until(lambda: one.tier.stats().reachable, "the engine to attach", timeout_s=5.0)
            await one.stored("k")
            assert one.tier.take_evicted() == []
        await until(lambda: not one.tier.stats().reachable, "the end to be seen")
        assert await one.get(key_of("k")) is None
        assert one.tier.take_evicted() is None


async def test_a_path_too_long_for_a_socket_says_so(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    host = Host(long)
    with pytest.raises(ConfigError, match="longer than the 107 bytes"):
        async with host:
            pass
    await host.server.close()


async def test_a_commit_past_its_deadline_leaves_nothing_in_the_store_process(tmp_path: Path) -> None:
    """However late the engine is, it says that it has ended: other engines need not wait for it to go."""
    async with Host(tmp_path) as host:
        one, two = await host.engine(), await host.engine()
        async with closing(one.tier), closing(two.tier):
            reservation = await one.tier.reserve(key_of("k"), 1000, host.clock.now() + 1.0)
            assert not isinstance(reservation, Outcome)
            host.clock.advance(2.0)
            assert await reservation.commit() is Outcome.LATE
            await host.lent(0, 0)
            assert await two.put(key_of("k"), value_of("k", 1000)) is Outcome.STORED
            assert one.tier.stats().failures == {}


async def test_a_silent_store_process_is_not_asked_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three calls wait for a frozen one, all others go on without it; a late answer is a sign of life."""
    async with Host(tmp_path) as host:
        engine = await host.engine()
        slot = TierSlot("dram", engine.tier, TierConfig(url=f"shm:{host.path}", get_timeout_s=0.06), host.clock)
        async with closing(engine.tier):
            await engine.stored("a")
            with monkeypatch.context() as silent:
                answers: list[tuple[Session, Answer]] = []
                silent.setattr(Session, "_answer", lambda session, answer: answers.append((session, answer)))
                for _ in range(3):
                    assert slot.readable
                    assert await slot.lookup([key_of("a")], engine.soon) == [None]
                    assert not engine.tier.stats().reachable
                assert not slot.readable and len(answers) == 3
            session, answer = answers[0]
            session._answer(answer)
            await until(lambda: engine.tier.stats().reachable, "the answer to arrive")
            host.clock.advance(1.0)
            await slot.probe()
            assert slot.readable
            assert await slot.lookup([key_of("a")], engine.soon) != [None]


async def test_in_a_store_its_calls_end_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the deadline while the store process is silent, at once when it has gone; then it is not asked any more. What
    was cancelled, or answered too late, is given back."""
    async with Host(tmp_path) as host:
        engine = await host.engine()
        slot = TierSlot("dram", engine.tier, TierConfig(url=f"shm:{host.path}"), host.clock)
        async with closing(engine.tier):
            assert await slot.put(key_of("a"), [value_of("a", MIB)], engine.soon) is Outcome.STORED
            calls = [
                asyncio.ensure_future(slot.reserve(key_of("b"), MIB, engine.soon)),
                asyncio.ensure_future(slot.get(key_of("a"), engine.soon)),
            ]
            await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            ended = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(error, asyncio.CancelledError) for error in ended)
            await host.lent(0, 0)
            with monkeypatch.context() as silent:
                answers: list[tuple[Session, Answer]] = []
                silent.setattr(Session, "_answer", lambda session, answer: answers.append((session, answer)))
                soon = host.clock.now() + 0.02
                assert await slot.reserve(key_of("b"), MIB, soon) is Outcome.LATE
                assert await slot.get(key_of("a"), soon) is None
            for session, answer in answers:
                session._answer(answer)
            await host.lent(0, 0)
            assert slot.strays == 0 and slot.readable
            await host.server.close()
            await until(lambda: not engine.tier.stats().reachable, "the engine to notice")
            for _ in range(3):
                assert slot.readable
                assert await slot.lookup([key_of("a")], engine.soon) == [None]
            assert not slot.readable


async def test_a_call_that_raises_counts_against_the_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times in a row, and requests do not ask it any more; as with every other tier."""

    async def wrong(*_: object) -> None:
        raise ZeroDivisionError

    async with Host(tmp_path) as host:
        engine = await host.engine()
        slot = TierSlot("dram", engine.tier, TierConfig(url=f"shm:{host.path}"), host.clock)
        async with closing(engine.tier):
            monkeypatch.setattr(engine.tier, "get", wrong)
            for _ in range(3):
                assert slot.readable
                assert await slot.get(key_of("a"), engine.soon) is None
            assert not slot.readable and slot.counts["raised"] == 3


async def test_what_is_asked_in_one_turn_goes_in_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system call that wakes another process costs more than what it says. The same with the answers."""
    async with Host(tmp_path) as host:
        engine = await host.engine()
        async with closing(engine.tier):
            received: list[bytes] = []
            take_in = SharedLink.data_received

            def noted(link: SharedLink, data: bytes) -> None:
                received.append(data)
                take_in(link, data)

            monkeypatch.setattr(SharedLink, "data_received", noted)
            found = await asyncio.gather(*(engine.tier.lookup([key_of(str(i))], engine.soon) for i in range(8)))
            assert found == [[None]] * 8 and len(received) == 1


async def test_a_tier_that_is_closed_at_once_has_let_go(tmp_path: Path) -> None:
    """Before its background task has begun."""
    async with Host(tmp_path) as host:
        engine = await host.engine()
        await engine.tier.close()
        await until(lambda: host.server.num_engines == 0, "the server to see the end")
