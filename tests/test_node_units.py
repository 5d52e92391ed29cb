"""Sender and receiver against a channel in memory: what is granted lands, verified, exactly once, and nothing else."""

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from router_kit import wait_until

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.errors import ChannelError
from pdxfer.kv.layout import KvLayout
from pdxfer.memory.region import Region
from pdxfer.node.jobs import Report
from pdxfer.node.lane import Lane
from pdxfer.node.membership import Membership
from pdxfer.node.plan import Area, SendPlan
from pdxfer.node.receiver import Receiver
from pdxfer.node.sender import Sender
from pdxfer.node.settings import NodeSettings
from pdxfer.transport.base import Control, Drained, OutgoingUnit, PeerId, UnitHeader, UnitResult
from pdxfer.wire.halves import (
    Expect,
    Fenced,
    Generation,
    Landed,
    ToScheduler,
)
from pdxfer.wire.messages import Grant, PeerNode, Peers

LAYERS, BLOCK_BYTES, BLOCKS = 3, 64, 32
P0 = PeerId(engine_id="p0", incarnation=1, rank=0)


class Kv:
    """A KV region in numpy, LBHNC."""

    def __init__(self, seed: int) -> None:
        self.array = np.random.default_rng(seed).integers(0, 255, (LAYERS, BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self.region = Region(
            KvLayout(
                base=self.array.ctypes.data,
                num_bytes=self.array.nbytes,
                num_blocks=BLOCKS,
                block_bytes=BLOCK_BYTES,
                block_stride=BLOCK_BYTES,
                layer_offsets=tuple(layer * BLOCKS * BLOCK_BYTES for layer in range(LAYERS)),
                block_size=16,
            )
        )


class MemoryChannel:
    """Copies into the receiver's region at once; `corrupt` flips a byte of each unit, `fail` dies after n units."""

    kind = "memory"
    generation = 0

    def __init__(self, source: Region, target: Region, receiver: Receiver) -> None:
        self.peer = PeerId(engine_id="d0", incarnation=1, rank=0)
        self._source, self._target, self._receiver = source, target, receiver
        self._done: list[UnitResult] = []
        self.told: list[Control] = []
        self.corrupt = False
        self.fail_after = 1 << 30
        self.num_units = 0
        self.num_digests = 0

    def write(self, unit: OutgoingUnit) -> None:
        self.num_digests += bool(unit.header.digest)
        if self.num_units >= self.fail_after:
            raise ChannelError("cut")
        self.num_units += 1
        runs = self._receiver.claim(P0, unit.header, self.kind)
        if runs is not None:
            for there, here in zip(self._target.views(runs), self._source.views(unit.source), strict=True):
                there[:] = here
            if self.corrupt:
                view = self._target.views(runs)[0]
                view[0] = view[0] ^ 1
            self._receiver.arrived(P0, unit.header)
        self._done.append(UnitResult(header=unit.header))

    def poll(self, timeout_s: float) -> Sequence[UnitResult]:
        done, self._done = self._done, []
        return done

    def tell(self, control: Control) -> None:
        self.told.append(control)
        if isinstance(control, Drained):
            self._receiver.control(P0, control)

    def probe(self, timeout_s: float) -> None: ...
    def close(self) -> None: ...


class Pair:
    """One prefill rank and one decode rank, wired together."""

    def __init__(self, digest_every: int = 1) -> None:
        self.digest_every = digest_every
        self.prefill, self.decode = Kv(1), Kv(2)
        self.facts: list[ToScheduler] = []
        self.generations: list[ToScheduler] = []
        self.settled: list[tuple[str, bool, str]] = []
        self.changed = threading.Condition()
        self.receiver = Receiver(0, self.decode.region, self._fact, SYSTEM_CLOCK, 0.2, lambda: [P0])
        self.receiver.start([])
        self.channel = MemoryChannel(self.prefill.region, self.decode.region, self.receiver)
        self.opened: Callable[[], None] = lambda: None
        self.sender = Sender(LAYERS, 2, self._lane, self._settled)

    def _lane(self, engine_id: str, report: Callable[[Report], None]) -> Lane:
        def channel() -> MemoryChannel:
            channel = self.channel
            self.opened()
            return channel

        return Lane(engine_id, self.prefill.region, channel, report, lambda c, r: None, self.digest_every)

    def _fact(self, fact: ToScheduler) -> None:
        with self.changed:
            (self.generations if isinstance(fact, Generation) else self.facts).append(fact)
            self.changed.notify_all()

    def _settled(self, transfer_id: str, delivered: bool, reason: str) -> None:
        with self.changed:
            self.settled.append((transfer_id, delivered, reason))
            self.changed.notify_all()

    def wait(self, condition: Callable[[], object]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout=30.0), (self.facts, self.settled)

    def expect(self, block_ids: list[int], first_block: int = 0) -> None:
        self.receiver.expect(
            Expect(transfer_id="t", epoch=1, prefill_id="p0", first_block=first_block, block_ids=block_ids)
        )

    def grant(
        self,
        block_ids: list[int],
        first_block: int = 0,
        tokens: int = 70,
        digest: bytes = b"d",
        generation: int = 0,
        transfer_id: str = "t",
    ) -> None:
        self.sender.grant(
            Grant(
                transfer_id=transfer_id,
                epoch=1,
                decode_id="d0",
                decode_incarnation=1,
                first_block=first_block,
                block_ids=block_ids,
                num_tokens=tokens,
                token_digest=digest,
                generations=[generation],
            )
        )

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def pair():  # type: ignore[no-untyped-def]
    pair = Pair()
    yield pair
    pair.close()


def plan(first: int, ids: Sequence[int], ready: int = 0, total: int = 5) -> SendPlan:
    return SendPlan(
        transfer_id="t",
        first_block=first,
        block_ids=tuple(ids),
        num_ready=ready,
        total_blocks=total,
        num_tokens=70,
        token_digest=b"d",
    )


SOURCE = [3, 9, 4, 11, 7]
TARGET = [20, 1, 2, 30, 8]


def run_step(pair: Pair, plans: tuple[SendPlan, ...]) -> None:
    pair.sender.begin_step(plans)
    for layer in range(LAYERS):
        pair.sender.layers_done(layer, 1)


def same_bytes(pair: Pair, source: list[int], target: list[int]) -> bool:
    return bool((pair.prefill.array[:, source] == pair.decode.array[:, target]).all())


@pytest.mark.parametrize("grant_first", [True, False])
def test_two_steps_layer_by_layer_land_exactly(pair: Pair, grant_first: bool) -> None:
    pair.expect(TARGET)
    if grant_first:
        pair.grant(TARGET)
    run_step(pair, (plan(0, SOURCE[:3]),))
    run_step(pair, (plan(3, SOURCE[3:]),))
    if not grant_first:
        pair.grant(TARGET)
    pair.wait(lambda: pair.facts and pair.settled)
    assert isinstance(pair.facts[0], Landed) and pair.settled == [("t", True, "")]
    assert same_bytes(pair, SOURCE, TARGET)
    assert pair.facts[0].num_bytes == 5 * LAYERS * BLOCK_BYTES


def test_only_granted_blocks_are_touched(pair: Pair) -> None:
    before = pair.decode.array.copy()
    pair.expect(TARGET)
    pair.grant(TARGET)
    run_step(pair, (plan(0, SOURCE),))
    pair.wait(lambda: pair.facts)
    others = [b for b in range(BLOCKS) if b not in TARGET]
    assert (pair.decode.array[:, others] == before[:, others]).all()


def test_what_decode_already_has_is_not_sent(pair: Pair) -> None:
    pair.expect(TARGET[2:], first_block=2)
    pair.grant(TARGET[2:], first_block=2)
    run_step(pair, (plan(0, SOURCE, ready=1),))
    pair.wait(lambda: pair.facts and pair.settled)
    assert same_bytes(pair, SOURCE[2:], TARGET[2:])
    assert pair.facts[0].num_bytes == 3 * LAYERS * BLOCK_BYTES  # type: ignore[union-attr]


def test_a_corrupt_unit_is_refused_and_the_grant_taken_back(pair: Pair) -> None:
    pair.channel.corrupt = True
    pair.expect(TARGET)
    pair.grant(TARGET)
    run_step(pair, (plan(0, SOURCE),))
    pair.wait(lambda: pair.facts)
    fenced = pair.facts[0]
    assert isinstance(fenced, Fenced) and fenced.num_valid == 0 and pair.receiver.num_corrupt >= 1


def test_a_cut_channel_settles_the_send_and_what_landed_stays(pair: Pair) -> None:
    pair.channel.fail_after = 1
    pair.expect(TARGET)
    pair.grant(TARGET)
    pair.sender.begin_step((plan(0, SOURCE, ready=5),))
    pair.wait(lambda: pair.settled)
    assert pair.settled[0][1] is False
    pair.receiver.lost(P0, "cut", "memory")
    pair.wait(lambda: pair.facts)
    assert isinstance(pair.facts[0], Fenced) and pair.facts[0].num_valid == 2


def test_different_prompts_are_refused(pair: Pair) -> None:
    pair.expect(TARGET)
    pair.grant(TARGET, digest=b"other")
    run_step(pair, (plan(0, SOURCE),))
    pair.wait(lambda: pair.settled)
    assert pair.settled[0][1] is False and "prompts differ" in pair.settled[0][2]
    assert pair.channel.num_units == 0


def test_a_forgotten_send_says_drained_and_sends_nothing_more(pair: Pair) -> None:
    pair.expect(TARGET)
    pair.grant(TARGET)
    run_step(pair, (plan(0, SOURCE[:3]),))
    pair.sender.forget("t", "aborted")
    pair.wait(lambda: pair.settled and pair.facts)
    run_step(pair, (plan(3, SOURCE[3:]),))
    assert pair.settled == [("t", False, "aborted")]
    assert isinstance(pair.channel.told[-1], Drained) and not pair.channel.told[-1].complete


def test_an_abort_for_a_finished_send_is_answered(pair: Pair) -> None:
    pair.sender.abort("d0", "t", 1, "late")
    deadline = threading.Event()
    for _ in range(2000):
        if pair.channel.told:
            break
        deadline.wait(0.01)
    assert pair.channel.told == [Drained(transfer_id="t", epoch=1, complete=False)]


def test_a_unit_outside_its_grant_is_not_wanted(pair: Pair) -> None:
    pair.expect(TARGET)
    good = {"transfer_id": "t", "epoch": 1, "first_block": 0, "num_blocks": 2, "first_layer": 0, "num_layers": 1}
    for wrong in ({"first_block": 4}, {"first_block": -1}, {"first_layer": 2, "num_layers": 2}, {"epoch": 0}):
        fields = {**good, **wrong}
        size = fields["num_blocks"] * fields["num_layers"] * BLOCK_BYTES
        if fields["epoch"] == 0:
            pair.receiver._grants._ended["t", 0] = None
        assert pair.receiver.claim(P0, UnitHeader(**fields, num_bytes=size, digest=0)) is None, wrong
    stranger = PeerId(engine_id="p9", incarnation=1, rank=0)
    assert pair.receiver.claim(stranger, UnitHeader(**good, num_bytes=2 * BLOCK_BYTES, digest=0)) is None
    assert pair.receiver.num_rejected == 5


def test_an_area_is_cut_on_the_chunk_grid() -> None:
    pieces = Area(1, (7, 8, 9, 10), 0, 1).split(2)
    assert [(p.first_block, p.block_ids) for p in pieces] == [(1, (7,)), (2, (8, 9)), (4, (10,))]
    assert Area(1, (7, 8), 0, 1).clip(3) is None
    assert Area(1, (7, 8), 0, 1).clip(2) == Area(2, (8,), 0, 1)


@pytest.mark.parametrize("every", [0, 1, 4])
def test_how_many_units_carry_a_digest(every: int) -> None:
    """transport.integrity: off, full, sample."""
    pair = Pair(digest_every=every)
    try:
        pair.expect(TARGET)
        pair.grant(TARGET)
        run_step(pair, (plan(0, SOURCE),))
        pair.wait(lambda: pair.facts and pair.settled)
        assert pair.channel.num_digests == (pair.channel.num_units // every if every else 0)
        assert same_bytes(pair, SOURCE, TARGET)
    finally:
        pair.close()


def test_whoever_asks_again_about_an_ended_send_gets_its_answer(pair: Pair) -> None:
    """Cancelled before its request came, forgotten again with it: the scheduler half must not wait for ever."""
    pair.sender.forget("t", "cancelled early")
    pair.wait(lambda: len(pair.settled) == 1)
    run_step(pair, (plan(0, SOURCE),))
    pair.sender.forget("t", "request over")
    pair.wait(lambda: len(pair.settled) == 2)
    assert pair.settled == [("t", False, "cancelled early")] * 2


def test_grants_without_a_prompt_are_bounded_and_decode_hears_of_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lane forgets them, too."""
    monkeypatch.setattr("pdxfer.node.sender.MAX_REMEMBERED", 2)
    for number in range(5):
        pair.grant(TARGET, transfer_id=f"t{number}")
    pair.wait(lambda: len(pair.settled) == 3)
    assert pair.settled == [(f"t{number}", False, "no prompt came for this grant") for number in range(3)]
    wait_until(lambda: len(pair.channel.told) == 3)
    why = "no prompt came for this grant"
    told = [Drained(transfer_id=f"t{number}", epoch=1, complete=False, reason=why) for number in range(3)]
    assert pair.channel.told == told
    wait_until(lambda: set(pair.sender._lanes["d0"]._channels) == {("t3", 1), ("t4", 1)})


def test_an_abort_before_its_grant_stops_a_late_grant(pair: Pair) -> None:
    pair.sender.abort("d0", "t", 1, "changed its mind")
    pair.wait(lambda: pair.settled)
    pair.grant(TARGET)
    run_step(pair, (plan(0, SOURCE, ready=5),))
    pair.sender.forget("t", "over")
    pair.wait(lambda: len(pair.settled) == 2)
    assert pair.channel.num_units == 0


def test_a_restarted_decode_does_not_get_its_predecessors_blocks(pair: Pair) -> None:
    pair.channel.peer = PeerId(engine_id="d0", incarnation=2, rank=0)
    pair.expect(TARGET)
    pair.grant(TARGET)
    run_step(pair, (plan(0, SOURCE, ready=5),))
    pair.wait(lambda: pair.settled)
    assert pair.settled[0][1] is False and "restarted" in pair.settled[0][2]
    assert pair.channel.num_units == 0


def test_a_grant_is_served_over_the_channel_it_came_by(pair: Pair) -> None:
    """Lost before the first unit, and open again: decode was told, fenced, and may use the blocks for somebody else."""
    opened = threading.Event()
    pair.opened = opened.set
    pair.grant(TARGET)
    assert opened.wait(5.0)
    lost, pair.channel = pair.channel, MemoryChannel(pair.prefill.region, pair.decode.region, pair.receiver)
    lost.fail_after = 0
    run_step(pair, (plan(0, SOURCE),))
    pair.wait(lambda: pair.settled)
    assert pair.settled[0][1] is False
    assert lost.num_units == pair.channel.num_units == 0


def test_a_grant_that_is_older_than_its_channel_is_refused(pair: Pair) -> None:
    """On its way it was overtaken by the loss of its channel: decode has taken it back and knows of no writer."""
    pair.channel.generation = 3
    pair.grant(TARGET, generation=2)
    run_step(pair, (plan(0, SOURCE),))
    pair.wait(lambda: pair.settled)
    assert pair.settled[0][1] is False and "before this channel was opened (generation 2" in pair.settled[0][2]
    assert pair.channel.num_units == 0


def test_a_grant_as_old_as_its_channel_or_younger_is_served(pair: Pair) -> None:
    """A channel stays good for grants given after others were taken back."""
    pair.channel.generation = 3
    pair.expect(TARGET)
    pair.grant(TARGET, generation=3)
    run_step(pair, (plan(0, SOURCE),))
    pair.wait(lambda: pair.facts and pair.settled)
    assert isinstance(pair.facts[0], Landed)


def test_a_grant_is_counted_as_taken_back_before_its_peer_is_told(pair: Pair) -> None:
    """Whoever is let in too late to be told must come by a channel that says so."""
    seen: list[int] = []

    class Watching(OneConnection):
        def tell(self, peer: PeerId, control: Control) -> None:
            seen.append(pair.receiver.generation)
            super().tell(peer, control)

    pair.receiver._writers._endpoints = [Watching("nixl", [])]  # type: ignore[list-item]
    pair.expect(TARGET)
    pair.receiver.revoke("t", 1, "deadline")
    pair.wait(lambda: pair.facts)
    assert seen == [1] and pair.generations == [Generation(rank=0, number=1)] and isinstance(pair.facts[0], Fenced)


class OneConnection:
    """An endpoint as the receiver sees it: which peers are connected, what was told and fenced."""

    writes_here = False

    def __init__(self, kind: str, peers: list[PeerId]) -> None:
        self.kind, self.peers = kind, peers
        self.fenced: list[PeerId] = []

    def connections(self, peer: PeerId) -> frozenset[object]:
        return frozenset({peer} & set(self.peers))

    def tell(self, peer: PeerId, control: Control) -> None:
        if peer not in self.peers:
            raise ChannelError("not connected")

    def fence(self, peer: PeerId) -> None:
        self.fenced.append(peer)

    def attend(self, active: bool) -> None: ...


def receiver_with(
    endpoints: Sequence[OneConnection], facts: list[ToScheduler], peers: Callable[[], Sequence[PeerId]] = lambda: [P0]
) -> Receiver:
    def report(fact: ToScheduler) -> None:
        if not isinstance(fact, Generation):
            facts.append(fact)

    receiver = Receiver(0, Kv(3).region, report, SYSTEM_CLOCK, 0.01, peers)
    receiver.start(endpoints)  # type: ignore[arg-type]
    receiver.expect(Expect(transfer_id="t", epoch=1, prefill_id="p0", first_block=0, block_ids=TARGET))
    return receiver


def test_a_retired_connection_that_closes_hurts_nobody() -> None:
    """The pool closes a replaced tcp channel after a while; the grant runs over nixl."""
    facts: list[ToScheduler] = []
    tcp, nixl = OneConnection("tcp", []), OneConnection("nixl", [P0])
    receiver = receiver_with([tcp, nixl], facts)
    try:
        receiver.lost(P0, "closed there", "tcp")
        assert not facts and receiver._grants.live["t", 1].revoked == ""
    finally:
        receiver.close()


def test_a_peer_that_pushes_is_fenced_unless_it_drains() -> None:
    """Its last connection lost: quiet. Connected and silent: fenced after the drain deadline."""
    facts: list[ToScheduler] = []
    nixl = OneConnection("nixl", [P0])
    receiver = receiver_with([nixl], facts)
    try:
        receiver.revoke("t", 1, "deadline")
        for _ in range(2000):
            if facts:
                break
            threading.Event().wait(0.01)
        assert isinstance(facts[0], Fenced) and nixl.fenced == [P0]
    finally:
        receiver.close()


class OtherPeers(OneConnection):
    """Told of other peers while a grant is out: it is taken back before the connections of the old ones are cut."""

    def __init__(self) -> None:
        super().__init__("nixl", [P0])
        self.meanwhile: Callable[[], None] = lambda: None

    def admit(self, peers: Sequence[PeerId], secret: bytes) -> None:
        self.meanwhile()
        self.peers = list(peers)


@pytest.mark.parametrize("after", [[], [2]])
def test_who_is_no_peer_any_more_is_fenced_until_it_is_cut_off(after: list[int]) -> None:
    """Gone, or restarted: the router tells the scheduler half, which takes the grant back, and the worker at once."""
    facts: list[ToScheduler] = []
    nixl = OtherPeers()
    settings = NodeSettings(engine_id="d0", rank=0, halves_path="", router="")
    members = Membership(settings, Kv(4).region, {"nixl": lambda *_: nixl}, SYSTEM_CLOCK)  # type: ignore[dict-item, return-value]
    members.open(PeerId(engine_id="d0", incarnation=1, rank=0), lambda kind: None)  # type: ignore[arg-type, return-value]
    members.meet(peers_named(1))
    receiver = receiver_with([nixl], facts, members.peers)

    def taken_back() -> None:
        receiver.revoke("t", 1, "prefill leg failed: engine lost")
        wait_until(lambda: facts)

    nixl.meanwhile = taken_back
    try:
        members.meet(peers_named(*after))
        assert isinstance(facts[0], Fenced) and P0 in nixl.fenced
        assert [peer.incarnation for peer in members.peers()] == after
    finally:
        receiver.close()


def peers_named(*incarnations: int) -> Peers:
    nodes = [
        PeerNode(engine_id="p0", incarnation=n, rank=0, role="prefill", addresses=[], generation=0)
        for n in incarnations
    ]
    return Peers(nodes=nodes, secret=b"s")


def test_a_copy_of_a_peer_that_restarted_is_waited_for() -> None:
    """Its connection was cut, but the thread that receives from it may not have left its last copy."""

    class Tcp(OneConnection):
        writes_here = True

    facts: list[ToScheduler] = []
    peers = [P0]
    tcp = Tcp("tcp", [P0])
    receiver = receiver_with([tcp], facts, lambda: peers)
    try:
        header = UnitHeader(
            transfer_id="t", epoch=1, first_block=0, num_blocks=2, first_layer=0, num_layers=1,
            num_bytes=2 * BLOCK_BYTES, digest=0,
        )  # fmt: skip
        assert receiver.claim(P0, header, "tcp") is not None
        peers[:] = [PeerId(engine_id="p0", incarnation=2, rank=0)]
        receiver.revoke("t", 1, "prefill leg failed")
        wait_until(lambda: facts)
        assert isinstance(facts[0], Fenced) and P0 in tcp.fenced
    finally:
        receiver.close()


def test_a_grant_that_is_cancelled_while_the_lane_writes_leaves_nothing_in_it(pair: Pair) -> None:
    """Its goodbye has left before the lane looks at the grant."""
    writing, go_on = threading.Event(), threading.Event()
    write = pair.channel.write

    def slow(unit: OutgoingUnit) -> None:
        writing.set()
        assert go_on.wait(10.0)
        write(unit)

    pair.channel.write = slow  # type: ignore[method-assign]
    pair.expect(TARGET)
    pair.grant(TARGET)
    run_step(pair, (plan(0, SOURCE),))
    assert writing.wait(10.0)
    pair.grant(TARGET, transfer_id="cancelled")
    pair.sender.forget("cancelled", "the client left")
    wait_until(lambda: pair.sender._lanes["d0"]._dropping)
    go_on.set()
    pair.wait(lambda: len(pair.settled) == 2)
    wait_until(lambda: any(told.transfer_id == "t" for told in pair.channel.told))  # type: ignore[union-attr]
    lane = pair.sender._lanes["d0"]
    wait_until(lambda: not lane._has_work())
    wait_until(lambda: not lane._channels)
