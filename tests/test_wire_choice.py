"""The chooser: raw wherever it is fastest, a codec where the link is the slowest part; rates are learnt."""

import pytest

from pdxfer.config.schema import TransportConfig
from pdxfer.node import wire_choice
from pdxfer.node.wire_choice import MIN_BYTES, RAW, Chooser, LinkRate, Rates
from pdxfer.node.wire_settings import WireSettings, split, wire_settings
from pdxfer.transport.kinds import DEFAULT, preferred

CHUNK = 6 << 20
ALLOWED = ("lossless", "int8", "klt:3")


def chooser(link_bytes_per_s: float, fixed: str = "") -> Chooser:
    rates = {
        "lossless": Rates(ratio=1.4, encode=3e9, decode=5e9),
        "int8": Rates(ratio=1.9, encode=2e9, decode=3e9),
        "klt:3": Rates(ratio=6.0, encode=0.08e9, decode=0.4e9),
    }
    found = Chooser(rates, fixed)
    found.link.bytes_per_s = link_bytes_per_s
    return found


@pytest.mark.parametrize(
    ("gbit", "allowed", "expected"),
    [
        (0.1, ALLOWED, "klt:3"),
        (1, ALLOWED, "int8"),
        (1, ("lossless",), "lossless"),
        (2.5, ALLOWED, "int8"),
        (25, ALLOWED, RAW),
        (100, ALLOWED, RAW),
        (1, (), RAW),
    ],
)
def test_the_faster_the_link_the_lighter_the_codec(gbit: float, allowed: tuple[str, ...], expected: str) -> None:
    assert chooser(gbit / 8 * 1e9).choose(allowed, CHUNK, 4, is_last=False) == expected


def test_the_last_unit_pays_for_all_steps() -> None:
    """A heavy codec hides its encoding behind the sending of the unit before; the last unit hides nothing."""
    slow = chooser(0.014e9)
    assert slow.choose(("klt:3",), CHUNK, 4, is_last=False) == "klt:3"
    quick = chooser(0.125e9)
    assert quick.choose(("klt:3",), CHUNK, 4, is_last=True) == RAW


def test_without_credit_rate_or_size_everything_is_raw() -> None:
    assert chooser(1e8).choose(ALLOWED, CHUNK, 0, is_last=False) == RAW
    assert chooser(0.0).choose(ALLOWED, CHUNK, 4, is_last=False) == RAW
    assert chooser(1e8).choose(ALLOWED, MIN_BYTES - 1, 4, is_last=False) == RAW
    assert chooser(1e8).choose(("unknown",), CHUNK, 4, is_last=False) == RAW


def test_a_fixed_codec_is_used_whenever_it_is_allowed_and_there_is_a_slot() -> None:
    fixed = chooser(0.0, fixed="int8")
    assert fixed.choose(("int8",), 100, 1, is_last=True) == "int8"
    assert fixed.choose((), 100, 1, is_last=True) == RAW
    fixed.forbid("int8")
    assert fixed.choose(("int8",), 100, 1, is_last=True) == RAW


def test_a_codec_that_turns_out_slow_is_left_and_tried_again_later() -> None:
    """The machine was busy: rates drift back while the codec is not used."""
    one = chooser(0.125e9)
    assert one.choose(("int8",), CHUNK, 4, is_last=False) == "int8"
    for _ in range(20):
        one.decoded("int8", 5e7)
    assert one.choose(("int8",), CHUNK, 4, is_last=False) == RAW
    again = [one.choose(("int8",), CHUNK, 4, is_last=False) for _ in range(200)]
    assert again[-1] == "int8" or "int8" in again


def test_what_was_encoded_counts_for_the_next_choice() -> None:
    """Incompressible values: the ratio is learnt, and raw wins."""
    one = chooser(0.125e9)
    for _ in range(20):
        one.encoded("lossless", CHUNK, CHUNK, 0.002)
    assert one.choose(("lossless",), CHUNK, 4, is_last=False) == RAW


