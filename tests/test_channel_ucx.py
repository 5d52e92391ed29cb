"""The ucx channel: the suite in one piece and in many, fences and failures in mid-unit, what ucxx may change."""

import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from test_channel_fencing import late_bytes
from test_channel_idle import PROGRAM

from pdxfer.core.errors import ChannelError, ConfigError
from pdxfer.kv.runs import Runs
from pdxfer.memory.region import Region
from pdxfer.testing.channel_suite import BLOCK_BYTES, WAIT_S, ChannelSuite, make_unit, until
from pdxfer.transport.base import EndpointFactory, EndpointOptions, PeerId, Sink, UnitHeader
from pdxfer.transport.kinds import endpoint_factories
from pdxfer.transport.ucx import UcxEndpoint
from pdxfer.transport.ucx_link import Ucx, UcxLink, cut, gather, scatter

HAS_UCXX = importlib.util.find_spec("ucxx") is not None
needs_ucxx = pytest.mark.skipif(not HAS_UCXX, reason="ucxx is not installed: pip install 'pdxfer[ucx]'")


@needs_ucxx
class TestUcxChannel(ChannelSuite):
    def factory(self) -> EndpointFactory:
        return UcxEndpoint

    def test_a_receiver_that_does_not_answer_is_dead_after_the_write_timeout(self) -> None:
        """Blocked in claim() it receives nothing: write() raises instead of waiting for ever."""
        gate = threading.Event()
        self.decode.sink.claim = lambda peer, header: gate.wait(WAIT_S) and None
        self.prefill.endpoint.options = EndpointOptions(write_timeout_s=0.3)
        try:
            with pytest.raises(ChannelError, match="nothing moved over UCX for 0.3 s"):
                self.channel.write(make_unit(self.prefill, [1], [1]))
        finally:
            gate.set()
        assert self.channel.dead

    def test_closing_a_channel_ends_a_write_under_way(self) -> None:
        """From another thread, at once."""
        gate, claimed = threading.Event(), threading.Event()

        def claim(peer: PeerId, header: UnitHeader) -> Runs | None:
            claimed.set()
            gate.wait(WAIT_S)
            return None

        self.decode.sink.claim = claim
        closer = threading.Thread(target=lambda: claimed.wait(WAIT_S) and self.channel.close())
        closer.start()
        try:
            with pytest.raises(ChannelError, match="closed here"):
                self.channel.write(make_unit(self.prefill, [1], [1]))
        finally:
            closer.join(WAIT_S)
            gate.set()
        assert not closer.is_alive()

    def test_a_unit_that_was_refused_or_corrupt_is_reported_to_the_sender(self) -> None:
        """The receiver answers each unit, so its result says what became of it."""
        self.channel.write(make_unit(self.prefill, [1], [1]))
        self.decode.sink.grants["t-1", 0] = [5]
        unit = make_unit(self.prefill, [1], [5])
        self.prefill.memory[:] ^= 0xFF
        self.channel.write(unit)
        assert [r.error for r in self.results(2)] == ["not wanted", "digest mismatch"]


class SmallPieces(UcxEndpoint):
    """A unit of one block takes several messages, cut across blocks."""

    piece_bytes = BLOCK_BYTES * 2 // 3


