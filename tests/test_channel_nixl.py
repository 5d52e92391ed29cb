"""The nixl channel: the suite over UCX's TCP (both agents in one process), groups, seals, what UCX is told."""

import hashlib
import threading
from contextlib import suppress

import msgspec
import pytest

from pdxfer.core.errors import ChannelError, ProtocolError
from pdxfer.testing.channel_suite import SECRET, ChannelSuite, Side, make_unit, until
from pdxfer.transport import nixl_notes
from pdxfer.transport.base import EndpointFactory, PeerId
from pdxfer.transport.nixl_notes import NoteType

pytest.importorskip("nixl_cu12", reason="the nixl wheel is not installed")

from pdxfer.transport.nixl import NixlAddress, NixlEndpoint
from pdxfer.transport.nixl_agent import Agent, descriptors, indices, writer_executed

pytestmark = pytest.mark.nixl


class TestNixlChannel(ChannelSuite):
    def factory(self) -> EndpointFactory:
        return NixlEndpoint

    def test_a_fence_replaces_the_agent_of_one_group_and_leaves_the_others_alone(self) -> None:
        """Two senders whose names fall on different groups: the fenced one must come back, the other goes on."""
        group = self.prefill.endpoint._group(2)
        name = next(n for n in ("q0", "q1", "q2", "q3", "q4", "q5", "q6") if group_of(n) != group)
        other = Side(name, NixlEndpoint, layers_adjacent=False, seed=3)
        try:
            self.decode.endpoint.admit([self.prefill.me, other.me], SECRET)
            other.endpoint.admit([self.decode.me], SECRET)
            before = self.decode.endpoint.address()
            channel = other.endpoint.connect(self.decode.me, before, 10.0)
            self.decode.endpoint.fence(self.prefill.me)
            assert self.decode.endpoint.generation == 1 and self.decode.endpoint.address() != before
            assert self.decode.sink.losses == [self.prefill.me]
            channel.probe(10.0)
            channel.close()
        finally:
            other.endpoint.close()

    def test_a_sender_that_vanishes_is_noticed_and_its_group_fenced_while_grants_are_out(self) -> None:
        """No goodbye: pings find out; bytes of it may still be under way, so the agent is replaced before lost()."""
        self.channel._agent.destroy()
        until(lambda: self.prefill.me in self.decode.sink.losses, "the loss to be reported")
        assert self.decode.endpoint.generation == 1

    def test_a_bug_of_the_sink_does_not_end_the_thread_that_looks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Found in a ping: without that thread nothing that comes would ever be heard of."""
        lost, heard = self.decode.sink.lost, threading.Event()

        def buggy(peer: PeerId, reason: str) -> None:
            lost(peer, reason)
            heard.set()
            raise KeyError("a bug")

        monkeypatch.setattr(self.decode.sink, "lost", buggy)
        self.channel._agent.destroy()
        assert heard.wait(10.0)
        again = self.prefill.endpoint.connect(self.decode.me, self.decode.endpoint.address(), 10.0)
        again.probe(10.0)
        again.close()

    def test_a_channel_closed_while_a_write_is_posted_does_not_say_that_it_owes_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As the pool does with one that was replaced; after a goodbye the receiver would not fence."""
        write = self.channel._agent.write
        closer = threading.Thread(target=self.channel.close)

        def slow(*arguments: object) -> object:
            closer.start()
            closer.join(0.2)  # it may get as far as it can
            return write(*arguments)

        monkeypatch.setattr(self.channel._agent, "write", slow)
        with suppress(ChannelError):
            self.channel.write(make_unit(self.prefill, [1], [1]))
        closer.join(10.0)
        until(lambda: self.prefill.me in self.decode.sink.losses, "the loss to be reported")
        assert self.decode.endpoint.generation == 1, "it was not fenced"

    def test_notes_of_strangers_are_dropped_and_counted(self) -> None:
        """Knowing our metadata lets an agent notify us; it gets nowhere."""
        metadata = msgspec.msgpack.decode(self.decode.endpoint.address(), type=NixlAddress).agents[0]
        stranger = Agent("stranger", self.prefill.region.layout, receives=False)
        try:
            target = stranger.add_peer(metadata)
            header = msgspec.msgpack.encode(make_unit(self.prefill, [1], [1]).header)
            for note in (b"hello?", nixl_notes.seal(b"guess", NoteType.UNIT, header)):
                stranger.send(target, note)
            refused = self.decode.endpoint.admission.refused
            until(lambda: list(stranger.notes()) or refused["protocol"] == 2, "both notes to be refused")
        finally:
            stranger.destroy()
        assert not self.decode.sink.refused and not self.decode.sink.events
        self.channel.probe(10.0)

    def test_blocks_outside_a_pool_are_an_error_before_anything_is_posted(self) -> None:
        for source, target in (([99], [1]), ([1], [-1])):
            unit = msgspec.structs.replace(
                make_unit(self.prefill, [1], [1]), source_blocks=source, target_blocks=target
            )
            with pytest.raises(ValueError, match="pool of 16 blocks"):
                self.channel.write(unit)

    def test_a_look_asks_about_the_oldest_write_and_stops_at_the_first_that_is_not_done(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each question drives all writes of the channel, so one that is not answered yet is enough."""
        with monkeypatch.context() as patch:
            patch.setattr(self.channel._agent, "done", lambda handle: False)
            for block in (1, 2, 3):
                self.channel.write(make_unit(self.prefill, [block], [block]))
        first, second, third = (handle for handle, _ in self.channel._posted)
        asked: list[object] = []
        done = {first}
        with monkeypatch.context() as patch:
            patch.setattr(self.channel._agent, "done", lambda handle: asked.append(handle) or handle in done)
            assert self.channel._collect() and asked == [first, second]
            self.channel._collect()
            assert asked == [first, second, second]
        assert [handle for handle, _ in self.channel._posted] == [second, third]
        until(lambda: self.channel.poll(0.1) and not self.channel._posted, "the writes to end")
        until(lambda: self.channel._agent.done(first), "the write that was only said to be done")

    def test_a_write_reports_those_before_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A write's note leaves when it is seen to be done; the receiver need not wait for the sender's next poll."""
        self.decode.sink.grants["t-1", 0] = [1, 2]
        first = make_unit(self.prefill, [1], [1])
        self.channel.write(first)
        until(lambda: self.channel._agent.done(self.channel._posted[0][0]), "the first write to be done")
        with monkeypatch.context() as patch:
            patch.setattr(self.channel._agent, "done", lambda handle: True)
            self.channel.write(make_unit(self.prefill, [2], [2]))
        assert len(self.channel._posted) == 1
        until(lambda: first.header in self.decode.sink.events, "the first unit to be announced")
        assert self.channel.poll(10.0)[0].header == first.header

    def test_a_peer_on_this_host_is_turned_down_if_ucx_may_use_what_cannot_be_fenced(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("UCX_TLS", "tcp,cma")
        assert "UCX_TLS allows cma" in self.prefill.endpoint.accepts(self.decode.endpoint.address())


def group_of(engine_id: str) -> int:
    """As NixlEndpoint._group for two groups."""
    return hashlib.blake2b(engine_id.encode(), digest_size=4).digest()[0] % 2


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ("tcp", []),
        ("^cma,posix,sysv,xpmem,knem,cuda_ipc", []),
        ("^cma,posix,sysv,xpmem,knem", ["cuda_ipc"]),
        ("rc,tcp,cuda_copy", []),
        ("tcp,sysv", ["sysv"]),
        ("tcp,sm", ["cma", "posix", "sysv", "xpmem", "knem"]),
        ("all", ["cma", "posix", "sysv", "xpmem", "knem", "cuda_ipc"]),
    ],
)
def test_which_settings_let_the_writer_store_into_our_memory(
    setting: str, allowed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", setting)
    assert writer_executed() == allowed


def test_descriptor_rows_and_indices_agree_with_the_layout() -> None:
    """Row l * B + b is block b of layer l; indices follow canonical order."""
    side = Side("x", NixlEndpoint, layers_adjacent=True, seed=1)
    side.endpoint.close()
    layout = side.region.layout
    rows = descriptors(layout)
    picked = rows[indices(layout, [5, 2], 1, 2), 0].tolist()
    expected = [layout.base + layout.layer_offsets[la] + b * layout.block_stride for la in (1, 2) for b in (5, 2)]
    assert picked == expected and set(rows[:, 1].tolist()) == {layout.block_bytes}


def test_golden_bytes_of_a_note() -> None:
    """The format changes only on purpose: a new version number and a dated line in nixl_notes.py."""
    note = nixl_notes.seal(b"k" * 32, NoteType.PROBE, b"ab")
    assert note.hex() == "5044584e0305" + note[6:22].hex() + "6162"
    assert note[6:22].hex() == "456090a96e841dccbf4d694969430b21"


def test_a_changed_note_is_refused() -> None:
    note = nixl_notes.seal(b"k" * 32, NoteType.CONTROL, b"body")
    assert nixl_notes.unseal(b"k" * 32, note) == b"body"
    changed = {
        "wrong tag": note[:-1] + b"!",
        "none of ours": b"XXXX" + note[4:],
        "version 9, this side speaks 3": note[:4] + b"\x09" + note[5:],
        "unknown type 99": note[:5] + b"\x63" + note[6:],
        "notification of 3 bytes": note[:3],
    }
    for reason, bad in changed.items():
        with pytest.raises(ProtocolError, match=reason):
            nixl_notes.kind_of(bad)
            nixl_notes.unseal(b"k" * 32, bad)
