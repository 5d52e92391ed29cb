"""The pool: which channel is opened to whom, what happens when one fails, what the node is told."""

import threading
from collections.abc import Iterator, Sequence

import pytest

from pdxfer.core.clock import SYSTEM_CLOCK, Clock
from pdxfer.core.errors import ChannelError, ConfigError
from pdxfer.testing.channel_suite import until
from pdxfer.testing.fake_clock import FakeClock
from pdxfer.transport.base import Control, OutgoingUnit, PeerId, UnitResult
from pdxfer.transport.breaker import LONGEST_S, STEADY_S, Breaker
from pdxfer.transport.pool import ChannelPool, endpoint_factories
from pdxfer.wire.messages import ChannelAddress, PeerNode, Role

ME = PeerId(engine_id="p0", incarnation=1, rank=0)


class StubChannel:
    generation = 0

    def __init__(self, kind: str, peer: PeerId, address: bytes) -> None:
        self.kind, self.peer, self.address, self.dead, self.closed = kind, peer, address, "", False

    def write(self, unit: OutgoingUnit) -> None: ...
    def poll(self, timeout_s: float) -> Sequence[UnitResult]:
        return []

    def tell(self, control: Control) -> None: ...
    def probe(self, timeout_s: float) -> None: ...
    def close(self) -> None:
        self.closed, self.dead = True, self.dead or "closed"


class StubEndpoint:
    """Connects unless `broken`; `excuse` is what accepts() says."""

    writes_here, generation = True, 0

    def __init__(self, kind: str) -> None:
        self.kind, self.excuse, self.broken = kind, "", False
        self.bug: Exception | None = None
        """Raised by connect, or by accepts if `excuse` is set, too."""
        self.channels: list[StubChannel] = []
        self.num_attempts = 0

    def address(self) -> bytes:
        return b""

    def admit(self, peers: Sequence[PeerId], secret: bytes) -> None: ...
    def accepts(self, address: bytes) -> str:
        if self.bug is not None and self.excuse:
            raise self.bug
        return self.excuse

    def connect(self, peer: PeerId, address: bytes, timeout_s: float) -> StubChannel:
        self.num_attempts += 1
        if self.bug is not None:
            raise self.bug
        if self.broken:
            raise ChannelError(f"{self.kind} is broken today")
        self.channels.append(StubChannel(self.kind, peer, address))
        return self.channels[-1]

    def tell(self, peer: PeerId, control: Control) -> None: ...
    def fence(self, peer: PeerId) -> None: ...
    def attend(self, active: bool) -> None: ...
    def close(self) -> None: ...


def node(engine_id: str = "d0", incarnation: int = 1, role: Role = "decode", version: bytes = b"1") -> PeerNode:
    kinds = ("local", "nixl", "tcp")
    addresses = [ChannelAddress(kind=kind, blob=version) for kind in kinds]
    return PeerNode(engine_id=engine_id, incarnation=incarnation, rank=0, role=role, addresses=addresses, generation=0)


class Rig:
    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self.endpoints = [StubEndpoint(kind) for kind in ("local", "nixl", "tcp")]
        self.local, self.nixl, self.tcp = self.endpoints
        self.told: list[tuple[str, str, str]] = []
        self.pool = ChannelPool(self.endpoints, ME, self.on_ready, clock, seed=1)

    def on_ready(self, peer: PeerId, kind: str, reason: str) -> None:
        self.told.append((peer.engine_id, kind, reason))

    def kind(self, engine_id: str = "d0") -> str:
        channel = self.pool.channel(engine_id)
        return channel.kind if channel else ""


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """With the clock it is given, or the system's."""
    rig = Rig(getattr(request, "param", SYSTEM_CLOCK))
    yield rig
    rig.pool.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("pdxfer-pool")]


def test_the_first_kind_that_works_is_chosen_and_the_reason_is_told(rig: Rig) -> None:
    rig.local.excuse = "other host"
    rig.pool.update([node()], b"s")
    until(lambda: rig.told, "on_ready")
    assert rig.told == [("d0", "nixl", "not local: other host; also there: tcp")]
    assert rig.kind() == "nixl" and not rig.tcp.channels


def test_prefill_peers_and_we_ourselves_are_no_targets(rig: Rig) -> None:
    rig.pool.update([node("p1", role="prefill"), node("p0", role="both"), node("d1")], b"s")
    until(lambda: rig.told, "on_ready")
    assert [t[0] for t in rig.told] == ["d1"] and rig.kind("p1") == ""


def test_a_kind_that_fails_is_passed_over_and_taken_when_it_works_again(rig: Rig) -> None:
    rig.local.broken = True
    rig.pool.update([node()], b"s")
    until(lambda: rig.kind() == "nixl", "the fall-back")
    rig.local.broken = False
    until(lambda: rig.kind() == "local", "the upgrade")
    assert not rig.nixl.channels[0].closed, "a sender may still be using it"
    assert [t[1] for t in rig.told] == ["nixl", "local"]


def test_a_reported_failure_closes_the_channel_and_tries_the_same_kind_first(rig: Rig) -> None:
    rig.pool.update([node()], b"s")
    until(lambda: rig.kind() == "local", "the first channel")
    broken = rig.local.channels[0]
    rig.pool.report_failure(broken, "reset")
    assert broken.closed
    until(lambda: rig.kind() == "local", "a new channel of the same kind")
    rig.pool.report_failure(rig.local.channels[1], "reset again")
    until(lambda: rig.kind() == "nixl", "the fall-back after the second failure in a row")


