"""The staged path over sockets: frames come into slots, are checked, decoded, scattered; what is wrong is caught."""

import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from wire_rig import CHUNK_BLOCKS, LAYERS, P0, PACKING, SOURCE, TARGET, Rig, settings

from pdxfer.codec.frame import HEADER_BYTES
from pdxfer.node.staging_ring import Key
from pdxfer.transport.base import OutgoingUnit, UnitHeader
from pdxfer.wire.halves import Fenced, Landed

NUM_CHUNKS = len(SOURCE) // CHUNK_BLOCKS


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(**getattr(request, "param", {}))
    yield rig
    rig.close()


def tampered(rig: Rig, unit: OutgoingUnit, at: int) -> OutgoingUnit:
    """One byte of a frame is another one."""
    data = bytearray(b"".join(unit.frame))
    data[at] ^= 1
    start = np.frombuffer(data, dtype=np.uint8).ctypes.data - rig.prefill.region.layout.base
    return msgspec.structs.replace(unit, frame=(memoryview(data),), source=np.array([[start, len(data)]]))


def test_lossless_frames_land_bit_for_bit(rig: Rig) -> None:
    """Every chunk crosses as a frame smaller than its bytes, and what lands is what was sent."""
    end = rig.run()
    assert isinstance(end, Landed) and rig.is_equal
    assert len(rig.frames) == NUM_CHUNKS and all(f.frame_bytes < f.num_bytes and f.digest for f in rig.frames)
    assert rig.decode.wire.staging.num_frames == NUM_CHUNKS


def test_credits_come_back_and_all_slots_are_free_at_the_end(rig: Rig) -> None:
    for number in range(5):
        assert isinstance(rig.run(f"t{number}"), Landed)
    ring = rig.decode.wire.staging._ring
    rig.wait(lambda: len(ring._free) == ring.num_slots)
    ring.check()
    assert not ring._shares


