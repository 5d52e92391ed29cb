"""A connection that ends when its peer has another one already: what came over it is given up, all the rest goes on."""

import threading
from collections.abc import Iterator

import pytest
from wire_rig import LAYERS, Rig

from pdxfer.transport.base import Channel, PeerId
from pdxfer.wire.halves import Fenced, Landed


class LossyRig(Rig):
    """Counts the lost connections that the receiver has dealt with."""

    def __init__(self) -> None:
        super().__init__()
        self.num_lost, lost = 0, self.receiver.lost

        def counted(peer: PeerId, reason: str, kind: str = "") -> None:
            lost(peer, reason, kind)
            self.num_lost += 1

        self.receiver.lost = counted  # type: ignore[method-assign]

    def cut(self, channel: Channel) -> None:
        """Decode has noticed when it returns."""
        before = self.num_lost
        channel.close()
        self.wait(lambda: self.num_lost > before)

    def send_first_layer(self) -> None:
        """Return when it has landed."""
        self.grant()
        self.prompt(num_layers=1)
        self.wait(lambda: self.receiver._grants.live["t", 1].landed[:, 0].all())


@pytest.fixture
def rig() -> Iterator[LossyRig]:
    rig = LossyRig()
    yield rig
    rig.close()


def test_a_transfer_whose_connection_is_lost_after_the_next_one_has_opened_is_given_up(rig: LossyRig) -> None:
    """Its last units were in the sender's socket, so the sender thinks it delivered: nobody else will say a word."""
    rig.expect()
    rig.send_first_layer()
    rig.cut(rig.reconnect())
    rig.wait(lambda: rig.end_of("t"))
    end = rig.end_of("t")
    assert isinstance(end, Fenced) and end.num_units and "connection to p0 lost" in end.reason


def test_so_is_one_of_which_nothing_had_come_yet(rig: LossyRig) -> None:
    """A short prompt that was in the sender's socket as a whole."""
    rig.expect()
    rig.cut(rig.reconnect())
    rig.wait(lambda: rig.end_of("t"))
    assert isinstance(rig.end_of("t"), Fenced)


def test_a_transfer_over_the_later_connection_is_not_touched_by_the_end_of_the_earlier(rig: LossyRig) -> None:
    """As one that the pool has replaced and closes after a while."""
    before = rig.reconnect()
    rig.expect()
    rig.send_first_layer()
    rig.expect("waits")
    rig.cut(before)
    assert not any(incoming.revoked for incoming in rig.receiver._grants.live.values())
    rig.sender.layers_done(1, LAYERS - 1)
    rig.wait(lambda: rig.end_of("t"))
    assert isinstance(rig.end_of("t"), Landed) and rig.is_equal


def test_a_connection_that_comes_and_goes_beside_it_hurts_no_transfer(rig: LossyRig) -> None:
    """As one whose probe fails."""
    rig.expect()
    rig.send_first_layer()
    rig.cut(rig.connect())
    assert not rig.receiver._grants.live["t", 1].revoked


def test_what_has_come_whole_needs_its_connection_no_more(rig: LossyRig) -> None:
    """Its last frames wait to be decoded when the connection ends."""
    staging, may_decode = rig.decode.wire.staging, threading.Event()
    assert staging is not None
    decode = staging._frames.decode

    def held(frame: memoryview, unit: object) -> object:
        assert may_decode.wait(30)
        return decode(frame, unit)  # type: ignore[arg-type]

    staging._frames.decode = held  # type: ignore[method-assign, assignment]
    rig.expect()
    rig.wait(lambda: rig.credits)
    rig.grant()
    rig.prompt()
    rig.wait(lambda: rig.receiver._grants.live["t", 1].all_sent)
    rig.cut(rig.channel())
    may_decode.set()
    rig.wait(lambda: rig.end_of("t"))
    assert isinstance(rig.end_of("t"), Landed) and rig.is_equal and rig.frames
