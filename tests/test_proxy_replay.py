"""A decode engine lost in mid-stream: another one goes on with the text, once, or the client is told cleanly."""

import json
from typing import Any

import pytest
from proxy_rig import MODEL, Rig, rig

from pdxfer.proxy.body import Parsed, parse
from pdxfer.proxy.replay import CannotContinue, Continued, Sent, continuation, refusal
from pdxfer.testing.fake_engine import FakeEngine, FakeEngineSettings
from pdxfer.testing.fake_model import tokenize
from pdxfer.wire.messages import EngineRef

IDS = list(range(1000, 1600))
STREAM = {"model": MODEL, "prompt": IDS, "max_tokens": 40, "stream": True, "temperature": 0}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "words " * 300}], "max_tokens": 40, "stream": True}


def parsed(body: dict[str, Any]) -> Parsed:
    return parse("chat" if "messages" in body else "completions", json.dumps(body).encode(), lambda name: name)


async def stream(r: Rig, path: str, body: dict[str, Any]) -> list[Any]:
    """Events of a stream, decoded; [DONE] as text."""
    async with r.http.post(r.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        data = (await response.read()).decode()
    events = [line.removeprefix("data: ") for line in data.split("\n\n") if line]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


@pytest.mark.parametrize("number", range(1, 8))
async def test_another_engine_finishes_a_completion(number: int) -> None:
    """However many tokens were out: the second engine gets prompt and text so far, and may write only the rest."""
    async with rig() as r, FakeEngine(FakeEngineSettings(engine_id="d1")) as other:
        r.decode.faults.break_after, r.decode.faults.num_times = number, 1
        r.pairer.spare = EngineRef(engine_id="d1", url=other.url)
        body = STREAM | {"stream_options": {"include_usage": True}}
        events = await stream(r, "/v1/completions", body)
        asked = [json.loads(seen.body) for seen in other.counts.seen if seen.path == "/v1/completions"]
        seen = tokenize("".join(e["choices"][0]["text"] for e in events[:number]))
        assert len(asked) == 1 and asked[0]["prompt"] == IDS + seen and asked[0]["max_tokens"] == 40 - len(seen)
        assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
        assert len([e for e in events[:-1] if e["choices"]]) == number + 40 - len(seen)
        assert len({e["id"] for e in events[:-1]}) == 1
        usage = [e["usage"] for e in events[:-1] if e.get("usage")]
        assert [(u["prompt_tokens"], u["completion_tokens"]) for u in usage] == [(600, 40)]
        assert r.count("replays_total") == 1


async def test_another_engine_finishes_a_chat() -> None:
    async with rig() as r, FakeEngine(FakeEngineSettings(engine_id="d1")) as other:
        r.decode.faults.break_after, r.decode.faults.num_times = 3, 1
        r.pairer.spare = EngineRef(engine_id="d1", url=other.url)
        events = await stream(r, "/v1/chat/completions", CHAT)
        [asked] = [json.loads(seen.body) for seen in other.counts.seen if seen.path == "/v1/chat/completions"]
        text = "".join(e["choices"][0]["delta"]["content"] for e in events[:3])
        assert asked["messages"][-1] == {"role": "assistant", "content": text}
        assert asked["continue_final_message"] and not asked["add_generation_prompt"]
        assert asked["max_tokens"] == 40 - len(tokenize(text))
        assert events[-1] == "[DONE]" and "error" not in events[-2]


async def test_a_second_loss_is_an_error_event() -> None:
    """Once: the client is told, and the stream ends."""
    async with rig() as r, FakeEngine(FakeEngineSettings(engine_id="d1")) as other:
        r.decode.faults.break_after = other.faults.break_after = 3
        r.pairer.spare = EngineRef(engine_id="d1", url=other.url)
        events = await stream(r, "/v1/completions", STREAM)
        assert len(events) == 7 and events[-1]["error"]["code"] == "engine_lost"


async def test_without_another_engine_it_is_an_error_event() -> None:
    async with rig() as r:
        r.decode.faults.break_after, r.decode.faults.num_times = 3, 1
        events = await stream(r, "/v1/completions", STREAM)
        assert len(events) == 4 and events[-1]["error"]["code"] == "engine_lost"
        assert len(r.decode.counts.seen) == 1, "the lost engine was asked again"


async def test_what_must_not_be_continued_is_not() -> None:
    async with rig() as r, FakeEngine(FakeEngineSettings(engine_id="d1")) as other:
        r.decode.faults.break_after, r.decode.faults.num_times = 3, 1
        r.pairer.spare = EngineRef(engine_id="d1", url=other.url)
        events = await stream(r, "/v1/completions", STREAM | {"stop": ["z"]})
        assert events[-1]["error"]["code"] == "engine_lost" and not other.counts.seen


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""), ({"stream": False}, "not a stream"), ({"n": 2}, "n"), ({"stop": "x"}, "stop"), ({"logprobs": 1}, ""),
        ({"presence_penalty": 0.5}, "presence_penalty"), ({"presence_penalty": 0}, ""), ({"seed": 0}, ""),
        ({"seed": 0, "temperature": 0.5}, "seed"), ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"repetition_penalty": 1.0}, ""), ({"echo": True}, "echo"),
    ],
)  # fmt: skip
def test_reasons(change: dict[str, Any], reason: str) -> None:
    """A continuation is asked for only where it is what one engine would have said."""
    assert refusal(parsed(STREAM | change)) == reason


