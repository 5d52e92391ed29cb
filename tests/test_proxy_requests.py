"""Every way a request can be answered, but for failing legs and broken streams (test_proxy_failures)."""

import asyncio
import json
import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proxy_rig import MODEL, rig

from pdxfer.core.errors import ConfigError, ListenError
from pdxfer.proxy.settings import ProxySettings
from pdxfer.testing.fake_engine import FakeEngine, FakeEngineSettings
from pdxfer.testing.fake_model import next_words, tokenize
from pdxfer.wire.messages import (
    ONE_BLOCK,
    PREFILL_TOO_SMALL,
    SHORT_PROMPT,
    Busy,
    EngineRef,
    Local,
    Pair,
    Pairing,
    Release,
)

PROMPT = "the quick brown fox jumps over the lazy dog " * 20
COMPLETION = {"model": MODEL, "prompt": PROMPT, "max_tokens": 5}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5}


async def test_a_completion_is_served_by_the_pair() -> None:
    """Both engines get the same prompt under one transfer id; the answer is decode's; the pairing is released."""
    async with rig() as r:
        status, body, headers = await r.post("/v1/completions", COMPLETION)
        assert status == 200
        assert body["choices"][0]["text"] == "".join(next_words(tokenize(PROMPT), 5))
        assert headers["x-pdxfer-timeline"].startswith("mode=pair; ")
        await r.settled()
        prefill, decode = (json.loads(engine.counts.seen[0].body) for engine in (r.prefill, r.decode))
        assert prefill["prompt"] == decode["prompt"] == PROMPT
        assert (prefill["max_tokens"], decode["max_tokens"]) == (1, 5)
        transfer_id = r.pairer.pairings[0].transfer_id
        for leg in (prefill, decode):
            assert leg["kv_transfer_params"]["pdxfer"]["transfer_id"] == transfer_id
            assert 0 < leg["kv_transfer_params"]["pdxfer"]["deadline_s"] <= 120
        assert [m.transfer_id for m in r.pairer.sent if isinstance(m, Release)] == [transfer_id]
        await r.settled()
        assert r.count("requests_total", endpoint="completions", mode="pair", outcome="ok") == 1


async def test_usage_counts_the_prompt_once() -> None:
    async with rig() as r:
        _, body, _ = await r.post("/v1/completions", COMPLETION | {"prompt": list(range(700))})
        assert body["usage"] == {"prompt_tokens": 700, "completion_tokens": 5, "total_tokens": 705}
        assert r.pairer.asked[-1].num_tokens == 700


async def test_both_legs_run_at_the_same_time() -> None:
    """A prefill that never answers does not keep decode from being asked."""
    async with rig() as r:
        r.prefill.faults.hang = True
        status, _, _ = await r.post("/v1/completions", COMPLETION)
        assert status == 200 and r.decode.counts.finished == 1
        assert r.prefill.counts.seen and r.prefill.counts.finished == 0


async def test_a_chat_is_served_by_the_pair() -> None:
    async with rig() as r:
        status, body, _ = await r.post("/v1/chat/completions", CHAT | {"max_completion_tokens": 3})
        assert status == 200 and body["choices"][0]["message"]["role"] == "assistant"
        leg = json.loads(r.prefill.counts.seen[0].body)
        assert (leg["max_tokens"], leg["max_completion_tokens"]) == (1, 1)


@pytest.mark.parametrize(
    ("change", "reason", "num_choices"),
    [
        ({"prompt": ["one", "two"]}, "prompt_list", 2),
        ({"prompt": [[1, 2], [3]]}, "prompt_list", 2),
        ({"n": 3}, "n", 3),
        ({"best_of": 2}, "best_of", 1),
        ({"echo": True}, "echo", 1),
        ({"prompt_logprobs": 1}, "prompt_logprobs", 1),
    ],
)
async def test_what_cannot_be_paired_goes_to_decode_alone(change: dict, reason: str, num_choices: int) -> None:
    """The answer is right, the reason is counted and in the timeline header, prefill hears nothing."""
    async with rig() as r:
        status, body, headers = await r.post("/v1/completions", COMPLETION | change)
        assert status == 200 and len(body["choices"]) == num_choices
        assert headers["x-pdxfer-timeline"].startswith(f"mode=local; reason={reason}; ttft=")
        assert r.pairer.asked[-1].local_only and not r.prefill.counts.seen
        assert "kv_transfer_params" not in json.loads(r.decode.counts.seen[0].body)
        assert r.count("fallbacks_total", reason=reason) == 1
        await r.settled()
        assert r.count("requests_total", endpoint="completions", mode="local", outcome="ok") == 1


