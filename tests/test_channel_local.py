"""The local channel: the suite (reading our own process), a second process, and what the kernel may refuse."""

import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from pdxfer.core.errors import ChannelError
from pdxfer.testing.channel_suite import ChannelSuite, make_unit, until
from pdxfer.transport import cma
from pdxfer.transport.base import EndpointFactory
from pdxfer.transport.local import LocalAddress, LocalEndpoint
from pdxfer.transport.vectors import iovecs


class TestLocalChannel(ChannelSuite):
    def factory(self) -> EndpointFactory:
        return LocalEndpoint

    def test_addresses_of_other_hosts_and_pid_namespaces_are_turned_down(self) -> None:
        here = msgspec.msgpack.decode(self.decode.endpoint.address(), type=LocalAddress)
        for change, reason in (({"host": "x"}, "other host"), ({"pid_namespace": "x"}, "other pid namespace")):
            there = msgspec.msgpack.encode(msgspec.structs.replace(here, **change))
            assert reason in self.prefill.endpoint.accepts(there)

    def test_a_unit_that_is_not_wanted_is_an_error_for_its_sender(self) -> None:
        """The reader answers for each unit, so the sender learns it."""
        self.channel.write(make_unit(self.prefill, [1], [1], transfer_id="t-unknown"))
        assert self.results(1)[0].error == "not wanted"

    def test_blocks_outside_the_senders_pool_are_never_followed(self) -> None:
        """The sender names block 99 of 16: an error for it, nothing read, the channel lives."""
        self.decode.sink.grants["t-1", 0] = [5]
        unit = make_unit(self.prefill, [1], [5])
        self.channel.write(msgspec.structs.replace(unit, source_blocks=[99]))
        assert "outside a pool of 16 blocks" in self.results(1)[0].error
        assert self.decode.sink.claims == 0
        self.channel.probe(5.0)

    def test_a_copy_that_ends_after_the_sender_has_closed_is_thrown_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The source is the sender's again once close() has returned; what was read since must not count."""
        self.decode.sink.grants["t-1", 0] = [5]
        copy = cma.Reader.copy

        def slow(reader: cma.Reader, target: cma.Iovecs, source: cma.Iovecs) -> None:
            self.channel._frames.cut()
            copy(reader, target, source)

        monkeypatch.setattr(cma.Reader, "copy", slow)
        self.channel.write(make_unit(self.prefill, [1], [5]))
        until(lambda: self.decode.sink.failures, "the claim to be released as failed")
        assert not self.decode.sink.landed and "closed the channel" in self.decode.sink.failures[0][1]

    def test_another_layout_is_refused_with_both_shapes(self) -> None:
        layout = self.prefill.region.layout
        self.prefill.region.layout = msgspec.structs.replace(layout, block_bytes=layout.block_bytes // 2)
        with pytest.raises(ChannelError, match="3 layers x 2048 bytes a block there, 3 x 4096 here"):
            self.connect()


def test_the_reader_survives_short_copies_and_more_ranges_than_one_call_takes() -> None:
    """3,000 ranges; a page that is not readable in the middle ends the copy with a reason."""
    page = mmap.PAGESIZE
    source = np.random.default_rng(1).integers(0, 256, 3000 * 100, dtype=np.uint8)
    target = np.zeros_like(source)
    runs = np.stack((np.random.default_rng(2).permutation(3000) * 100, np.full(3000, 100)), axis=1)
    reader = cma.Reader(os.getpid())
    reader.copy(iovecs(target.ctypes.data, runs), iovecs(source.ctypes.data, runs))
    assert np.array_equal(source, target)
    area = mmap.mmap(-1, 2 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + page), page, 0) == 0
    both = np.array([[0, page], [page, page]])
    try:
        with pytest.raises(ChannelError, match="Bad address"):
            reader.copy(iovecs(target.ctypes.data, both), iovecs(address, both))
    finally:
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + page), page, 3)


def test_a_large_copy_is_shared_and_both_halves_must_succeed() -> None:
    """2 MiB in two ranges on two threads; the half that fails fails the whole."""
    size = cma.SPLIT_BYTES
    source = np.random.default_rng(1).integers(0, 256, 2 * size, dtype=np.uint8)
    target = np.zeros_like(source)
    runs = np.array([[0, size], [size, size]])
    with ThreadPoolExecutor(1) as helper:
        reader = cma.Reader(os.getpid(), helper)
        reader.copy(iovecs(target.ctypes.data, runs), iovecs(source.ctypes.data, runs))
        assert np.array_equal(source, target)
        for bad in (0, 1):
            there = iovecs(source.ctypes.data, runs)
            there[bad, 0] = 4096
            with pytest.raises(ChannelError, match="Bad address"):
                reader.copy(iovecs(target.ctypes.data, runs), there)


def test_a_process_that_is_gone_cannot_be_read() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    one = np.array([[0, 8]])
    with pytest.raises(ChannelError, match="No such process"):
        cma.Reader(child).copy(iovecs(ctypes.addressof(ctypes.create_string_buffer(8)), one), iovecs(4096, one))
