"""A decode engine lost in mid-stream: another one goes on with the text, once, or the client is told cleanly."""

import ast
import asyncio
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from proxy_rig import MODEL, Rig, rig

from pdxfer.metrics.catalog import MetricSet
from pdxfer.proxy.body import Parsed, parse
from pdxfer.proxy.replay import DONE, CannotContinue, Continued, Sent, continuation, refusal
from pdxfer.proxy.resume import Resumer
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


async def test_a_stream_that_is_lost_before_its_first_word_goes_on_too() -> None:
    """Its headers were out: the first word had been waited for longer than timeline_hold_s."""
    opened = asyncio.Event()

    async def die_when_opened(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        await opened.wait()
        writer.close()

    server = await asyncio.start_server(die_when_opened, "127.0.0.1", 0)
    async with (
        rig(settings={"timeline_hold_s": 0.01}) as r, server, FakeEngine(FakeEngineSettings(engine_id="d1")) as other
    ):  # fmt: skip
        await r.get("/v1/models")
        r.pairer.decode = EngineRef(engine_id="raw", url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        r.pairer.spare = EngineRef(engine_id="d1", url=other.url)
        async with r.http.post(r.url + "/v1/completions", json=STREAM) as response:
            opened.set()
            data = (await response.read()).decode()
        assert data.count("data: ") == 41 and data.endswith("data: [DONE]\n\n") and "error" not in data
        await r.settled()
        assert r.count("requests_total", endpoint="completions", mode="pair", outcome="ok") == 1
        assert r.count("replays_total") == 1


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


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
async def test_of_a_whole_answer_only_the_usage_can_be_missing(options: dict[str, bool] | None) -> None:
    """And only if it was asked for."""
    request = parsed(STREAM | {"stream_options": options})
    sent = Sent()
    sent.take(b'data: {"id":"a","created":1,"choices":[{"text":"x","finish_reason":"length"}]}\n\n')
    resume = Resumer(None, None, MetricSet("proxy")).resume(SimpleNamespace(avoid=[]), request, "d0")  # type: ignore[arg-type]
    assert resume is not None
    if options and options["include_usage"]:
        with pytest.raises(CannotContinue, match="usage"):
            [events async for events in resume(sent)]
    else:
        assert [events async for events in resume(sent)] == [DONE]


async def test_what_must_not_be_continued_is_not() -> None:
    async with rig() as r, FakeEngine(FakeEngineSettings(engine_id="d1")) as other:
        r.decode.faults.break_after, r.decode.faults.num_times = 3, 1
        r.pairer.spare = EngineRef(engine_id="d1", url=other.url)
        events = await stream(r, "/v1/completions", STREAM | {"stop": ["z"]})
        assert events[-1]["error"]["code"] == "engine_lost" and not other.counts.seen


async def test_a_continuation_that_cannot_be_written_is_an_error_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream has begun: it is too late for a 400."""
    monkeypatch.setattr("pdxfer.proxy.resume.continuation", lambda *args: {"prompt": "\ud800"})
    async with rig() as r, FakeEngine(FakeEngineSettings(engine_id="d1")) as other:
        r.decode.faults.break_after, r.decode.faults.num_times = 3, 1
        r.pairer.spare = EngineRef(engine_id="d1", url=other.url)
        events = await stream(r, "/v1/completions", STREAM)
        assert len(events) == 4 and events[-1]["error"]["code"] == "engine_lost"


LOST: dict[str, Any] = {
    "add_generation_prompt": False, "bad_words": ["x"], "continue_final_message": True, "echo": True,
    "ec_transfer_params": {"a": 1}, "frequency_penalty": 0.5, "include_reasoning": False, "logprobs": 0,
    "min_tokens": 1, "n": 2, "presence_penalty": 0.5, "prompt_embeds": "x", "prompt_logprobs": 0,
    "repetition_detection": {"max_pattern_size": 4}, "repetition_penalty": 1.1, "response_format": {"type": "text"},
    "return_token_ids": True, "seed": 0, "stop": "x", "stop_token_ids": [3], "stream_interval": 2,
    "structured_outputs": {"regex": "x"}, "suffix": "x", "thinking_token_budget": 0, "tools": [{}],
    "truncate_prompt_tokens": 0, "use_beam_search": True, "vllm_xargs": {"a": 1},
}  # fmt: skip
"""Fields of vLLM's requests that can forbid a continuation, each with a value that does."""
CONTINUED = set(
    # the prompt, and what is made of it: the second engine makes the same of it
    "model messages prompt add_special_tokens cache_salt chat_template chat_template_kwargs documents media_io_kwargs "
    "mm_processor_kwargs reasoning_effort "
    # a token is chosen by what precedes it, prompt or not (the watermark is weaker for a few tokens)
    "temperature top_p top_k min_p logit_bias allowed_token_ids watermarking "
    # how the text is written and how long it gets; special tokens that it leaves out are lost, whatever was asked for
    "max_tokens max_completion_tokens ignore_eos skip_special_tokens spaces_between_special_tokens stream "
    "stream_options "
    # only together with tools, stop, logprobs, truncate_prompt_tokens or beams
    "tool_choice parallel_tool_calls include_stop_str_in_output top_logprobs logprob_token_ids "
    "return_tokens_as_token_ids truncation_side length_penalty "
    # the proxy's own
    "kv_transfer_params "
    # in the first event (which is passed on once), in no stream, or nowhere in the answer
    "return_prompt_text routed_experts_prompt_start return_token_offsets mm_payload return_mm_kwargs priority "
    "request_id session_id user".split()
)
"""Fields of vLLM's requests with which a continuation is right."""
VLLM = importlib.util.find_spec("vllm")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""), ({"stream": False}, "not a stream"), ({"presence_penalty": 0}, ""), ({"seed": 0}, ""),
        ({"repetition_penalty": 1.0}, ""), ({"include_reasoning": True}, ""), ({"logprobs": None}, ""),
        ({"thinking_token_budget": -1}, ""), ({"tools": []}, ""),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        *(({name: value, "temperature": 0.5}, name.removeprefix("use_")) for name, value in LOST.items()),
    ],
)  # fmt: skip
def test_reasons(change: dict[str, Any], reason: str) -> None:
    """A continuation is asked for only where it is what one engine would have said."""
    assert refusal(parsed(STREAM | change)) == reason


