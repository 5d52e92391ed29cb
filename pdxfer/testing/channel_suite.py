"""The promises of every channel kind, as tests: subclass ChannelSuite and give it a factory.

    class TestMyChannel(ChannelSuite):
        def factory(self) -> EndpointFactory:
            return MyEndpoint

Two sides in one process: `prefill` sends, `decode` receives. Run by pytest; needs nothing but the package.
As long as the contract: authors subclass one class and have all of it.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.errors import ChannelError
from pdxfer.kv.layout import KvLayout
from pdxfer.kv.runs import Runs, block_runs, total_bytes
from pdxfer.memory.region import Region
from pdxfer.transport.base import (
    Abort,
    Channel,
    Control,
    Drained,
    Endpoint,
    EndpointFactory,
    EndpointOptions,
    OutgoingUnit,
    PeerId,
    UnitFailed,
    UnitHeader,
    UnitResult,
)

SECRET = b"a secret that the router minted."
NUM_LAYERS, NUM_BLOCKS, BLOCK_BYTES = 3, 16, 4096
WAIT_S = 20.0
"""Deadline of every wait here; nothing waits this long unless it is broken."""


def until(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Wait for `condition`; AssertionError naming `what` after the deadline."""
    pause, deadline = threading.Event(), SYSTEM_CLOCK.now() + timeout_s
    while not condition():
        assert SYSTEM_CLOCK.now() < deadline, f"waited {timeout_s:g} s for: {what}"
        pause.wait(0.002)


def make_region(
    layers_adjacent: bool,
    num_layers: int = NUM_LAYERS,
    num_blocks: int = NUM_BLOCKS,
    block_bytes: int = BLOCK_BYTES,
) -> tuple["np.ndarray[tuple[int], np.dtype[np.uint8]]", Region]:
    """Memory of one node (the caller keeps the array alive): LBHNC, or BLHNC if `layers_adjacent`."""
    memory = np.zeros(num_layers * num_blocks * block_bytes, dtype=np.uint8)
    layer_step = block_bytes if layers_adjacent else num_blocks * block_bytes
    layout = KvLayout(
        base=memory.ctypes.data,
        num_bytes=memory.size,
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        block_stride=num_layers * block_bytes if layers_adjacent else block_bytes,
        layer_offsets=tuple(i * layer_step for i in range(num_layers)),
        block_size=16,
    )
    return memory, Region(layout)


@dataclass
class RecordingSink:
    """A Sink that permits what is in `grants` and remembers everything it was told."""

    region: Region
    grants: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """Block ids by (transfer, epoch); a unit's first_block indexes into them."""
    claims: int = 0
    landed: list[UnitHeader] = field(default_factory=list)
    corrupt: list[UnitHeader] = field(default_factory=list)
    failures: list[tuple[UnitHeader, str]] = field(default_factory=list)
    refused: list[UnitHeader] = field(default_factory=list)
    events: list[object] = field(default_factory=list)
    """Landed headers and controls in the order of the calls."""
    losses: list[PeerId] = field(default_factory=list)
    generation: int = 0

    def claim(self, peer: PeerId, header: UnitHeader) -> Runs | None:
        """Permit what a grant covers."""
        blocks = self.grants.get((header.transfer_id, header.epoch))
        if blocks is None:
            self.refused.append(header)
            return None
        self.claims += 1
        return self._runs(blocks, header)

    def arrived(self, peer: PeerId, header: UnitHeader) -> bool:
        """Verify the digest if there is one."""
        self.claims -= 1
        runs = self._runs(self.grants[header.transfer_id, header.epoch], header)
        if header.digest and self.region.digest(runs) != header.digest:
            self.corrupt.append(header)
            return False
        self.events.append(header)
        self.landed.append(header)
        return True

    def failed(self, peer: PeerId, header: UnitHeader, reason: str) -> None:
        """Release the claim."""
        self.claims -= 1
        self.failures.append((header, reason))

    def control(self, peer: PeerId, control: Control) -> None:
        """Remember."""
        self.events.append(control)

    def lost(self, peer: PeerId, reason: str) -> None:
        """Remember."""
        self.losses.append(peer)

    def _runs(self, blocks: list[int], header: UnitHeader) -> Runs:
        ids = blocks[header.first_block : header.first_block + header.num_blocks]
        return block_runs(self.region.layout, ids, header.first_layer, header.num_layers)