async def test_the_router_may_choose_decode_alone() -> None:
    async with rig() as r:
        r.pairer.answers += [r.pairer.local, r.pairer.local]  # the first for the list of models
        status, _, headers = await r.post("/v1/completions", COMPLETION)
        assert status == 200 and not r.prefill.counts.seen
        assert "mode=local; reason=short_prompt" in headers["x-pdxfer-timeline"]
        assert r.count("fallbacks_total", reason="router") == 1


@pytest.mark.parametrize(
    ("path", "endpoint"),
    [("/v1/responses", "responses"), ("/v1/messages", "messages"), ("/v1/embeddings", "embeddings")],
)
async def test_other_endpoints_go_to_decode_and_are_counted(path: str, endpoint: str) -> None:
    async with rig(settings={"aliases": {"small": MODEL}}) as r:
        status, body, _ = await r.post(path, {"model": "small", "input": "hi", "kv_transfer_params": {"a": 1}})
        assert status == 200 and body["engine"] == "d0" and body["path"] == path
        assert json.loads(body["body"]) == {"model": MODEL, "input": "hi"}
        await r.settled()
        assert r.count("requests_total", endpoint=endpoint, mode="local", outcome="ok") == 1
        assert not r.prefill.counts.seen


async def test_an_unlisted_path_is_404_and_a_listed_one_passes_through() -> None:
    async with rig(settings={"passthrough": ("/tokenize", "/v1/audio/*")}) as r:
        status, body, _ = await r.post("/v1/unknown", {})
        assert status == 404 and "proxy.passthrough" in body["error"]["message"]
        status, body, _ = await r.post("/tokenize?x=1", b"\x00raw", {"Content-Type": "text/plain"})
        assert (status, body["path"], body["body"]) == (200, "/tokenize?x=1", "\x00raw")
        status, body = await r.get("/v1/audio/voices")
        assert (status, body["engine"]) == (200, "d0")
        await r.settled()
        assert r.count("requests_total", endpoint="passthrough", mode="local", outcome="ok") == 2
        assert r.count("refused_total", reason="unknown_path") == 1


async def test_a_target_that_names_the_host_is_its_path() -> None:
    """As clients of forward proxies send it."""
    async with rig() as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.proxy.port)
        head = f"POST http://localhost:{r.proxy.port}/v1/messages?x=1 HTTP/1.1\r\nHost: localhost\r\n"
        writer.write(
            f"{head}Content-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode()
        )
        answer = (await asyncio.wait_for(reader.read(), 10)).decode()
        writer.close()
        assert answer.startswith("HTTP/1.1 200 ") and '"path": "/v1/messages?x=1"' in answer, answer


async def test_models_are_listed_with_aliases_and_checked() -> None:
    """Union of what the engines serve (LoRA names too) and the aliases; anything else is 404."""
    async with rig(
        settings={"aliases": {"small": MODEL, "lost": "not-served"}}, engine={"adapters": {"my-lora": "/adapters/my"}}
    ) as r:
        _, body = await r.get("/v1/models")
        assert [entry["id"] for entry in body["data"]] == [MODEL, "my-lora", "small"]
        assert (await r.get("/v1/models/small"))[1]["root"] == MODEL
        assert (await r.get("/v1/models/nope"))[0] == 404
        for name in ("small", "my-lora"):
            assert (await r.post("/v1/completions", COMPLETION | {"model": name}))[0] == 200
        for path, request in (("/v1/completions", COMPLETION), ("/v1/embeddings", {"input": "a"})):
            status, body, _ = await r.post(path, request | {"model": "nope"})
            assert status == 404 and body["error"]["code"] == "model_not_found"
            assert "my-lora" in body["error"]["message"]
        assert r.count("refused_total", reason="unknown_model") == 2


