"""When decode computes the rest of a prompt instead of waiting for it, and what a deadline does to the choice."""

import threading

import pytest
from wire_rig import CHUNK_BLOCKS, LAYERS, PACKING, SOURCE, Rig, settings

from pdxfer.node import recompute
from pdxfer.node.recompute import CHEAPER, MIN_STEP_TOKENS, TRIAL_BYTES, Recompute, Rest, StepRate
from pdxfer.node.wire_choice import RAW, Chooser, Rates
from pdxfer.transport.base import OutgoingUnit
from pdxfer.wire.halves import Fenced, Landed

CHUNK = 6 << 20


def rest(num_bytes: int = 80 << 20, sent_bytes: int = TRIAL_BYTES, num_tokens: int = 3500) -> Rest:
    return Rest(num_bytes=num_bytes, sent_bytes=sent_bytes, num_tokens=num_tokens)


def peer(tokens_per_s: float) -> Recompute:
    found = Recompute()
    found.tokens_per_s = tokens_per_s
    return found


@pytest.mark.parametrize(
    ("link_bytes_per_s", "tokens_per_s", "expected"),
    [
        (12.5e6, 2000, True),  # 100 Mbit/s: 6.7 s against 1.75
        (125e6, 2000, False),  # 1 Gbit/s: 0.67 s against 1.75
        (125e6, 20_000, True),  # ... and a decode that computes ten times as fast
        (25e6, 2000, False),  # 3.4 s against 1.75: faster, but not by so much that it is sure
        (12.5e6, 0, False),  # decode has not said how fast it is
    ],
)
def test_computing_must_be_faster_by_far(link_bytes_per_s: float, tokens_per_s: float, expected: bool) -> None:
    left = rest()
    assert peer(tokens_per_s).is_cheaper(left, left.num_bytes / link_bytes_per_s, 0.0) is expected


def test_the_first_megabytes_are_always_sent() -> None:
    """Else a link that has become fast again would never be noticed."""
    assert not peer(1e6).is_cheaper(rest(sent_bytes=TRIAL_BYTES - 1), 100.0, 0.0)


def test_one_prompt_at_a_time_is_left_to_decode() -> None:
    """While it computes one, the next prompts are sent, however slowly: they would only wait there."""
    one = peer(1000)
    assert one.is_cheaper(rest(), 60.0, 10.0)
    assert not one.is_cheaper(rest(), 60.0, 13.4)
    assert one.is_cheaper(rest(), 60.0, 13.6)


def test_only_steps_with_a_prompt_in_them_count() -> None:
    rate = StepRate()
    rate.note(MIN_STEP_TOKENS - 1, 0.001)
    assert rate.tokens_per_s == 0.0
    rate.note(1000, 0.5)
    assert rate.tokens_per_s == 2000
    for _ in range(30):
        rate.note(1000, 1.0)
    assert rate.tokens_per_s == pytest.approx(1000, rel=0.01)


def test_a_late_transfer_takes_a_codec_that_wins_by_little() -> None:
    """1.08 times as fast is below the margin, unless the deadline would be missed otherwise; slower ones never win."""
    one = Chooser({"lossless": Rates(ratio=1.09, encode=50e9, decode=50e9)})
    one.link.bytes_per_s = 125e6
    assert one.choose(("lossless",), CHUNK, 4, is_last=False) == RAW
    assert one.choose(("lossless",), CHUNK, 4, is_last=False, is_late=True) == "lossless"
    slow = Chooser({"lossless": Rates(ratio=0.99, encode=50e9, decode=50e9)})
    slow.link.bytes_per_s = 125e6
    assert slow.choose(("lossless",), CHUNK, 4, is_last=False, is_late=True) == RAW


def test_what_is_left_is_estimated_by_the_fastest_way() -> None:
    one = Chooser({"int8": Rates(ratio=2.0, encode=50e9, decode=50e9)})
    assert one.least_seconds(("int8",), 125_000_000) == 0.0, "the link is not known yet"
    one.link.bytes_per_s = 125e6
    assert one.least_seconds((), 125_000_000) == pytest.approx(1.0)
    assert one.least_seconds(("int8",), 125_000_000) == pytest.approx(0.5, rel=0.02)
    one.forbid("int8:2")
    assert one.least_seconds(("int8",), 125_000_000) == pytest.approx(1.0)