def test_a_busy_link_is_measured() -> None:
    """Bytes that the kernel still holds: what has left in between is the link's rate."""
    link, now, written = LinkRate(), 0.0, 0
    for _ in range(10):
        link.begin(now, written, min(written, 2 << 20))
        now, written = now + CHUNK / 125e6, written + CHUNK
        link.end(now, written, 2 << 20)
    assert link.bytes_per_s == pytest.approx(125e6, rel=0.1)


def test_an_idle_link_only_raises_the_estimate() -> None:
    link = LinkRate()
    link.begin(0.0, 0, 0)
    link.end(0.001, CHUNK, 0)
    fast = link.bytes_per_s
    assert fast == pytest.approx(CHUNK / 0.001)
    link.begin(10.0, CHUNK, 0)
    link.end(10.5, 2 * CHUNK, 0)
    assert link.bytes_per_s == fast


def test_a_link_that_gets_slow_is_noticed() -> None:
    link = LinkRate()
    link.begin(0.0, 0, 0)
    link.end(0.001, CHUNK, 0)
    now, written = 1.0, CHUNK
    for _ in range(30):
        link.begin(now, written, 1 << 20)
        now, written = now + CHUNK / 125e6, written + CHUNK
        link.end(now, written, 1 << 20)
    assert link.bytes_per_s < 200e6


def test_a_receiver_that_stalls_now_and_then_does_not_make_a_fast_link_slow() -> None:
    link, now, written = LinkRate(), 0.0, 0
    for number in range(40):
        link.begin(now, written, 1 << 20 if number else 0)
        now, written = now + CHUNK / (5e7 if number % 3 else 2e9), written + CHUNK
        link.end(now, written, 1 << 20)
    assert link.bytes_per_s > 1e9


def test_a_peers_rate_may_come_while_ours_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that measures adds codecs while a lane learns."""
    rates = {"lossless": Rates(ratio=1.4, encode=3e9, decode=5e9)}

    def meanwhile(entry: str) -> tuple[str, int]:
        rates[f"new{len(rates)}"] = Rates(ratio=1.0, encode=1e9, decode=1e9)
        return split(entry)

    monkeypatch.setattr(wire_choice, "split", meanwhile)
    Chooser(rates).decoded("lossless", 1e9)
    assert rates["lossless"].decode < 5e9


def test_codecs_change_the_default_order_of_channels_only() -> None:
    """Same host first in any case; RDMA is better than any codec; an order of the user's own stays."""
    assert list(DEFAULT) == TransportConfig().channels
    assert preferred(DEFAULT, has_wire=True, has_rdma=False) == ("local", "tcp", "nixl")
    assert preferred(DEFAULT, has_wire=True, has_rdma=True) == DEFAULT
    assert preferred(DEFAULT, has_wire=False, has_rdma=False) == DEFAULT
    assert preferred(["nixl", "tcp"], has_wire=True, has_rdma=False) == ("nixl", "tcp")


def test_entries_name_a_level_or_none() -> None:
    assert [split(e) for e in ("int8", "klt:3", "my.codec:Class")] == [("int8", 0), ("klt", 3), ("my.codec:Class", 0)]


def test_allow_lists_of_model_and_tenant_replace_the_default() -> None:
    from pdxfer.codec.registry import Codecs
    from pdxfer.config.store import CodecConfig

    def made(**fields: object) -> WireSettings | None:
        return wire_settings(CodecConfig(**fields), "m", Codecs(), None, "bfloat16")  # type: ignore[arg-type]

    assert made() is None
    auto = made(wire="auto", tenants={"a": ["int8"], "b": []})
    assert auto is not None and auto.allowed("") == ("lossless",)
    assert auto.allowed("a") == ("int8",) and auto.allowed("b") == () and auto.entries == ["int8", "lossless"]
    fixed = made(wire="int8", tenants={"exact": ["lossless"]})
    assert fixed is not None and fixed.allowed("") == ("int8",) and fixed.allowed("exact") == ()
    other = made(wire="auto", models={"m": []})
    assert other is not None and other.allowed("") == ()