async def test_an_adapter_is_asked_for_by_its_model_and_not_of_engines_that_lack_it() -> None:
    async with (
        rig(engine={"adapters": {"my-lora": "/adapters/my"}}) as r,
        FakeEngine(FakeEngineSettings(engine_id="d1")) as plain,
    ):
        lacks = EngineRef(engine_id="d1", url=plain.url)
        r.pairer.answers.append(lambda pair: Local(request_id=pair.request_id, decode=lacks, reason="short"))
        assert (await r.post("/v1/completions", COMPLETION))[0] == 200
        for _ in range(2):
            assert (await r.post("/v1/completions", COMPLETION | {"model": "my-lora"}))[0] == 200
        assert (r.pairer.asked[-1].model, r.pairer.asked[-1].avoid) == (MODEL, ["d1"])
        assert (await r.post("/v1/completions", COMPLETION))[0] == 200
        assert (r.pairer.asked[-1].model, r.pairer.asked[-1].avoid) == (MODEL, [])


async def test_an_adapter_that_was_loaded_since_is_found_without_the_router() -> None:
    """The router knows no adapters: it would let the question wait for an engine that serves one."""
    async with rig() as r:
        assert (await r.post("/v1/completions", COMPLETION))[0] == 200
        for engine in (r.prefill, r.decode):
            engine.settings.adapters["new"] = "/adapters/new"
        assert (await r.post("/v1/completions", COMPLETION | {"model": "new"}))[0] == 200
        assert {pair.model for pair in r.pairer.asked} == {MODEL}


async def test_an_unknown_model_is_404_also_as_the_first_request() -> None:
    """The router has no engine for that name, and the proxy has met none yet: it asks for any before it judges."""
    async with rig() as r:
        r.pairer.answers.append(lambda pair: Busy(request_id=pair.request_id, retry_after_s=1.0, reason="no engine"))
        status, body, _ = await r.post("/v1/completions", {"model": "gpt-9", "prompt": "hi"})
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        assert not r.prefill.faults.take()


@pytest.mark.parametrize("is_there", [True, False], ids=["an unknown model", "no engine yet"])
async def test_many_that_ask_for_the_same_model_at_once_cost_one_question(is_there: bool) -> None:
    """One after the other, each would wait for all that came before it: the router takes its time for a no."""
    async with rig() as r:
        ask = r.pairer.pair

        async def pair(request: Pair, timeout_s: float) -> Pairing | Local | Busy:
            answer = await ask(request, timeout_s)
            if is_there and not request.model:
                return answer
            return Busy(request_id=request.request_id, retry_after_s=1.0, reason="no engine")

        r.pairer.pair = pair  # type: ignore[method-assign]
        answers = await asyncio.gather(*(r.post("/v1/completions", COMPLETION | {"model": "gpt-9"}) for _ in range(20)))
        assert {status for status, _, _ in answers} == ({404} if is_there else {503})
        assert len([one for one in r.pairer.asked if one.local_only and one.model == "gpt-9"]) == 1
        assert len([one for one in r.pairer.asked if not one.model]) == 1


async def test_a_question_about_models_ends_with_the_proxy() -> None:
    """Also if its client has left."""
    async with rig() as r:
        asked, ended = asyncio.Event(), asyncio.Event()

        async def pair(request: Pair, timeout_s: float) -> Pairing | Local | Busy:
            asked.set()
            try:
                return await asyncio.Future()
            finally:
                ended.set()

        r.pairer.pair = pair  # type: ignore[method-assign]
        request = asyncio.create_task(r.post("/v1/completions", COMPLETION))
        await asked.wait()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        assert not ended.is_set()
    async with asyncio.timeout(20):
        await ended.wait()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/v1/messages"])
async def test_a_model_name_without_end_is_refused_at_once(path: str) -> None:
    """The router would not read the question, and the client wait for an answer until the deadline."""
    async with rig() as r:
        body = {"model": "x" * 3000, "prompt": "hi", "input": "hi", "messages": []}
        status, answer, _ = await r.post(path, body)
        assert status == 400 and answer["error"]["param"] == "model" and "3000 characters" in answer["error"]["message"]
        assert not r.pairer.asked