def test_a_late_report_of_a_channel_that_was_replaced_hurts_not_its_successor(rig: Rig) -> None:
    """The pool has noticed the death first; a prompt that began on the old channel finds out when it is computed."""
    rig.pool.update([node()], b"s")
    until(lambda: rig.kind() == "local", "the first channel")
    rig.local.channels[0].dead = "fenced there"
    until(lambda: rig.kind() == "local", "its successor")
    rig.pool.report_failure(rig.local.channels[0], "the connection was closed")
    assert rig.pool.channel("d0") is rig.local.channels[1] and not rig.local.channels[1].closed


def test_a_quiet_death_is_noticed_without_a_sender(rig: Rig) -> None:
    rig.pool.update([node()], b"s")
    until(lambda: rig.kind() == "local", "the first channel")
    rig.local.channels[0].dead = "the peer closed the connection"
    until(lambda: len(rig.local.channels) == 2, "a new channel")


def test_nothing_works_is_told_with_every_reason(rig: Rig) -> None:
    rig.local.excuse, rig.nixl.broken, rig.tcp.broken = "other host", True, True
    rig.pool.update([node()], b"s")
    until(lambda: rig.told, "on_ready")
    engine, kind, reason = rig.told[0]
    assert (engine, kind) == ("d0", "")
    assert "local: other host" in reason and "nixl is broken" in reason and "tcp is broken" in reason
    rig.tcp.broken = False
    until(lambda: rig.kind() == "tcp", "the retry")


def test_a_new_life_of_a_peer_gets_a_new_channel_and_a_lost_peer_none(rig: Rig) -> None:
    rig.pool.update([node()], b"s")
    until(lambda: rig.kind() == "local", "the first channel")
    rig.pool.update([node(incarnation=2)], b"s")
    assert rig.local.channels[0].closed
    until(lambda: rig.kind() == "local", "the second channel")
    assert rig.local.channels[1].peer.incarnation == 2
    rig.pool.update([], b"s")
    assert rig.local.channels[1].closed and rig.kind() == ""


@pytest.mark.parametrize("after", [[], [node(incarnation=2)]])
def test_a_channel_that_was_replaced_is_closed_with_its_peer(rig: Rig, after: list[PeerNode]) -> None:
    """Before its sender settles what it was sending over it: a write that is still posted would read blocks that belong
    to somebody else by then."""
    rig.local.broken = True
    rig.pool.update([node(), node("d1")], b"s")
    until(lambda: rig.kind() == rig.kind("d1") == "nixl", "the fall-back")
    rig.local.broken = False
    until(lambda: rig.kind() == rig.kind("d1") == "local", "the upgrade")
    replaced = {channel.peer.engine_id: channel for channel in rig.nixl.channels}
    rig.pool.update([*after, node("d1")], b"s")
    assert replaced["d0"].closed and not replaced["d1"].closed


@pytest.mark.parametrize("rig", [FakeClock()], indirect=True)
def test_a_changed_address_gives_a_paused_kind_a_fresh_start(rig: Rig) -> None:
    """The clock stands still, so the pause would never end by itself."""
    rig.local.broken = True
    rig.pool.update([node()], b"s")
    until(lambda: rig.kind() == "nixl", "a failure, and the next kind")
    rig.local.broken = False
    rig.pool.update([node(version=b"2")], b"s")
    until(lambda: rig.kind() == "local", "an attempt at the new address")
    assert rig.local.channels[0].address == b"2" and rig.local.num_attempts == 2


@pytest.mark.parametrize("rig", [FakeClock()], indirect=True)
@pytest.mark.parametrize("excuse", ["", "set"])
def test_a_bug_of_a_plug_in_counts_as_a_refusal(rig: Rig, excuse: str, caplog: pytest.LogCaptureFixture) -> None:
    """In connect or in accepts: the next kind is used, and the first one pauses instead of failing in a loop."""
    rig.local.bug, rig.local.excuse = KeyError("a bug"), excuse
    rig.pool.update([node()], b"s")
    until(lambda: rig.kind() == "nixl", "the next kind")
    rig.pool.update([node("d1"), node()], b"s")
    until(lambda: rig.kind("d1") == "nixl", "the same for another peer")
    assert rig.local.num_attempts == (0 if excuse else 2)
    assert len([record for record in caplog.records if record.exc_info]) == 2


def test_the_breaker_doubles_its_pause_up_to_a_cap_and_forgives_a_steady_life() -> None:
    import random

    breaker = Breaker(random.Random(1))
    pauses = []
    for _ in range(12):
        breaker.refused(100.0, "no")
        pauses.append(breaker.open_until - 100.0)
    assert 0.1 <= pauses[0] <= 0.2 and all(p <= LONGEST_S for p in pauses) and pauses[-1] >= LONGEST_S / 2
    breaker.broke(200.0, lived_s=STEADY_S, reason="reset")
    assert breaker.allows(200.0)
    breaker.broke(201.0, lived_s=1.0, reason="reset")
    assert not breaker.allows(201.0)


def test_an_unknown_kind_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="'carrier-pigeon'; known are local, nixl, tcp"):
        endpoint_factories(["tcp", "carrier-pigeon"])
    assert list(endpoint_factories(["tcp", "pdxfer.transport.tcp:TcpEndpoint"])) == [
        "tcp",
        "pdxfer.transport.tcp:TcpEndpoint",
    ]