class Side:
    """One node of a test: memory, sink, endpoint."""

    def __init__(self, engine_id: str, factory: EndpointFactory, layers_adjacent: bool, seed: int) -> None:
        self.me = PeerId(engine_id=engine_id, incarnation=7, rank=0)
        self.memory, self.region = make_region(layers_adjacent)
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, self.memory.size, dtype=np.uint8)
        self.sink = RecordingSink(self.region)
        options = EndpointOptions(connect_timeout_s=5.0, write_timeout_s=5.0, max_fence_groups=2)
        self.endpoint: Endpoint = factory(options, self.me, self.region, self.sink)

    def bytes_of(self, blocks: list[int], first_layer: int = 0, num_layers: int = NUM_LAYERS) -> bytes:
        """The unit's bytes in canonical order."""
        runs = block_runs(self.region.layout, blocks, first_layer, num_layers)
        return b"".join(bytes(v) for v in self.region.views(runs))


def make_unit(
    side: Side,
    source_blocks: list[int],
    target_blocks: list[int],
    *,
    transfer_id: str = "t-1",
    epoch: int = 0,
    first_block: int = 0,
    first_layer: int = 0,
    num_layers: int = NUM_LAYERS,
) -> OutgoingUnit:
    """A unit of `side`'s memory, with its digest."""
    source = block_runs(side.region.layout, source_blocks, first_layer, num_layers)
    header = UnitHeader(
        transfer_id=transfer_id,
        epoch=epoch,
        first_block=first_block,
        num_blocks=len(source_blocks),
        first_layer=first_layer,
        num_layers=num_layers,
        num_bytes=total_bytes(source),
        digest=side.region.digest(source),
    )
    return OutgoingUnit(header=header, source=source, source_blocks=source_blocks, target_blocks=target_blocks)