async def test_no_model_named_is_for_the_engine_to_judge() -> None:
    async with rig() as r:
        assert (await r.post("/v1/completions", {"prompt": PROMPT}))[0] == 200


@pytest.mark.parametrize("body", [b"{", b"[]", b"", b'{"prompt": 3}', b'{"model": {}}', b"\xff" * 100], ids=str)
async def test_malformed_bodies_are_400_in_openai_form(body: bytes) -> None:
    async with rig() as r:
        status, answer, headers = await r.post("/v1/completions", body)
        assert status == 400
        assert answer["error"]["type"] == "invalid_request_error" and answer["error"]["message"]
        assert "X-Request-Id" in headers
        assert r.count("refused_total", reason="malformed") == 1 and not r.pairer.pairings


async def test_an_oversized_body_is_413() -> None:
    async with rig(settings={"max_body_bytes": 1000}) as r:
        status, body, _ = await r.post("/v1/completions", COMPLETION | {"prompt": "x" * 2000})
        assert status == 413 and "proxy.max_body_mib" in body["error"]["message"]
        assert r.count("refused_total", reason="too_large") == 1
        assert (await r.post("/v1/completions", {"prompt": "short"}))[0] == 200


async def test_a_wrong_method_and_a_broken_encoding_are_client_errors() -> None:
    async with rig() as r:
        assert (await r.get("/v1/completions"))[0] == 404
        status, body, _ = await r.post("/v1/completions", b"not gzip", {"Content-Encoding": "gzip"})
        assert status == 400 and "error" in body


async def test_any_garbage_is_a_client_error() -> None:
    """No bytes and no headers make a 500, and the proxy lives on."""
    async with rig() as r:
        loop = asyncio.get_running_loop()
        bodies: list[bytes] = []

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.binary(max_size=200) | st.text(max_size=50).map(lambda t: json.dumps({"prompt": [t, 1]}).encode()))
        def collect(body: bytes) -> None:
            bodies.append(body)

        await loop.run_in_executor(None, collect)
        for body in bodies:
            for path in ("/v1/completions", "/v1/chat/completions"):
                status, answer, _ = await r.post(path, body)
                assert status == 400, (path, body, answer)
        assert (await r.post("/v1/completions", COMPLETION))[0] == 200


async def test_engine_errors_keep_status_and_body() -> None:
    """Both legs refuse: the client gets decode's answer, unchanged."""
    async with rig(engine={"max_model_len": 50}) as r:
        status, body, _ = await r.post("/v1/completions", COMPLETION)
        assert status == 400
        assert body["error"]["type"] == "FakeEngineError" and "exceed" in body["error"]["message"]
        await r.settled()
        assert r.count("requests_total", endpoint="completions", mode="pair", outcome="client_error") == 1


async def test_busy_is_503_with_retry_after() -> None:
    async with rig() as r:
        await r.get("/v1/models")
        r.pairer.answers.append(lambda ask: Busy(request_id=ask.request_id, retry_after_s=2.5, reason="queue is full"))
        status, body, headers = await r.post("/v1/completions", COMPLETION)
        assert (status, headers["Retry-After"]) == (503, "3")
        assert "queue is full" in body["error"]["message"]
        await r.settled()
        assert r.count("requests_total", endpoint="completions", mode="none", outcome="busy") == 1


async def test_without_a_router_the_last_decode_engine_serves_alone() -> None:
    async with rig() as r:
        await r.post("/v1/completions", COMPLETION)
        r.pairer.is_unreachable = True
        status, _, headers = await r.post("/v1/completions", COMPLETION)
        assert status == 200 and "reason=router_unreachable" in headers["x-pdxfer-timeline"]
        assert (await r.post("/v1/completions", COMPLETION | {"n": 2}))[0] == 200
        assert r.count("fallbacks_total", reason="router_unreachable") == 2


async def test_without_a_router_a_dead_decode_engine_is_passed_over() -> None:
    """By one of which it is not known yet what it serves, too."""
    async with rig() as r:
        await r.post("/v1/completions", COMPLETION)
        other = EngineRef(engine_id="d1", url=r.prefill.url)
        r.pairer.answers.append(lambda ask: Local(request_id=ask.request_id, decode=other, reason="no prefill"))
        await r.post("/v1/completions", COMPLETION)
        r.pairer.is_unreachable = True
        await r.decode.stop()
        for _ in range(3):
            assert (await r.post("/v1/completions", COMPLETION))[0] == 200


