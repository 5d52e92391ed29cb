"""The official client works against the proxy, streaming or not, and sees errors as its own exceptions."""

import asyncio

import pytest
from proxy_rig import MODEL, rig

from pdxfer.testing.fake_model import next_words, render_chat, tokenize

openai = pytest.importorskip("openai", reason="the openai client is not installed")

TEXT = "Tell me about rivers. " * 20
MESSAGES = [{"role": "user", "content": TEXT}]
ANSWER = "".join(next_words(tokenize(render_chat([("user", TEXT)])), 6))


async def test_the_openai_client_works() -> None:
    async with rig() as r, openai.AsyncOpenAI(base_url=r.url + "/v1", api_key="any", max_retries=0) as client:
        assert [model.id for model in (await client.models.list()).data] == [MODEL]
        chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=6)
        assert chat.choices[0].message.content == ANSWER
        assert chat.usage.completion_tokens == 6 and chat.usage.prompt_tokens == len(
            tokenize(render_chat([("user", TEXT)]))
        )
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=6, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content for c in chunks if c.choices) == ANSWER
        assert chunks[-1].usage == chat.usage
        completion = await client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=2, n=2)
        assert len(completion.choices) == 2
        raw = await client.completions.with_raw_response.create(model=MODEL, prompt="hi", max_tokens=2)
        assert raw.headers["x-pdxfer-timeline"].startswith("mode=pair")


async def test_errors_arrive_as_the_clients_exceptions() -> None:
    async with rig() as r, openai.AsyncOpenAI(base_url=r.url + "/v1", api_key="any", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.completions.create(model="nope", prompt="hi")
        with pytest.raises(openai.BadRequestError, match="'prompt'"):
            await client.completions.create(model=MODEL, prompt=[])
        r.decode.faults.break_after = 2
        with pytest.raises(openai.APIError, match="lost in mid-stream"):
            async for _ in await client.completions.create(model=MODEL, prompt="hi", stream=True):
                pass


async def test_many_requests_at_once_all_succeed() -> None:
    async with rig() as r, openai.AsyncOpenAI(base_url=r.url + "/v1", api_key="any", max_retries=0) as client:

        async def one(i: int) -> bool:
            answer = await client.completions.create(model=MODEL, prompt=[i] * 40, max_tokens=4)
            return bool(answer.choices[0].text == "".join(next_words([i] * 40, 4)))

        assert all(await asyncio.gather(*(one(i) for i in range(100))))
        await r.settled()
        assert len({p.transfer_id for p in r.pairer.pairings}) == 100
        assert len(r.pairer.sent) == 100


async def test_more_choices_than_an_engine_makes_are_refused_at_once() -> None:
    """A billion of them once kept a fake engine from answering anybody."""
    async with rig() as r:
        status, body, _ = await r.post("/v1/completions", {"model": MODEL, "prompt": "hi", "n": 10**9})
        assert status == 400 and "at most 128" in str(body)