def test_the_client_sees_whole_events_only() -> None:
    sent = Sent()
    assert sent.take(b'data: {"choices": []}\n') == b"" and sent.take(b"\ndata: {") == b'data: {"choices": []}\n\n'
    assert sent.rest == b"data: {" and sent.account().text == ""


def test_a_long_answer_is_passed_on_and_not_kept() -> None:
    sent, got = Sent(), 0
    for _ in range(80):
        got += len(sent.take(b"x" * 65536))
    assert got == 80 * 65536 and sent.rest == b""
    with pytest.raises(CannotContinue, match="longer"):
        sent.account()


@pytest.mark.parametrize("event", [b"data: {\n\n", b'data: {"choices":[{"delta":{"tool_calls":[1]}}]}\n\n'])
def test_what_cannot_be_handed_back_is_not_continued(event: bytes) -> None:
    sent = Sent()
    sent.take(event)
    with pytest.raises(CannotContinue):
        sent.account()


def test_an_opening_without_text_is_asked_for_anew() -> None:
    """Lost after the role and before the first word: the same conversation, nothing is dropped."""
    sent = Sent()
    sent.take(b'data: {"id":"a","created":1,"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n')
    account = sent.account()
    assert continuation(parsed(CHAT), account.text, [])["messages"] == CHAT["messages"]
    with pytest.raises(CannotContinue, match="second engine"):
        Continued(account, 0).take(b'data: {"error": {"message": "no"}}\n\n')


async def test_tenants_have_prefixes_of_their_own() -> None:
    """Two keys, one prompt: the engines see different salts; a client's own salt still tells its parts apart."""
    settings = {"api_keys": {"k1": "red", "k2": "red", "k3": "blue"}}
    async with rig(settings=settings) as r:

        async def salt(key: str, **more: Any) -> str:
            headers = {"Authorization": f"Bearer {key}"}
            status, _, _ = await r.post("/v1/completions", STREAM | {"stream": False} | more, headers)
            assert status == 200
            return str(json.loads(r.decode.counts.seen[-1].body)["cache_salt"])

        red, also_red, blue = await salt("k1"), await salt("k2"), await salt("k3")
        assert red == also_red != blue
        assert len({red, blue, await salt("k1", cache_salt="a"), await salt("k3", cache_salt="a")}) == 4
        assert await salt("k1", cache_salt=blue) != blue
        legs = [json.loads(side.counts.seen[-1].body) for side in (r.prefill, r.decode)]
        assert legs[0]["cache_salt"] == legs[1]["cache_salt"]
        assert [leg["kv_transfer_params"]["pdxfer"]["tenant"] for leg in legs] == ["red", "red"]