async def test_without_a_router_and_engines_it_is_503() -> None:
    async with rig() as r:
        r.pairer.is_unreachable = True
        status, body, headers = await r.post("/v1/completions", COMPLETION)
        assert status == 503 and headers["Retry-After"] and body["error"]["code"] == "unreachable"
        assert (await r.get("/v1/models"))[0] == 503
        await r.settled()
        assert r.count("requests_total", endpoint="completions", mode="none", outcome="unreachable") == 1


async def test_too_many_requests_are_429() -> None:
    async with rig(settings={"max_in_flight": 1}) as r:
        r.decode.faults.hang = True
        first = asyncio.create_task(r.post("/v1/completions", COMPLETION))
        while not r.decode.counts.running:
            await asyncio.sleep(0)
        status, body, headers = await r.post("/v1/completions", COMPLETION)
        assert (status, headers["Retry-After"]) == (429, "1") and "proxy.max_in_flight" in body["error"]["message"]
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_health_and_ready_say_what_they_mean() -> None:
    async with rig() as r:
        assert await r.get("/health") == (200, {"status": "ok"})
        r.pairer.answers += [
            lambda ask: r.pairer.local(ask, "no prefill engine"),
            lambda ask: Busy(request_id=ask.request_id, retry_after_s=1, reason="no decode engine"),
        ]
        for words in ("no prefill engine", "no decode engine"):
            status, body = await r.get("/ready")
            assert status == 503 and words in body["reasons"][0]
        r.pairer.is_unreachable = True
        assert "router unreachable" in (await r.get("/ready"))[1]["reasons"][0]
        r.pairer.is_unreachable = False
        assert await r.get("/ready") == (200, {"ready": True, "reasons": []})
        assert isinstance(r.pairer.sent[0], Release)
        num_asked = len(r.pairer.asked)
        assert (await r.get("/ready"))[0] == 200 and len(r.pairer.asked) == num_asked


@pytest.mark.parametrize("reason", [SHORT_PROMPT, ONE_BLOCK, PREFILL_TOO_SMALL])
async def test_a_probe_that_is_only_of_the_wrong_length_is_ready(reason: str) -> None:
    """A pair is there; and the decode engine must answer all the same."""
    async with rig() as r:
        r.pairer.answers += [lambda ask: r.pairer.local(ask, reason)]
        assert (await r.get("/ready"))[0] == 200
    async with rig() as r:
        r.pairer.answers += [lambda ask: r.pairer.local(ask, reason)]
        await r.decode.stop()
        assert (await r.get("/ready"))[0] == 503


async def test_a_pair_whose_decode_engine_does_not_listen_is_not_ready() -> None:
    """It joins the router before its HTTP server is up."""
    async with rig() as r:
        await r.decode.stop()
        status, body = await r.get("/ready")
        assert status == 503 and len(body["reasons"]) == 1
        assert "has joined the router but does not answer" in body["reasons"][0]


async def test_request_id_trace_and_keys_are_forwarded() -> None:
    headers = {"X-Request-Id": "mine-1", "traceparent": "00-a-b-01", "tracestate": "x=y", "Authorization": "Bearer c"}
    async with rig() as r:
        _, _, answer = await r.post("/v1/completions", COMPLETION, headers)
        assert answer["X-Request-Id"] == "mine-1"
        for engine in (r.prefill, r.decode):
            seen = engine.counts.seen[0].headers
            assert seen["x-request-id"] == "mine-1" and seen["authorization"] == "Bearer c"
            assert (seen["traceparent"], seen["tracestate"]) == ("00-a-b-01", "x=y")
        _, _, answer = await r.post("/v1/completions", COMPLETION, {"X-Request-Id": "bad id " + "x" * 200})
        assert answer["X-Request-Id"].startswith("r-")


