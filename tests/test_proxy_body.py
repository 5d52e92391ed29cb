"""Bodies: what is refused, what can be paired, and what each leg is sent."""

import json
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdxfer.metrics.catalog import FALLBACKS
from pdxfer.proxy.body import Endpoint, Parsed, decode_body, encode, parse, prefill_body
from pdxfer.proxy.errors import ApiError

CHAT = [{"role": "user", "content": "hello there"}]


def parsed(endpoint: Endpoint = "completions", **body: Any) -> Parsed:
    body = {"prompt": "hello"} | body if endpoint == "completions" else {"messages": CHAT} | body
    return parse(endpoint, json.dumps(body).encode(), lambda name: name)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b"{'a': 1}",
        b'{"a": NaN}',
        b"[" * 100_000,
        b'{"prompt": 1e999}',
    ],
    ids=str,
)
def test_a_body_that_is_no_json_object_is_refused_with_400(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse("completions", data, lambda name: name)
    assert caught.value.status == 400 and caught.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 7), ("model", ["fake"]), ("stream", "yes"), ("stream", 1), ("max_tokens", "many"),
        ("max_tokens", 1.5), ("n", True), ("n", "two"), ("best_of", {}), ("prompt", None), ("prompt", 5),
        ("prompt", []), ("prompt", [[]]), ("prompt", [-1]), ("prompt", [True]), ("prompt", ["a", 1]),
        ("prompt", {"text": "a"}),
    ],
)  # fmt: skip
def test_a_wrong_type_is_refused_naming_the_field(field: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(**{field: value})
    assert (caught.value.status, caught.value.param) == (400, field)
    assert f"'{field}'" in caught.value.message and "send" in caught.value.message


@pytest.mark.parametrize("messages", [None, [], "hi", {}, ["hi"], [1], [CHAT[0], "hi"]])
def test_wrong_messages_are_refused(messages: Any) -> None:
    with pytest.raises(ApiError) as caught:
        parsed("chat", messages=messages)
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, ""),
        ({"prompt": [1, 2, 3]}, ""),
        ({"prompt": ["one"]}, ""),
        ({"prompt": [[1, 2]]}, ""),
        ({"n": 1, "best_of": 1, "echo": False, "prompt_logprobs": None, "use_beam_search": False}, ""),
        ({"prompt": ["one", "two"]}, "prompt_list"),
        ({"prompt": [[1], [2]]}, "prompt_list"),
        ({"prompt": None, "prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"use_beam_search": True}, "beam_search"),
    ],
)
def test_only_a_single_prompt_with_a_single_answer_is_paired(body: dict[str, Any], reason: str) -> None:
    assert parsed(**body).local_reason == reason
    assert reason in ("", *FALLBACKS)


def test_a_batch_of_conversations_is_not_paired() -> None:
    assert parsed("chat", messages=[CHAT, CHAT]).local_reason == "prompt_list"


def test_tokens_are_counted_or_estimated() -> None:
    assert parsed(prompt=[5] * 77).num_tokens == 77
    assert parsed(prompt="x" * 400).num_tokens == 100
    assert parsed(prompt="\u6f22\u5b57" * 200).num_tokens == 300, "about a token a character"
    parts = [{"role": "user", "content": [{"type": "text", "text": "y" * 80}, {"type": "image_url"}]}]
    assert parsed("chat", messages=parts).num_tokens == 20


def test_the_prefill_leg_asks_for_one_token_and_nothing_else() -> None:
    body = parsed(
        "chat", model="m", stream=True, stream_options={"include_usage": True}, max_tokens=50, max_completion_tokens=60,
        min_tokens=5, logprobs=True, top_logprobs=3, tools=[{"type": "function"}], cache_salt="s", n=1,
    )  # fmt: skip
    leg = prefill_body(body, {"transfer_id": "t-1", "deadline_s": 9})
    assert leg == {
        "model": "m",
        "messages": CHAT,
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "n": 1,
        "tools": [{"type": "function"}],
        "cache_salt": "s",
        "kv_transfer_params": {"pdxfer": {"transfer_id": "t-1", "deadline_s": 9, "leg": "prefill"}},
    }
    assert "max_completion_tokens" not in prefill_body(parsed(), {})


def test_the_decode_leg_is_the_original_with_our_transfer() -> None:
    """What the client sends as kv_transfer_params reaches no engine."""
    body = parsed(stream=True, max_tokens=50, temperature=0.1, kv_transfer_params={"pdxfer": {"transfer_id": "evil"}})
    assert decode_body(body, {"transfer_id": "t-1"}) == {
        "prompt": "hello",
        "stream": True,
        "max_tokens": 50,
        "temperature": 0.1,
        "kv_transfer_params": {"pdxfer": {"transfer_id": "t-1", "leg": "decode"}},
    }
    assert "kv_transfer_params" not in body.json


def test_an_alias_becomes_the_served_name() -> None:
    body = parse("completions", b'{"model":"small","prompt":"a"}', {"small": "big/model"}.__getitem__)
    assert body.model == body.json["model"] == "big/model"


IS_FULL = os.environ.get("PDXFER_TIER") == "full"
steady = settings(max_examples=20_000 if IS_FULL else 100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine must not fail a test."""
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
fields = st.sampled_from(["model", "prompt", "messages", "stream", "n", "best_of", "max_tokens", "echo", "junk"])


@steady
@given(st.sampled_from(["completions", "chat"]), st.dictionaries(fields, json_values, max_size=6))
def test_any_json_is_parsed_or_refused_with_400(endpoint: Endpoint, body: dict[str, Any]) -> None:
    """Nothing else is ever raised, and what is accepted can be sent on."""
    try:
        result = parse(endpoint, json.dumps(body).encode(), lambda name: name)
    except ApiError as error:
        assert error.status == 400
        return
    assert encode(prefill_body(result, {})) and encode(decode_body(result, {}))
    assert result.num_tokens >= 0


@steady
@given(st.sampled_from(["completions", "chat"]), st.binary(max_size=64))
def test_any_bytes_are_parsed_or_refused_with_400(endpoint: Endpoint, data: bytes) -> None:
    try:
        parse(endpoint, data, lambda name: name)
    except ApiError as error:
        assert error.status == 400