@pytest.mark.parametrize("rig", [{"prefill": settings("int8"), "decode": settings("int8")}], indirect=True)
def test_lossy_frames_land_near_and_the_first_tokens_exactly(rig: Rig) -> None:
    assert isinstance(rig.run(), Landed) and len(rig.frames) == NUM_CHUNKS
    values = [
        (side.array[:, ids].copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        for side, ids in ((rig.prefill, SOURCE), (rig.decode, TARGET))
    ]
    assert 0 < np.abs(values[0] - values[1]).max() < 0.05
    sent, got = (v.reshape(LAYERS, len(SOURCE), PACKING.heads, PACKING.block_size, -1) for v in values)
    assert (sent[:, 0, :, :4] == got[:, 0, :, :4]).all()


def test_without_credits_everything_goes_direct(rig: Rig) -> None:
    """Ring exhausted, or a peer that offers none: raw, not a wait."""
    rig.pass_credits = False
    assert isinstance(rig.run(), Landed) and rig.is_equal and not rig.frames


def test_more_chunks_than_slots_go_as_frames_or_direct_and_all_land() -> None:
    slot = CHUNK_BLOCKS * LAYERS * PACKING.block_bytes
    rig = Rig(decode=settings(staging_bytes=slot))
    try:
        for number in range(4):
            assert isinstance(rig.run(f"t{number}"), Landed) and rig.is_equal
        assert len(rig.sent) == 4 * NUM_CHUNKS and 4 <= len(rig.frames)
    finally:
        rig.close()


@pytest.mark.parametrize("at", [3, 60, 100, HEADER_BYTES + 7])
def test_a_damaged_frame_is_never_used(rig: Rig, at: int) -> None:
    """Header or payload: the grant ends after the good chunks, and nothing of the bad one is in the blocks."""
    before = rig.decode.array.copy()
    seen = 0

    def tamper(unit: OutgoingUnit) -> OutgoingUnit:
        nonlocal seen
        seen += 1
        return tampered(rig, unit, at) if seen == 2 else unit

    rig.tamper = tamper
    end = rig.run()
    assert isinstance(end, Fenced) and "bad frame" in end.reason and end.num_valid == CHUNK_BLOCKS
    assert rig.decode.wire.staging.num_bad == 1 and rig.receiver.num_corrupt == 1
    bad = TARGET[CHUNK_BLOCKS : 2 * CHUNK_BLOCKS]
    assert (rig.decode.array[:, bad] == before[:, bad]).all()
    rig.tamper = lambda unit: unit
    assert isinstance(rig.run("t2"), Landed) and rig.is_equal


def test_a_frame_of_another_chunk_is_refused(rig: Rig) -> None:
    """Bytes that are a good frame, but not of this unit."""
    first: list[OutgoingUnit] = []

    def tamper(unit: OutgoingUnit) -> OutgoingUnit:
        first.append(unit)
        if len(first) != 2:
            return unit
        header = msgspec.structs.replace(unit.header, frame_bytes=first[0].header.frame_bytes)
        return msgspec.structs.replace(first[0], header=header)

    rig.tamper = tamper
    end = rig.run()
    assert isinstance(end, Fenced) and "key" in end.reason and end.num_valid == CHUNK_BLOCKS


@pytest.mark.parametrize("rig", [{"marks": {"model": "other"}}], indirect=True)
def test_a_frame_of_another_model_is_refused(rig: Rig) -> None:
    end = rig.run()
    assert isinstance(end, Fenced) and "identity" in end.reason and end.num_valid == 0


@pytest.mark.parametrize("rig", [{"prefill": settings("int8"), "decode": settings("lossless")}], indirect=True)
def test_a_codec_that_decode_does_not_allow_is_not_sent(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Decode names with its credits what it takes: nothing has to fail first, and the log says it once."""
    for number in range(2):
        assert isinstance(rig.run(f"t{number}"), Landed) and rig.is_equal
    assert not rig.frames and rig.decode.wire.staging.num_bad == 0
    assert [r.getMessage() for r in caplog.records if "codec.allow" in r.getMessage()] == [
        "codec int8 is not sent to d0: its codec.allow takes lossless"
    ]


@pytest.mark.parametrize("rig", [{"prefill": settings("int8"), "decode": settings("lossless")}], indirect=True)
def test_a_codec_that_was_refused_is_not_sent_again(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever decode had promised: one transfer is lost, then the peer gets its bytes as they are."""
    staging = rig.decode.wire.staging
    makes = staging.credit
    staging.credit = lambda *a: msgspec.structs.replace(makes(*a), codecs=["int8"])  # type: ignore[method-assign]
    end = rig.run("a")
    assert isinstance(end, Fenced) and "not allowed" in end.reason
    num_frames = len(rig.frames)
    for name in ("b", "c"):
        assert isinstance(rig.run(name), Landed) and rig.is_equal
    assert len(rig.frames) == num_frames
    assert len([r for r in caplog.records if "is not sent to d0 any more" in r.getMessage()]) == 1


@pytest.mark.parametrize("rig", [{"prefill": settings(tenants={"exact": ()})}], indirect=True)
def test_a_tenant_can_keep_its_kv_raw(rig: Rig) -> None:
    assert isinstance(rig.run("a", tenant="exact"), Landed) and not rig.frames
    assert isinstance(rig.run("b"), Landed) and rig.frames


def test_the_switch_turns_frames_off_and_on(rig: Rig) -> None:
    rig.prefill.wire.switch(False)
    assert isinstance(rig.run("a"), Landed) and not rig.frames
    rig.prefill.wire.switch(True)
    assert isinstance(rig.run("b"), Landed) and rig.frames


def test_revoked_in_mid_transfer_nothing_lands_after_the_fence(rig: Rig) -> None:
    """Abort while a frame waits to be decoded: it is dropped, its slot comes back, Fenced comes once; the connection,
    which other transfers use, is not cut for it."""
    staging, decode = rig.decode.wire.staging, rig.decode.wire.staging._frames.decode
    decoded: list[object] = []

    def revoke_then_decode(frame: memoryview, unit: object) -> object:
        decoded.append(unit)
        if not any(isinstance(f, Fenced) for f in rig.facts):
            rig.receiver.revoke("t", 1, "request over")
            rig.wait(lambda: any(isinstance(f, Fenced) for f in rig.facts))
        return decode(frame, unit)  # type: ignore[arg-type]

    staging._frames.decode = revoke_then_decode  # type: ignore[method-assign, assignment]
    before = rig.decode.array.copy()
    end = rig.run()
    assert isinstance(end, Fenced) and end.num_valid == 0 and end.reason == "request over"
    rig.wait(lambda: len(staging._ring._free) == staging._ring.num_slots)
    staging._ring.check()
    assert (rig.decode.array == before).all() and staging.num_frames == 0
    assert len(decoded) == 1, "what waited behind it was decoded for nobody"
    assert rig.there.connections(P0) and isinstance(rig.run("u"), Landed)


def test_a_grant_that_ends_before_its_slots_are_open_leaves_no_credit_behind(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer is lost between the two steps of `expect`: whichever comes last gives the slots back."""
    staging, may_open, is_expected = rig.decode.wire.staging, threading.Event(), threading.Event()
    opens, fence = staging.open, staging.fence

    def late(key: Key) -> None:
        rig.receiver.revoke("t", 1, "the peer is lost")
        assert may_open.wait(10)
        opens(key)

    def slow(key: Key) -> None:
        fence(key)
        may_open.set()
        if threading.current_thread() is not threading.main_thread():
            assert is_expected.wait(10)

    monkeypatch.setattr(staging, "open", late)
    monkeypatch.setattr(staging, "fence", slow)
    rig.expect("t")
    is_expected.set()
    rig.wait(lambda: rig.end_of("t"))
    assert not staging._ring._shares and not staging._open


def test_whatever_a_codec_does_costs_a_unit_never_the_thread(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode gets too few bytes, prefill's codec raises what nobody expects: the next transfers go on."""
    decode = rig.decode.wire._frames.decode
    with monkeypatch.context() as patch:
        patch.setattr(rig.decode.wire._frames, "decode", lambda *a: (decode(*a)[0][:-8], "lossless"))
        end = rig.run("a")
        assert isinstance(end, Fenced) and "bad frame" in end.reason
    assert isinstance(rig.run("b"), Landed) and rig.is_equal
    num_frames = len(rig.frames)

    def fail(*_: object) -> None:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(rig.prefill.wire._frames, "encode", fail)
    rig.decode.array[:, TARGET] = 0
    assert isinstance(rig.run("c"), Landed) and rig.is_equal and len(rig.frames) == num_frames


def test_an_old_epochs_frame_finds_no_slot(rig: Rig) -> None:
    """After a fence the next epoch has slots of its own; what carries the old one is discarded."""
    rig.expect("t", epoch=1)
    rig.wait(lambda: rig.credits)
    rig.receiver.revoke("t", 1, "fence")
    rig.wait(lambda: any(isinstance(f, Fenced) for f in rig.facts))
    rig.expect("u", epoch=2)
    rejected = rig.receiver.num_rejected
    rig.grant("t", epoch=1)
    rig.prompt("t")
    rig.wait(lambda: any(s[0] == "t" for s in rig.settled))
    assert rig.receiver.num_rejected >= rejected and rig.decode.wire.staging.num_frames == 0


def test_nothing_is_scattered_after_the_close(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever owns the region may give its memory back then. A slow decode is not waited for, but kept out."""
    monkeypatch.setattr("pdxfer.node.staging._CLOSE_S", 0.01)
    staging = rig.decode.wire.staging
    is_decoding, may_go_on = threading.Event(), threading.Event()
    decode = staging._frames.decode

    def slow(frame: memoryview, header: UnitHeader) -> object:
        is_decoding.set()
        assert may_go_on.wait(30.0)
        return decode(frame, header)

    monkeypatch.setattr(staging._frames, "decode", slow)
    rig.expect()
    rig.wait(lambda: rig.credits)
    rig.grant()
    rig.prompt()
    assert is_decoding.wait(30.0)
    staging.close()
    may_go_on.set()
    for worker in staging._threads:
        worker.join(30.0)
    assert staging.num_frames == 0
