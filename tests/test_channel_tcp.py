"""The tcp channel: the suite, its bytes on the wire, and what it does with strangers' bytes."""

import socket
import threading

import msgspec
import numpy as np
import pytest

from pdxfer.core.errors import ChannelError, ConfigError, ProtocolError
from pdxfer.testing.channel_suite import ChannelSuite, make_unit, until
from pdxfer.transport import frames
from pdxfer.transport.base import Abort, EndpointFactory
from pdxfer.transport.frames import FrameSocket, FrameType
from pdxfer.transport.tcp import TcpAddress, TcpEndpoint, listen


class TestTcpChannel(ChannelSuite):
    def factory(self) -> EndpointFactory:
        return TcpEndpoint

    def raw(self) -> socket.socket:
        where = msgspec.msgpack.decode(self.decode.endpoint.address(), type=TcpAddress)
        return socket.create_connection((where.host, where.port), 5.0)

    def test_garbage_is_refused_counted_and_harmless(self) -> None:
        """An HTTP client at the data port is told what this is, and the endpoint lives."""
        with self.raw() as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
            answer = b""
            while part := stranger.recv(4096):
                answer += part
        assert b"not a pdxfer data channel" in answer
        assert self.decode.endpoint.admission.refused["protocol"] == 1
        self.channel.probe(5.0)

    def test_a_connection_for_which_no_thread_is_to_be_had_ends_only_that_one(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The thread that accepts goes on: later there may be some."""
        start, failed = threading.Thread.start, threading.Event()

        def scarce(thread: threading.Thread) -> None:
            if thread.name == "pdxfer-tcp-in" and not failed.is_set():
                failed.set()
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", scarce)
        with self.raw() as turned_away:
            assert turned_away.recv(1) == b""
        self.connect().close()

    def test_another_version_is_refused_naming_both(self) -> None:
        with self.raw() as stranger:
            stranger.sendall(frames.PREAMBLE.pack(frames.MAGIC, 9))
            answer = b""
            while part := stranger.recv(4096):
                answer += part
        assert b"version 9" in answer and b"speaks 3" in answer

    def test_an_announced_length_beyond_the_bound_allocates_nothing(self) -> None:
        with pytest.raises(ProtocolError, match="announces"):
            frames.unpack_head(frames.HEAD.pack(FrameType.CONTROL, 1 << 31, 0))
        with pytest.raises(ProtocolError, match="payload"):
            frames.unpack_head(frames.HEAD.pack(FrameType.CONTROL, 8, 8))
        with pytest.raises(ProtocolError, match="unknown type 77"):
            frames.unpack_head(frames.HEAD.pack(77, 8, 8))

    def test_a_control_goes_over_the_newest_connection(self) -> None:
        """An older one may lead nowhere: its host was lost, and the system has not noticed yet."""
        channels, came = [self.connect() for _ in range(8)], []
        for number, channel in enumerate(channels):
            channel._next = lambda head, meta, number=number: came.append(number)
        self.decode.endpoint.tell(self.prefill.me, Abort(transfer_id="t-1", epoch=0, reason="test"))
        until(lambda: came, "the control")
        for channel in channels:
            channel.close()
        assert came == [7]

    def test_a_fence_ends_a_unit_in_its_middle(self) -> None:
        """The writer stops in mid-unit; after the fence its remaining bytes land nowhere."""
        self.decode.sink.grants["t-1", 0] = [5, 6]
        unit = make_unit(self.prefill, [1, 2], [5, 6])
        views = self.prefill.region.views(unit.source)
        out: FrameSocket = self.channel._frames
        meta = msgspec.msgpack.encode(unit.header)
        head = frames.pack_head(FrameType.UNIT, len(meta), unit.header.num_bytes)
        out._send([memoryview(head + meta), views[0]])
        until(lambda: self.decode.sink.claims == 1, "the claim")
        self.decode.endpoint.fence(self.prefill.me)
        before = self.decode.memory.copy()
        with pytest.raises(ChannelError):
            for _ in range(1000):
                out._send(views[1:])
        assert (before == self.decode.memory).all()
        until(lambda: self.decode.sink.claims == 0, "the claim to be released")
        assert "cut" in self.decode.sink.failures[0][1] or "closed" in self.decode.sink.failures[0][1]

    def test_a_receiver_that_takes_nothing_is_dead_after_the_write_timeout(self) -> None:
        """Blocked in claim() the receiver reads no byte: write() raises instead of waiting for ever."""
        self.channel._frames.set_timeout(0.3)
        gate = threading.Event()
        self.decode.sink.claim = lambda peer, header: gate.wait(20) and None
        header = make_unit(self.prefill, [1], [1]).header
        meta = msgspec.msgpack.encode(msgspec.structs.replace(header, num_bytes=1 << 26))
        memory = np.zeros(1 << 26, dtype=np.uint8)
        big = np.array([[memory.ctypes.data, memory.size]], dtype=np.uint64)
        try:
            with pytest.raises(ChannelError, match="took no byte"):
                self.channel._send(FrameType.UNIT, meta, big)
        finally:
            gate.set()


def test_golden_bytes_of_preamble_and_unit_frame() -> None:
    """The wire format changes only on purpose: a new version number and a dated line in frames.py."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        out = FrameSocket(ours, 1.0)
        out.send_preamble()
        out.send(FrameType.UNIT, b"\x81\xa1a\x01", [memoryview(b"abc"), memoryview(b"de")])
        assert theirs.recv(100).hex() == (
            "504458440300"  # "PDXD", version 3
            "05000000"
            "04000000"
            "0500000000000000"
            "81a16101"
            "6162636465"
        )


def test_no_free_port_in_the_range_names_range_and_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port}..{port}.*network.ports"):
            listen("127.0.0.1", (port, port))