@needs_ucxx
class TestUcxChannelInManyPieces(ChannelSuite):
    def factory(self) -> EndpointFactory:
        return SmallPieces

    def test_the_two_ends_may_be_set_to_different_pieces(self) -> None:
        """The receiver's counts."""
        self.prefill.endpoint.piece_bytes = 1
        self.decode.sink.grants["t-1", 0] = [7, 8]
        self.channel.close()
        self.channel = self.connect()
        self.channel.write(make_unit(self.prefill, [0, 1], [7, 8]))
        assert [r.error for r in self.results(1)] == [""]

    def test_a_fence_ends_a_unit_in_its_middle(self) -> None:
        """The sender stops after a piece; nothing lands after the fence and the claim is released."""
        self.decode.sink.grants["t-1", 0] = [5, 6]
        unit = make_unit(self.prefill, [1, 2], [5, 6])
        views = self.prefill.region.views(unit.source)
        stopped, go_on = threading.Event(), threading.Event()
        link: UcxLink = self.channel._link
        push = link.push

        def stumble(_: object, timeout_s: float) -> None:
            push([views[0][: SmallPieces.piece_bytes]], timeout_s)
            stopped.set()
            assert go_on.wait(WAIT_S)
            push([views[0][SmallPieces.piece_bytes :], *views[1:]], timeout_s)

        link.push = stumble
        failure: list[ChannelError] = []

        def write() -> None:
            try:
                self.channel.write(unit)
            except ChannelError as error:
                failure.append(error)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            assert stopped.wait(WAIT_S)
            first = self.prefill.bytes_of([1])[: SmallPieces.piece_bytes]
            until(lambda: self.decode.bytes_of([5]).startswith(first), "the first piece to land")
            self.decode.endpoint.fence(self.prefill.me)
            before = self.decode.memory.copy()
        finally:
            go_on.set()
            writer.join(WAIT_S)
        until(lambda: self.decode.sink.losses, "the loss to be reported")
        assert failure and np.array_equal(before, self.decode.memory)
        assert self.decode.sink.claims == 0 and len(self.decode.sink.failures) == 1


@pytest.mark.slow
@needs_ucxx
def test_no_byte_lands_after_a_fence_of_a_stopped_writer() -> None:
    """And without the fence they do: the check has teeth."""
    assert late_bytes("ucx", "fence") == 0
    assert late_bytes("ucx", "no-fence") > 0


@pytest.mark.slow
@needs_ucxx
def test_both_ends_of_an_idle_channel_cost_less_than_two_percent_of_a_core() -> None:
    assert float(run_program(PROGRAM, "ucx").splitlines()[-1]) < 0.02


@needs_ucxx
def test_the_library_leaves_the_environment_as_our_nixl_channel_wants_it() -> None:
    """ucxx sets four UCX_ variables on import (rendezvous fragments in CUDA memory, for one); NIXL would read them."""
    program = (
        "import os; from pdxfer.transport.base import EndpointOptions as O; "
        "from pdxfer.transport.nixl_agent import set_ucx_defaults; from pdxfer.transport.ucx_link import Ucx; "
        "set_ucx_defaults(O()); before = dict(os.environ); Ucx(O()); assert dict(os.environ) == before"
    )
    run_program(program)


def run_program(program: str, *arguments: str) -> str:
    """In a process of its own, which must exit with 0; its output."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_transports_in_which_the_peer_stores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,cma,cuda_ipc")
    with pytest.raises(ConfigError, match="UCX_TLS allows cma, in which"):
        Ucx(EndpointOptions())


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx", None)
    for name in [name for name in os.environ if name.startswith("UCX_")]:
        monkeypatch.delenv(name)
    side = PeerId(engine_id="e", incarnation=1, rank=0)
    with pytest.raises(ConfigError, match=r"pip install .*\[ucx\]'"):
        endpoint_factories(["ucx"])["ucx"](EndpointOptions(), side, Region.__new__(Region), _no_sink())


def _no_sink() -> Sink:
    return None  # type: ignore[return-value]


@pytest.mark.parametrize("size", [1, 3, 4, 7, 100])
def test_pieces_are_the_bytes_in_order_and_full_but_the_last(size: int) -> None:
    data = bytes(range(24))
    views = [memoryview(data)[a:b] for a, b in ((0, 5), (5, 6), (6, 6), (6, 17), (17, 24))]
    out = bytearray(24)
    targets = cut([memoryview(out)[:20], memoryview(out)[20:]], size)
    sizes = []
    for piece in cut(views, size):
        staging = memoryview(bytearray(size))
        sizes.append(gather(piece, staging))
        scatter(staging[: sizes[-1]], next(targets))
    assert bytes(out) == data and not any(targets)
    assert all(s == size for s in sizes[:-1]) and 0 < sizes[-1] <= size
