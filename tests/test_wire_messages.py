"""The wire decoder: round trips, golden bytes, and refusal of everything else."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_kit import make_hello, make_pair, make_worker_hello

from pdxfer.core.errors import ProtocolError
from pdxfer.wire.messages import FromMember, Heartbeat, Started
from pdxfer.wire.sockets import is_loopback
from pdxfer.wire.version import MAX_MESSAGE_BYTES, PROTOCOL, Decoder, encode

DECODER: Decoder[FromMember] = Decoder(FromMember)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "message", [make_hello("d0", "decode"), make_worker_hello("d0"), make_pair("r"), Heartbeat(incarnation=1, wall=2.0)]
)
def test_messages_come_back_as_they_were(message: FromMember) -> None:
    """encode then decode is the identity."""
    assert DECODER.decode(encode(message)) == message


def test_golden_bytes() -> None:
    """The bytes of version 6; changing them needs a new PROTOCOL."""
    assert encode(Started(transfer_id="t-1", num_tokens=7)) == bytes([6]) + msgspec.msgpack.encode(
        {"m": "started", "transfer_id": "t-1", "num_tokens": 7, "prefill_id": "", "epoch": 1}
    )


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused_and_nothing_else_happens(data: bytes) -> None:
    """ProtocolError is the only way out."""
    for payload in (data, bytes([PROTOCOL]) + data):
        try:
            DECODER.decode(payload)
        except ProtocolError:
            pass


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
TAGS = st.sampled_from(["hello", "grant", "pair", "stamp", "peer_ready", "nonsense"])
JSON = st.recursive(
    SCALARS | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)


@settings(deadline=None)
@given(TAGS, st.dictionaries(st.text(max_size=12), JSON))
def test_well_formed_msgpack_of_the_wrong_shape_is_refused(tag: str, fields: dict[str, object]) -> None:
    """Types, bounds and unknown fields are checked by the decoder."""
    try:
        DECODER.decode(bytes([PROTOCOL]) + msgspec.msgpack.encode({**fields, "m": tag}))
    except ProtocolError:
        pass


def test_refusals_say_the_values() -> None:
    """Size and version errors name what came and what is spoken here."""
    with pytest.raises(ProtocolError, match=f"{MAX_MESSAGE_BYTES + 1} bytes"):
        DECODER.decode(bytes(MAX_MESSAGE_BYTES + 1))
    with pytest.raises(ProtocolError, match="no message of pdxfer: it begins with b'GET / HTTP/1.1'"):
        DECODER.decode(b"GET / HTTP/1.1")
    with pytest.raises(ProtocolError, match=r"no message of pdxfer: it begins with b'\\x00\\xff"):
        DECODER.decode(b"\x00\xff" * 1000)
    with pytest.raises(ProtocolError, match=f"version 9, this side speaks {PROTOCOL}"):
        DECODER.decode(b"\x09\x80")


@pytest.mark.parametrize("size", [0, -1, 1025, 1 << 40])
def test_an_engine_of_impossible_size_is_refused(size: int) -> None:
    """The router lists the ranks that are missing: a count of 2^40 would take its memory."""
    with pytest.raises(ProtocolError, match="world_size"):
        DECODER.decode(encode(make_hello("d0", "decode", world_size=size)))


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://127.0.0.1:5570", True), ("tcp://localhost:1", True), ("tcp://[::1]:5570", True), ("ipc:///tmp/x", True),
        ("tcp://0.0.0.0:5570", False), ("tcp://*:5570", False), ("tcp://10.0.0.1:5570", False), ("tcp://host:1", False),
    ],
)  # fmt: skip
def test_loopback_is_recognised(endpoint: str, expected: bool) -> None:
    """What only this host can reach needs no keys."""
    assert is_loopback(endpoint) is expected