async def test_clients_need_a_token_and_engines_get_theirs() -> None:
    keys = {"api_keys": {"secret-1": "team-a", "secret-2": "team-b"}, "engine_api_key": "inner"}
    async with rig(settings=keys, engine={"api_key": "inner"}) as r:
        status, body, _ = await r.post("/v1/completions", COMPLETION, {"Authorization": "Bearer wrong"})
        assert status == 401 and body["error"]["type"] == "authentication_error"
        assert (await r.get("/v1/models"))[0] == 401
        auth = {"Authorization": "Bearer secret-1", "X-Request-Id": "q"}
        assert (await r.post("/v1/completions", COMPLETION, auth))[0] == 200
        assert r.pairer.asked[-1].tenant == "team-a"
        assert r.decode.counts.seen[-1].headers["authorization"] == "Bearer inner"
        assert (await r.get("/v1/pdxfer/timeline/q", auth))[0] == 200
        assert (await r.get("/v1/pdxfer/timeline/q", {"Authorization": "Bearer secret-2"}))[0] == 404
        assert (await r.post("/v1/messages", {"model": MODEL}, {"x-api-key": "secret-2"}))[0] == 200


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"host": "0.0.0.0"}, "set proxy.api_keys"),
        ({"port": 70000}, "proxy.port is 70000"),
        ({"passthrough": ("tokenize",)}, "from its first /"),
        ({"request_timeout_s": 0}, "proxy.request_timeout_s is 0"),
        ({"api_keys": {"secret-1": "team-a", "": "team-b"}}, "proxy.api_keys has an empty token"),
    ],
)
def test_wrong_settings_say_what_to_do(wrong: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ProxySettings(**wrong)


async def test_a_taken_port_says_so() -> None:
    async with rig() as r:
        with pytest.raises(ListenError, match="Choose another proxy.port"):
            async with rig(settings={"port": r.proxy.port}):
                pass


@pytest.mark.parametrize(
    "data", [b"\x00\xff" * 50, b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\n" * 9]
)
async def test_what_is_no_http_is_refused_and_the_proxy_lives(data: bytes) -> None:
    async with rig() as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.proxy.port)
        writer.write(data + b"\r\n\r\n")
        writer.write_eof()
        async with asyncio.timeout(20):
            answer = await reader.read()
        assert b" 500 " not in answer.split(b"\r\n")[0]
        writer.close()
        assert await r.get("/health") == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        ("GET /" + "a" * 20_000, 400, "invalid_http"),
        ("GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + "b" * 20_000, 400, "invalid_http"),
        ("\x01" * 7_000, 400, "invalid_http"),
        ("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: br", 415, "unsupported_encoding"),
        ("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip", 400, "invalid_body"),
        ("POST /health HTTP/1.1\r\nHost: x\r\nContent-Encoding: deflate", 404, "unknown_path"),
    ],
    ids=["long URL", "long header", "garbage", "unknown encoding", "broken gzip", "broken deflate that nobody reads"],
)
async def test_what_no_route_has_seen_is_refused_in_openai_form_too(
    head: str, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A client's library reads the reason from JSON; our log has no traceback of what a client got wrong."""
    async with rig() as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.proxy.port)
        target = head if "HTTP/1.1" in head else head + " HTTP/1.1\r\nHost: x"
        writer.write(target.encode() + b"\r\nContent-Length: 8\r\nConnection: close\r\n\r\nnot that")
        async with asyncio.timeout(20):
            start, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert start.split()[1] == str(status).encode() and b"application/json" in start
        error = json.loads(body)["error"]
        assert error["code"] == code and error["type"] and "\n" not in error["message"]
        assert len(body) < 600, "what was sent is not echoed whole"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING or record.exc_info]


@pytest.mark.parametrize("length", ["-5", "9" * 30, "+5", "1e3", "five", "5, 6", str(10**18)])
@pytest.mark.parametrize("where", ["proxy", "engine"])
async def test_an_absurd_content_length_is_the_clients_fault(
    length: str, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """400, or 413 if it is a number; at once, and without a line at WARNING or above."""
    async with rig() as r:
        port = r.proxy.port if where == "proxy" else int(r.prefill.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n{{}}".encode())
        async with asyncio.timeout(20):
            status = (await reader.readline()).split()[1]
        writer.close()
        assert status == (b"413" if length.isdigit() and len(length) < 20 else b"400")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING or record.exc_info]