def test_a_hopeless_transfer_ends_with_its_good_chunks_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over sockets: decode keeps what has come, both sides settle once, and the next transfer is sent whole."""
    monkeypatch.setattr(recompute, "TRIAL_BYTES", 2 * CHUNK_BLOCKS * LAYERS * PACKING.block_bytes)
    rig = Rig(prefill=settings("auto"), decode=settings("auto"))
    try:
        assert rig.prefill.wire.wait_measured(60.0)
        rig.decode.wire.staging.steps.note(MIN_STEP_TOKENS, MIN_STEP_TOKENS / 1e4)
        slow_link(rig, 1000.0)
        end = rig.run("a")
        assert isinstance(end, Fenced) and CHEAPER in end.reason and end.num_valid == 2 * CHUNK_BLOCKS
        assert [(s[0], s[1]) for s in rig.settled] == [("a", False)] and CHEAPER in rig.settled[0][2]
        slow_link(rig, 1e12)
        assert isinstance(rig.run("b"), Landed) and rig.is_equal
    finally:
        rig.close()


def slow_link(rig: Rig, bytes_per_s: float) -> None:
    """What the lane takes the link for; a frozen one, so that the sockets' real rate does not count."""
    wire = rig.wire_sender
    wire._chooser.link.begin = wire._chooser.link.end = lambda *_: None  # type: ignore[method-assign]
    wire._chooser.link.bytes_per_s = bytes_per_s


def test_what_is_left_counts_what_was_sent_in_whatever_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that merge while they wait go to the end of the queue: each unit still sees what is really left."""
    rig = Rig(prefill=settings("auto"), decode=settings("auto"))
    try:
        rests: list[Rest] = []
        monkeypatch.setattr(rig.wire_sender, "gives_up", lambda rest, allowed: rests.append(rest) or "")
        is_merged = threading.Event()

        def hold(unit: OutgoingUnit) -> OutgoingUnit:
            assert is_merged.wait(30)
            return unit

        rig.tamper = hold
        rig.expect()
        rig.grant()
        rig.prompt(num_layers=1)
        rig.wait(lambda: len(rig.sent) == 1)
        rig.sender.layers_done(1, 1)
        num_chunks = len(SOURCE) // CHUNK_BLOCKS
        lane = rig.sender._lanes["d0"]
        rig.wait(lambda: sum(job.area.num_layers for job in list(lane._jobs.values())) == 2 * num_chunks - 1)
        is_merged.set()
        rig.wait(lambda: rig.end_of("t"))
        whole = len(SOURCE) * LAYERS * PACKING.block_bytes
        sent = [sum(h.num_bytes for h in rig.sent[:i]) for i in range(len(rig.sent))]
        assert isinstance(rig.end_of("t"), Landed) and rig.is_equal and any(h.num_layers == 2 for h in rig.sent)
        assert [rest.sent_bytes for rest in rests] == sent
        assert [rest.num_bytes for rest in rests] == [whole - done for done in sent]
    finally:
        rig.close()


def test_a_deadline_that_raw_would_miss_reaches_the_choice() -> None:
    """From the plan to the chooser: the same unit goes raw with time to spare."""
    rig = Rig(prefill=settings("auto"), decode=settings("auto"))
    try:
        assert rig.prefill.wire.wait_measured(60.0)
        late: list[bool] = []
        chooser = rig.wire_sender._chooser
        choose = chooser.choose

        def noted(*args: object, **options: object) -> str:
            late.append(bool(args[4]))
            return choose(*args, **options)  # type: ignore[arg-type]

        chooser.choose = noted  # type: ignore[method-assign]
        slow_link(rig, 1e6)
        assert isinstance(rig.run("a", left_s=600.0), Landed) and not any(late)
        assert isinstance(rig.run("b", left_s=0.0), Landed) and late[-1]
    finally:
        rig.close()
