"""Fuzz of what strangers can send: every control message mutated, into the decoders and into the router's state, and
the proxy's bodies. Nothing crashes, nothing grows without a bound. tests/run.sh full runs the large counts.
"""

import os
import random
import resource
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_kit import make_hello, make_worker_hello

from pdxfer.core.errors import ProtocolError
from pdxfer.proxy.body import decode_body, encode, keep_apart, parse, prefill_body
from pdxfer.proxy.errors import ApiError
from pdxfer.router.events import Received, Tick
from pdxfer.router.settings import RouterSettings
from pdxfer.router.state import RouterState
from pdxfer.store.peer import wire
from pdxfer.wire.halves import ToScheduler, ToWorker
from pdxfer.wire.messages import FromMember, FromRouter, Heartbeat, PeerReady, Role
from pdxfer.wire.version import PROTOCOL, Decoder

IS_FULL = os.environ.get("PDXFER_TIER") == "full"
ROUNDS = 20_000 if IS_FULL else 300
"""Mutations of each message type."""
EXAMPLES = 20_000 if IS_FULL else 300
UNIONS: dict[str, Any] = {
    "member": FromMember, "router": FromRouter, "worker": ToWorker, "scheduler": ToScheduler, "question": wire.Question,
    "answer": wire.Answer,
}  # fmt: skip
ENGINES: dict[str, Role] = {"p0": "prefill", "d0": "decode"}
ROUTES = [
    b"p0/sched#1", b"p0/w0#2", b"d0/sched#3", b"d0/w0#4", b"proxy/x#5", b"proxy/y#6", b"nobody", b"\xff/\xff#\xff",
]  # fmt: skip
MAX_GROWTH = 64 << 20
"""Bytes of resident memory that a decoder may ever add, whatever lengths a message claims."""


def sample(shape: msgspec.inspect.Type, rng: random.Random) -> Any:
    """A value of a type that the decoder accepts, as builtins."""
    match shape:
        case msgspec.inspect.StructType(fields=fields, tag_field=tag_field, tag=tag):
            made = {field.encode_name: sample(field.type, rng) for field in fields}
            return made if tag_field is None else {tag_field: tag, **made}
        case msgspec.inspect.LiteralType(values=values):
            return rng.choice(values)
        case msgspec.inspect.ListType(item_type=item) | msgspec.inspect.VarTupleType(item_type=item):
            least = getattr(shape, "min_length", None) or 0
            return [sample(item, rng) for _ in range(max(least, rng.randrange(3)))]
        case msgspec.inspect.TupleType(item_types=items):
            return [sample(item, rng) for item in items]
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return {sample(key, rng): sample(value, rng) for _ in range(rng.randrange(3))}
        case msgspec.inspect.UnionType(types=types):
            return sample(rng.choice(types), rng)
        case msgspec.inspect.StrType():
            return rng.choice(["p0", "d0", "x", "t-0123456789abcdef", "demo"])
        case msgspec.inspect.BytesType():
            return bytes(shape.min_length or rng.randrange(40))
        case msgspec.inspect.BoolType():
            return rng.random() < 0.5
        case msgspec.inspect.IntType():
            return rng.choice([1, 1, 2, 16, 1000])
        case msgspec.inspect.FloatType():
            return rng.choice([0.0, 1.5, 1e9])
        case msgspec.inspect.NoneType():
            return None
    raise AssertionError(f"no sample for {shape}")


def messages(union: Any) -> list[msgspec.inspect.StructType]:
    """All message types of a union."""
    info = msgspec.inspect.type_info(union)
    assert isinstance(info, msgspec.inspect.UnionType)
    assert all(isinstance(shape, msgspec.inspect.StructType) for shape in info.types)
    return list(info.types)  # type: ignore[arg-type]


ODD = [
    None, True, -1, 0, 2**63 - 1, -(2**63), 2**64 - 1, float("nan"), float("inf"), -1e308, "", "x" * 5000, "\0",
    "../../x", b"\xff" * 300, [], [[]], {}, {"m": "hello"}, ["x"] * 300, list(range(3000)),
]  # fmt: skip
CLAIMS = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 400]
"""Array, map and bytes of 4 Gi entries, and deep nesting."""


def mutated(message: dict[str, Any], rng: random.Random) -> bytes:
    """One message, wrong in one way: an odd value, a lost or foreign field, bytes flipped, cut, joined or inserted."""
    kind = rng.randrange(7)
    if kind <= 1 and message:
        message = message | {rng.choice(list(message)): rng.choice(ODD)}
    elif kind == 2 and message:
        message.pop(rng.choice(list(message)))
    elif kind == 3:
        message = message | {rng.choice(["", "m", "extra", "engine_id"]): rng.choice(ODD)}
    data = bytearray(bytes([PROTOCOL]) + msgspec.msgpack.encode(message))
    if kind == 4:
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == 5:
        del data[rng.randrange(len(data)) :]
    elif kind == 6:
        at = rng.randrange(len(data))
        data[at:at] = rng.choice(CLAIMS)
    return bytes(data)


