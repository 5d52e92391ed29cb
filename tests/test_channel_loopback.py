"""The loopback channel: the suite in both modes, and what a test can do with messages under way."""

import pytest

from pdxfer.core.errors import ChannelError
from pdxfer.testing.channel_suite import ChannelSuite, make_unit
from pdxfer.transport.base import Drained, EndpointFactory, OutgoingUnit
from pdxfer.transport.loopback import Fate, LoopbackNet, Message


class TestLoopbackChannel(ChannelSuite):
    def factory(self) -> EndpointFactory:
        self.net = LoopbackNet(self.fate)
        self.fates: list[Fate] = []
        return self.net.factory

    def fate(self, message: Message) -> Fate:
        return self.fates.pop(0) if isinstance(message.body, OutgoingUnit) and self.fates else Fate.DELIVER

    def test_units_can_be_held_and_released_out_of_order_and_controls_wait_behind_them(self) -> None:
        self.fates = [Fate.HOLD, Fate.HOLD]
        self.decode.sink.grants["t-1", 0] = [5, 6]
        for index in range(2):
            self.channel.write(make_unit(self.prefill, [index], [5 + index], first_block=index))
        self.channel.tell(Drained(transfer_id="t-1", epoch=0, complete=True))
        assert not self.channel.poll(0.0) and not self.decode.sink.events
        self.net.release(1)
        self.net.release(0)
        self.net.release(0)
        assert [h.first_block for h in self.decode.sink.landed] == [1, 0]
        assert isinstance(self.decode.sink.events[-1], Drained)

    def test_a_corrupted_unit_is_found(self) -> None:
        self.fates = [Fate.CORRUPT]
        self.decode.sink.grants["t-1", 0] = [5]
        self.channel.write(make_unit(self.prefill, [1], [5]))
        assert self.decode.sink.corrupt and self.channel.poll(0.0)[0].error == "digest mismatch"

    def test_a_dropped_unit_looks_written_to_its_sender(self) -> None:
        self.fates = [Fate.DROP]
        self.decode.sink.grants["t-1", 0] = [5]
        self.channel.write(make_unit(self.prefill, [1], [5]))
        assert self.channel.poll(0.0)[0].error == "" and not self.decode.sink.landed

    def test_a_fence_throws_held_units_away(self) -> None:
        self.fates = [Fate.HOLD]
        self.decode.sink.grants["t-1", 0] = [5]
        self.channel.write(make_unit(self.prefill, [1], [5]))
        self.decode.endpoint.fence(self.prefill.me)
        assert not self.net.held
        with pytest.raises(ChannelError, match="fenced"):
            self.channel.poll(0.0)


class TestOneSidedLoopbackChannel(ChannelSuite):
    def factory(self) -> EndpointFactory:
        return LoopbackNet(one_sided=True).factory
