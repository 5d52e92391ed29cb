"""Every kind of request works through the pair, or falls back to plain decode: never a wrong answer."""

import json

import pytest

from pdxfer.bench.texts import Prompts
from tests.e2e.engines import PairUrls, complete, post

pytestmark = pytest.mark.vllm


def text_prompt(repeats: int = 40) -> str:
    return "The lighthouse keeper wrote in his journal every evening about the sea. " * repeats


async def same(pair: PairUrls, path: str, body: dict, mode: str) -> None:  # type: ignore[type-arg]
    """The proxy's answer has the content of the decode engine's own."""
    through = await post(pair.proxy, path, {**body, "cache_salt": f"{body.get('cache_salt', '')}-pair"})
    alone = await post(pair.decode, path, {**body, "cache_salt": f"{body.get('cache_salt', '')}-alone"})
    assert through.status == alone.status == 200, (through.body, alone.body)
    assert through.mode == mode, through.timeline

    def strip(body: dict) -> list:  # type: ignore[type-arg]
        keep = ("text", "message", "logprobs", "finish_reason", "prompt_logprobs")
        choices = [{k: c.get(k) for k in keep} for c in body["choices"]]
        return json.loads(json.dumps(choices), parse_float=lambda x: round(float(x), 3))  # type: ignore[no-any-return]

    assert strip(through.body) == strip(alone.body)
    assert through.body["usage"]["prompt_tokens"] == alone.body["usage"]["prompt_tokens"]
    assert through.body["usage"]["completion_tokens"] == alone.body["usage"]["completion_tokens"]


BASE = {"model": "demo", "max_tokens": 8, "temperature": 0}
KINDS = {
    "text prompt": ({"prompt": text_prompt()}, "pair"),
    "logprobs": ({"prompt": text_prompt(41), "logprobs": 3}, "pair"),
    "cache salt": ({"prompt": text_prompt(42), "cache_salt": "tenant-a"}, "pair"),
    "seed and sampling": ({"prompt": text_prompt(43), "temperature": 0.7, "seed": 7}, "pair"),
    "min_tokens and stop": ({"prompt": text_prompt(44), "min_tokens": 4, "stop": ["zzz"]}, "pair"),
    "n of 2": ({"prompt": text_prompt(45), "n": 2, "temperature": 0.5, "seed": 3}, "local"),
    "list of prompts": ({"prompt": [text_prompt(46), text_prompt(3)]}, "local"),
    "prompt_logprobs": ({"prompt": text_prompt(20), "prompt_logprobs": 1}, "local"),
    "echo": ({"prompt": text_prompt(21), "echo": True, "logprobs": 1}, "local"),
    "one word": ({"prompt": "Hello"}, "local"),
    "structured output": (
        {"prompt": text_prompt(47), "structured_outputs": {"choice": ["storm", "calm"]}, "max_tokens": 6},
        "pair",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_completions(pair: PairUrls, kind: str) -> None:
    body, mode = KINDS[kind]
    await same(pair, "/v1/completions", {**BASE, **body}, mode)


async def test_json_schema_chat(pair: PairUrls) -> None:
    """Structured output over a transferred prompt obeys its schema."""
    schema = {"type": "object", "properties": {"mood": {"enum": ["calm", "wild"]}}, "required": ["mood"]}
    body = {
        **BASE, "max_tokens": 40,
        "messages": [{"role": "user", "content": text_prompt() + " What is the mood? Answer in JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "m", "schema": schema}},
    }  # fmt: skip
    reply = await post(pair.proxy, "/v1/chat/completions", body)
    assert reply.mode == "pair" and json.loads(reply.text)["mood"] in ("calm", "wild")


async def test_tool_calls(pair: PairUrls) -> None:
    """A forced call over a transferred prompt is the call one engine makes."""
    parameters = {"type": "object", "properties": {"city": {"enum": ["Bergen", "Brest"]}}, "required": ["city"]}
    body = {
        **BASE, "max_tokens": 80,
        "messages": [{"role": "user", "content": text_prompt() + " What is the weather in Bergen?"}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": parameters}}],
        "tool_choice": "required",
    }  # fmt: skip
    replies = [await post(url, "/v1/chat/completions", body) for url in (pair.proxy, pair.decode)]
    calls = [reply.body["choices"][0]["message"]["tool_calls"][0]["function"] for reply in replies]
    assert replies[0].mode == "pair" and calls[0] == calls[1] and calls[0]["name"] == "weather"


async def test_other_endpoints_go_to_a_decode_engine(pair: PairUrls) -> None:
    """Answered as the engine answers; what is neither ours nor listed is not there."""
    ask = {"model": "demo", "temperature": 0}
    responses = await post(pair.proxy, "/v1/responses", {**ask, "input": "What is the capital of France?"})
    assert responses.status == 200 and "Paris" in json.dumps(responses.body)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    messages = await post(pair.proxy, "/v1/messages", {**ask, "max_tokens": 12, "messages": question})
    assert messages.status == 200 and "Paris" in json.dumps(messages.body)
    for path, body in (("/v1/embeddings", {"model": "demo", "input": "x"}), ("/tokenize", {**ask, "prompt": "a b"})):
        through, alone = await post(pair.proxy, path, body), await post(pair.decode, path, body)
        assert (through.status, through.body) == (alone.status, alone.body)
    assert (await post(pair.proxy, "/detokenize", {"model": "demo", "tokens": [1]})).status == 404


async def test_client_parameters_cannot_name_a_transfer(pair: PairUrls) -> None:
    """kv_transfer_params of a client are dropped."""
    forged = {"kv_transfer_params": {"pdxfer": {"transfer_id": "t-forged"}, "do_remote_prefill": True}}
    await same(pair, "/v1/completions", {**BASE, "prompt": text_prompt(48), **forged}, "pair")


async def test_engine_errors_keep_status_and_body(pair: PairUrls, prompts: Prompts) -> None:
    """Too long, wrong types: what the engine says is what the client reads."""
    for body in (
        {**BASE, "prompt": prompts.ids(5000)},
        {**BASE, "prompt": text_prompt(), "temperature": -3},
    ):
        through = await post(pair.proxy, "/v1/completions", body)
        alone = await post(pair.decode, "/v1/completions", body)
        assert (through.status, through.body) == (alone.status, alone.body)
        assert through.status == 400


async def test_an_unknown_model_is_404(pair: PairUrls) -> None:
    reply = await post(pair.proxy, "/v1/completions", {**BASE, "model": "gpt-9", "prompt": "x"})
    assert reply.status == 404 and "gpt-9" in json.dumps(reply.body)


async def test_a_decode_leg_without_router_knowledge_is_computed(pair: PairUrls, prompts: Prompts) -> None:
    """A transfer id the router never minted: decode waits for nothing longer than its deadline and answers right."""
    ids = prompts.ids(300, 77)
    params = {"pdxfer": {"transfer_id": "t-0000000000000000", "leg": "decode", "deadline_s": 1.0}}
    forged = await complete(pair.decode, ids, cache_salt="f1", kv_transfer_params=params)
    alone = await complete(pair.decode, ids, cache_salt="f2")
    assert forged.status == 200 and forged.tokens == alone.tokens