@pytest.mark.parametrize("name", UNIONS)
def test_every_message_type_mutated_is_decoded_or_refused(name: str) -> None:
    """ProtocolError is the only way out, and lengths that a message claims are not believed."""
    decoder: Decoder[Any] = Decoder(UNIONS[name])
    rng = random.Random(20261129)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_good = num_bad = 0
    for shape in messages(UNIONS[name]):
        decoder.decode(bytes([PROTOCOL]) + msgspec.msgpack.encode(sample(shape, rng)))
        for _ in range(ROUNDS):
            try:
                decoder.decode(mutated(sample(shape, rng), rng))
                num_good += 1
            except ProtocolError:
                num_bad += 1
    assert num_bad > num_good // 10 and num_good > 0
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_GROWTH


def join(state: RouterState, now: float) -> None:
    """Both engines are there again, as often as a fuzzed Goodbye or Hello has thrown them out."""
    lives = {one: state.cluster.engines[one].incarnation if one in state.cluster.engines else 1 for one in ENGINES}
    for number, (engine_id, role) in enumerate(ENGINES.items()):
        sched, worker = ROUTES[2 * number], ROUTES[2 * number + 1]
        life = lives[engine_id]
        said: list[tuple[bytes, Any]] = [
            (sched, make_hello(engine_id, role, incarnation=life)),
            (worker, make_worker_hello(engine_id, incarnation=life)),
        ]
        for peer in ENGINES.keys() - {engine_id}:
            said.append((worker, PeerReady(engine_id=peer, incarnation=lives[peer], kind="tcp")))
        said += [(route, Heartbeat(incarnation=life, wall=1e9 + now)) for route in (sched, worker)]
        for route, message in said:
            state.handle(Received(route, message, 1e9 + now), now)


def test_the_router_survives_every_message_that_decodes() -> None:
    """Well-formed nonsense from members, strangers and proxies in any order: handled or counted, never an exception;
    what the router keeps stays within its bounds."""
    decoder: Decoder[Any] = Decoder(FromMember)  # type: ignore[arg-type]
    rng = random.Random(7)
    state = RouterState(RouterSettings(max_queue=16, min_remote_tokens=1), secret=b"s" * 32)
    shapes = messages(FromMember)
    now, num_handled = 0.0, 0
    for number in range(ROUNDS * len(shapes)):
        message = sample(rng.choice(shapes), rng)
        live = [lease.transfer_id for lease in state.leases.of_engine("d0")]
        route = rng.choice(ROUTES)
        if "transfer_id" in message and live:
            message["transfer_id"] = rng.choice(live)
        elif "deadline_s" in message:
            message |= {"request_id": f"r{number}", "model": rng.choice(["", "demo"]), "num_tokens": 40, "avoid": []}
            route = rng.choice(ROUTES[4:6])
        data = bytes([PROTOCOL]) + msgspec.msgpack.encode(message) if rng.random() < 0.6 else mutated(message, rng)
        try:
            decoded = decoder.decode(data)
        except ProtocolError:
            continue
        now += rng.random() * 0.01
        state.handle(Received(route, decoded, 1e9 + now), now)
        num_handled += 1
        if number % 20 == 0:
            state.handle(Tick(), now)
            join(state, now)
    assert num_handled > ROUNDS * len(shapes) // 2
    assert state.out.counts["answers", "pairing"] > ROUNDS // 10, state.out.counts
    assert len(state.cluster.engines) <= len(ROUTES) and len(state.cluster.proxies) <= len(ROUTES)
    assert len(state.placement.queue) <= 16
    state.snapshot(now)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    ["model", "prompt", "messages", "stream", "max_tokens", "n", "cache_salt", "kv_transfer_params", "stream_options"]
)
TRANSFER = {"transfer_id": "t-0123456789abcdef", "deadline_s": 1.0}


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None)
@given(st.sampled_from(["completions", "chat"]), st.dictionaries(FIELDS | st.text(max_size=8), JSON, max_size=8))
def test_bodies_are_refused_with_400_or_written_for_both_legs(endpoint: Any, fields: dict[str, Any]) -> None:
    """ApiError 400 is the only way out; what the legs are sent has the proxy's transfer, never the client's."""
    start = {"prompt": [1, 2]} if endpoint == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    try:
        data = msgspec.json.encode(start | fields)
    except UnicodeEncodeError:
        return
    try:
        parsed = parse(endpoint, data, lambda name: name)
        keep_apart(parsed.json, "tenant")
        for leg in (prefill_body(parsed, dict(TRANSFER)), decode_body(parsed, dict(TRANSFER))):
            sent = msgspec.json.decode(encode(leg))
            assert sent["kv_transfer_params"]["pdxfer"].items() >= TRANSFER.items()
            assert len(sent["cache_salt"]) == 64
    except ApiError as error:
        assert error.status == 400


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 60))
def test_bytes_that_are_no_body_are_refused_with_400(junk: bytes, at: int) -> None:
    good = b'{"model": "m", "prompt": "words words", "stream": true, "max_tokens": 8}'
    for data in (junk, good[:at] + junk + good[at:]):
        try:
            encode(parse("completions", data, lambda name: name).json)
        except ApiError as error:
            assert error.status == 400