def test_a_chat_without_logprobs_is_continued() -> None:
    assert (
        refusal(parsed(CHAT | {"logprobs": False})) == "" and refusal(parsed(CHAT | {"logprobs": True})) == "logprobs"
    )


@pytest.mark.skipif(VLLM is None, reason="vLLM is not installed")
@pytest.mark.parametrize("name", ["completion.CompletionRequest", "chat_completion.ChatCompletionRequest"])
def test_every_field_of_vllms_requests_is_known(name: str) -> None:
    """A new one may have a state that is lost with the engine: look at it, then name it here or in replay.py."""
    assert VLLM is not None and VLLM.origin is not None
    package, _, wanted = name.partition(".")
    source = Path(VLLM.origin).parent / "entrypoints/openai" / package / "protocol.py"
    [request] = [node for node in ast.parse(source.read_text()).body if getattr(node, "name", "") == wanted]
    fields = [node.target for node in request.body if isinstance(node, ast.AnnAssign)]
    names = {field.id for field in fields if isinstance(field, ast.Name) and not field.id.startswith("_")}
    assert "temperature" in names and names - LOST.keys() - CONTINUED == set()


@pytest.mark.parametrize("change", [{"max_tokens": None}, {}])
def test_a_completion_without_a_limit_keeps_vllms(change: dict[str, Any]) -> None:
    body = {key: value for key, value in STREAM.items() if key != "max_tokens"} | change
    assert continuation(parsed(body), "abc", [1, 2, 3])["max_tokens"] == 13


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


@pytest.mark.parametrize(
    "event",
    [b"data: {\n\n", b'data: {"error": {"message": "x"}}\n\n', b'data: {"choices":[{"delta":{"tool_calls":[1]}}]}\n\n'],
)
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