class ChannelSuite:
    """What every kind keeps. Tests start from an open channel prefill → decode."""

    def factory(self) -> EndpointFactory:
        """Makes the endpoints under test (called once a test)."""
        raise NotImplementedError

    def setup_method(self) -> None:
        factory = self.factory()
        self.prefill = Side("p0", factory, layers_adjacent=False, seed=1)
        self.decode = Side("d0", factory, layers_adjacent=True, seed=2)
        self.introduce()
        self.channel: Channel = self.connect()

    def teardown_method(self) -> None:
        self.channel.close()
        self.prefill.endpoint.close()
        self.decode.endpoint.close()

    # ---- helpers ---------------------------------------------------------------------------------------------------

    def introduce(self) -> None:
        """Admit each side to the other."""
        self.prefill.endpoint.admit([self.decode.me], SECRET)
        self.decode.endpoint.admit([self.prefill.me], SECRET)
        self.decode.endpoint.attend(True)

    def connect(self, timeout_s: float = 10.0) -> Channel:
        """Open and probe a channel from prefill to decode's present address."""
        channel = self.prefill.endpoint.connect(self.decode.me, self.decode.endpoint.address(), timeout_s)
        channel.probe(timeout_s)
        return channel

    def results(self, count: int) -> list[UnitResult]:
        """Poll until so many units are reported."""
        found: list[UnitResult] = []

        def enough() -> bool:
            found.extend(self.channel.poll(0.01))
            return len(found) >= count

        until(enough, f"{count} units to be reported by poll")
        return found

    def test_a_channel_names_how_many_grants_were_taken_back_before_it(self) -> None:
        """Where the sender writes by itself it must know: an older grant is not for this channel."""
        self.channel.close()
        until(lambda: self.decode.sink.losses, "the close to be noticed")
        assert self.channel.generation == 0
        self.decode.sink.generation = 5
        self.channel = self.connect()
        assert self.channel.generation == (0 if self.decode.endpoint.writes_here else 5)

    def test_each_connection_is_named_as_long_as_it_is_there(self) -> None:
        """So that what came over one that is lost is told from what comes over another."""
        endpoint, me = self.decode.endpoint, self.prefill.me
        [first] = endpoint.connections(me)
        later = self.connect()
        assert len(endpoint.connections(me)) == 2 and first in endpoint.connections(me)
        [second] = endpoint.connections(me) - {first}
        self.channel.close()
        self.channel = later
        until(lambda: self.decode.sink.losses, "the close to be noticed")
        assert endpoint.connections(me) == {second} and not endpoint.connections(self.decode.me)

    # ---- moving bytes ----------------------------------------------------------------------------------------------

    def test_a_unit_lands_byte_for_byte_where_it_was_granted_and_nowhere_else(self) -> None:
        """Only the granted blocks change, and they equal the source, although the two layouts differ."""
        before = self.decode.memory.copy()
        self.decode.sink.grants["t-1", 0] = [9, 2, 3]
        self.channel.write(make_unit(self.prefill, [4, 5, 1], [9, 2, 3]))
        assert [r.error for r in self.results(1)] == [""]
        until(lambda: self.decode.sink.landed, "the unit to land")
        assert self.decode.bytes_of([9, 2, 3]) == self.prefill.bytes_of([4, 5, 1])
        others = [b for b in range(NUM_BLOCKS) if b not in (9, 2, 3)]
        after, self.decode.memory[:] = self.decode.bytes_of(others), before
        assert after == self.decode.bytes_of(others)
        assert self.decode.sink.claims == 0

    def test_layers_of_a_block_range_may_come_one_by_one(self) -> None:
        """Units of single layers fill the same blocks side by side."""
        self.decode.sink.grants["t-1", 0] = [7, 8]
        for layer in range(NUM_LAYERS):
            self.channel.write(make_unit(self.prefill, [0, 1], [7, 8], first_layer=layer, num_layers=1))
        self.results(NUM_LAYERS)
        until(lambda: len(self.decode.sink.landed) == NUM_LAYERS, "all layers to land")
        assert self.decode.bytes_of([7, 8]) == self.prefill.bytes_of([0, 1])

    def test_many_units_in_flight_are_each_reported_once_and_all_land(self) -> None:
        """A unit for each block and layer, in random order, up to 8 in flight: nothing is lost, doubled or mixed up."""
        rng = np.random.default_rng(3)
        source, target = rng.permutation(NUM_BLOCKS).tolist(), rng.permutation(NUM_BLOCKS).tolist()
        self.decode.sink.grants["t-1", 0] = target
        cells = [(block, layer) for block in range(NUM_BLOCKS) for layer in range(NUM_LAYERS)]
        done: list[UnitResult] = []
        for index, at in enumerate(rng.permutation(len(cells)).tolist()):
            block, layer = cells[at]
            place = {"first_block": block, "first_layer": layer, "num_layers": 1}
            self.channel.write(make_unit(self.prefill, [source[block]], [target[block]], **place))
            while index + 1 - len(done) >= 8:
                done.extend(self.results(1))
        done.extend(self.results(len(cells) - len(done)))
        until(lambda: len(self.decode.sink.landed) == len(cells), "all units to land")
        for headers in ([r.header for r in done], self.decode.sink.landed):
            assert sorted((h.first_block, h.first_layer) for h in headers) == cells
        assert not any(r.error for r in done) and not self.decode.sink.corrupt and self.decode.sink.claims == 0
        assert self.decode.bytes_of(target) == self.prefill.bytes_of(source)

    def test_a_unit_that_is_not_wanted_is_dropped_and_the_next_one_lands(self) -> None:
        """A refused claim costs the unit, not the channel; where the receiver executes the write nothing is touched."""
        before = self.decode.memory.copy()
        self.channel.write(make_unit(self.prefill, [1], [1], transfer_id="t-unknown"))
        self.results(1)
        until(lambda: self.decode.sink.refused, "the claim to be refused")
        if self.decode.endpoint.writes_here:
            assert np.array_equal(before, self.decode.memory)
        self.decode.sink.grants["t-2", 1] = [5]
        self.channel.write(make_unit(self.prefill, [1], [5], transfer_id="t-2", epoch=1))
        self.results(1)
        until(lambda: self.decode.sink.landed, "the next unit to land")
        assert self.decode.bytes_of([5]) == self.prefill.bytes_of([1])

    def test_a_wrong_digest_is_found_by_the_receiver(self) -> None:
        """The bytes are not what the header says: arrived() answers False and nothing counts as landed."""
        self.decode.sink.grants["t-1", 0] = [5]
        unit = make_unit(self.prefill, [1], [5])
        runs = block_runs(self.prefill.region.layout, [1], 0, NUM_LAYERS)
        self.prefill.region.views(runs)[0][0] ^= 0xFF
        self.channel.write(unit)
        self.results(1)
        until(lambda: self.decode.sink.corrupt, "the digest mismatch to be noticed")
        assert not self.decode.sink.landed and self.decode.sink.claims == 0

    # ---- controls --------------------------------------------------------------------------------------------------

    def test_drained_comes_after_the_units_written_before_it(self) -> None:
        """tell() is ordered after the units that poll() has reported."""
        self.decode.sink.grants["t-1", 0] = list(range(8))
        for index in range(8):
            self.channel.write(make_unit(self.prefill, [index], [index], first_block=index))
        self.results(8)
        farewell = Drained(transfer_id="t-1", epoch=0, complete=True)
        self.channel.tell(farewell)
        until(lambda: farewell in self.decode.sink.events, "Drained to come")
        assert self.decode.sink.events[-1] == farewell and len(self.decode.sink.landed) == 8

    def test_the_receiver_can_talk_back(self) -> None:
        """Abort and UnitFailed reach the sender's sink."""
        header = make_unit(self.prefill, [1], [1]).header
        controls: list[Control] = [
            Abort(transfer_id="t-1", epoch=0, reason="gone"),
            UnitFailed(header=header, reason="digest"),
        ]
        for control in controls:
            self.decode.endpoint.tell(self.prefill.me, control)
        until(lambda: len(self.prefill.sink.events) == 2, "both controls to come")
        assert self.prefill.sink.events == controls

    def test_talking_to_a_peer_that_has_no_channel_is_an_error(self) -> None:
        """tell() says that nobody is there."""
        stranger = PeerId(engine_id="nobody", incarnation=1, rank=0)
        try:
            self.decode.endpoint.tell(stranger, Abort(transfer_id="t-1", epoch=0, reason="x"))
        except ChannelError as error:
            assert "nobody" in str(error)
        else:
            raise AssertionError("tell() to a stranger did not raise")

    # ---- who may come in -------------------------------------------------------------------------------------------

    def refused(self, timeout_s: float = 0.5) -> str:
        """Try to connect; the error's text."""
        try:
            self.connect(timeout_s).close()
        except ChannelError as error:
            return str(error)
        raise AssertionError("connect() should have been refused")

    def test_a_peer_that_was_not_introduced_is_refused(self) -> None:
        """Being able to reach the address is not enough."""
        self.channel.close()
        self.decode.endpoint.admit([], SECRET)
        assert self.refused()

    def test_a_peer_with_another_secret_is_refused(self) -> None:
        """Two clusters that share a network do not mix."""
        self.channel.close()
        self.prefill.endpoint.admit([self.decode.me], b"another secret of another router")
        assert self.refused()

    def test_a_peer_that_is_admitted_no_more_is_cut_off(self) -> None:
        """Its channel dies, nothing of it lands, and the sink hears of it."""
        self.decode.sink.grants["t-1", 0] = [5]
        self.decode.endpoint.admit([], SECRET)
        until(lambda: self.prefill.me in self.decode.sink.losses, "the loss to be reported")
        before = self.decode.memory.copy()
        try:
            self.channel.write(make_unit(self.prefill, [1], [5]))
            self.channel.poll(0.05)
        except ChannelError:
            pass
        assert not self.decode.sink.landed
        if self.decode.endpoint.writes_here:
            assert np.array_equal(before, self.decode.memory)

    def test_a_late_introduction_is_waited_for(self) -> None:
        """The router tells the two sides at different moments."""
        self.channel.close()
        self.decode.endpoint.admit([], SECRET)
        timer = threading.Timer(0.2, self.introduce)
        timer.start()
        try:
            self.channel = self.connect(timeout_s=5.0)
        finally:
            timer.join()

    # ---- endings ---------------------------------------------------------------------------------------------------

    def test_the_receiver_hears_that_a_sender_has_left(self) -> None:
        """close() on the sending side becomes lost() on the other."""
        self.channel.close()
        until(lambda: self.prefill.me in self.decode.sink.losses, "the loss to be reported")

    def test_a_closed_channel_says_so(self) -> None:
        """Every use raises, `dead` is set, closing again is fine."""
        assert not self.channel.dead
        self.channel.close()
        self.channel.close()
        assert self.channel.dead
        for use in (
            lambda: self.channel.write(make_unit(self.prefill, [1], [5])),
            lambda: self.channel.poll(0.0),
            lambda: self.channel.tell(Drained(transfer_id="t-1", epoch=0, complete=False)),
        ):
            try:
                use()
            except ChannelError:
                continue
            raise AssertionError("a closed channel was usable")

    def test_after_a_fence_nothing_lands_and_the_peer_can_come_back(self) -> None:
        """The old channel is dead, a new one to the present address works."""
        self.decode.sink.grants["t-1", 0] = [5]
        self.decode.endpoint.fence(self.prefill.me)
        before = self.decode.memory.copy()
        try:
            self.channel.write(make_unit(self.prefill, [1], [5]))
            self.channel.poll(0.05)
        except ChannelError:
            pass
        assert not self.decode.sink.landed and np.array_equal(before, self.decode.memory)
        self.channel.close()
        self.channel = self.connect()
        self.channel.write(make_unit(self.prefill, [1], [5]))
        self.results(1)
        until(lambda: self.decode.sink.landed, "a unit to land over the new channel")
        assert self.decode.bytes_of([5]) == self.prefill.bytes_of([1])

    def test_closing_the_endpoint_ends_everything_and_twice_is_fine(self) -> None:
        """No thread of ours stays, the other side notices."""
        self.decode.endpoint.close()
        self.decode.endpoint.close()

        def noticed() -> bool:
            try:
                self.channel.write(make_unit(self.prefill, [1], [5]))
                self.channel.poll(0.01)
            except ChannelError:
                return True
            return False

        until(noticed, "the sender to notice")
        self.channel.close()
        self.prefill.endpoint.close()
        mine = [t.name for t in threading.enumerate() if t.name.startswith(f"pdxfer-{self.decode.endpoint.kind}")]
        assert not mine, f"threads left behind: {mine}"

    def test_an_address_that_cannot_be_read_is_turned_down_with_a_reason(self) -> None:
        """accepts() never raises on a peer's bytes."""
        assert self.prefill.endpoint.accepts(b"\x00nonsense")
        assert not self.prefill.endpoint.accepts(self.decode.endpoint.address())
