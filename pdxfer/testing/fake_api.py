"""The OpenAI shapes that the FakeEngine understands and answers: parsing of requests, JSON of responses. Pure."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from pdxfer.testing.fake_model import next_words, render_chat, tokenize

Endpoint = Literal["completions", "chat"]
Json = dict[str, object]

MAX_CHOICES = 128
"""Of one prompt; all of them are made at once."""


class BadRequest(Exception):
    """The request cannot be served; becomes the error body."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, object]] | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Transfer(msgspec.Struct):
    """Our part of kv_transfer_params."""

    transfer_id: str
    deadline_s: float = 60.0
    leg: Literal["prefill", "decode"] = "decode"
    traceparent: str = ""
    tenant: str = ""


class _KvParams(msgspec.Struct):
    pdxfer: Transfer | None = None


class Body(msgspec.Struct):
    """The fields that matter here; others are accepted and ignored."""

    model: str = ""
    prompt: str | list[int | str | list[int]] | None = None
    messages: list[_Message] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    echo: bool = False
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    kv_transfer_params: _KvParams | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One parsed request."""

    endpoint: Endpoint
    request_id: str
    model: str
    prompts: list[list[int]]
    """Token ids, one list a prompt."""
    texts: list[str]
    """Prompt texts, for echo."""
    n: int
    max_tokens: int
    stream: bool
    include_usage: bool
    echo: bool
    transfer: Transfer | None

    def choices(self) -> list[list[str]]:
        """Words of each choice: n for every prompt."""
        chosen = []
        for token_ids, text in zip(self.prompts, self.texts, strict=True):
            for choice in range(self.n):
                words = next_words(token_ids, self.max_tokens, choice)
                chosen.append([text, *words] if self.echo else words)
        return chosen


def parse(endpoint: Endpoint, request_id: str, data: bytes, max_model_len: int) -> Job:
    """A request as a Job. Raises BadRequest."""
    try:
        body = msgspec.json.decode(data, type=Body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(400, f"invalid request: {error}") from error
    texts, prompts = _prompts(endpoint, body)
    max_tokens = body.max_completion_tokens or body.max_tokens or 16
    if max_tokens < 1 or (body.n or 1) < 1:
        raise BadRequest(400, f"max_tokens={max_tokens}, n={body.n}: both must be at least 1")
    if (body.n or 1) > MAX_CHOICES:
        raise BadRequest(400, f"n={body.n}: at most {MAX_CHOICES} choices")
    for token_ids in prompts:
        if len(token_ids) + max_tokens > max_model_len:
            raise BadRequest(400, f"{len(token_ids)} + {max_tokens} tokens exceed the model's {max_model_len}")
    return Job(
        endpoint=endpoint,
        request_id=request_id,
        model=body.model,
        prompts=prompts,
        texts=texts,
        n=body.n or 1,
        max_tokens=max_tokens,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        echo=body.echo,
        transfer=body.kv_transfer_params.pdxfer if body.kv_transfer_params else None,
    )


def _prompts(endpoint: Endpoint, body: Body) -> tuple[list[str], list[list[int]]]:
    """Texts and token ids of all prompts."""
    if endpoint == "chat":
        if not body.messages:
            raise BadRequest(400, "messages must not be empty")
        text = render_chat((message.role, _content(message)) for message in body.messages)
        return [text], [tokenize(text)]
    prompt = body.prompt
    if not prompt:
        raise BadRequest(400, "prompt must not be empty")
    if isinstance(prompt, str):
        return [prompt], [tokenize(prompt)]
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return [str(ids)], [ids]
    texts = [str(item) for item in prompt]
    return texts, [tokenize(item) if isinstance(item, str) else item for item in prompt if not isinstance(item, int)]


def _content(message: _Message) -> str:
    if isinstance(message.content, list):
        return "".join(str(part.get("text", "")) for part in message.content)
    return message.content or ""


# ---- responses ---------------------------------------------------------------------------------------------------


def usage(job: Job) -> Json:
    """Token counts of the whole request."""
    prompt = sum(map(len, job.prompts))
    completion = job.max_tokens * job.n * len(job.prompts)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def full(job: Job) -> bytes:
    """The whole answer of a request that does not stream."""
    choices: list[Json] = []
    for index, words in enumerate(job.choices()):
        text = "".join(words)
        shape: Json = {"message": {"role": "assistant", "content": text}} if job.endpoint == "chat" else {"text": text}
        choices.append({"index": index, "finish_reason": "length", **shape})
    name = "chat.completion" if job.endpoint == "chat" else "text_completion"
    return _encode(job, name, choices, {"usage": usage(job)})


def events(job: Job) -> list[bytes]:
    """Server-sent events of a request that streams, one a token, without the final [DONE]."""
    name = "chat.completion.chunk" if job.endpoint == "chat" else "text_completion"
    out: list[bytes] = []
    for index, words in enumerate(job.choices()):
        for position, word in enumerate(words):
            shape: Json = {"text": word}
            if job.endpoint == "chat":
                role = {"role": "assistant"} if position == 0 else {}
                shape = {"delta": {**role, "content": word}}
            reason = "length" if position == len(words) - 1 else None
            out.append(_event(_encode(job, name, [{"index": index, "finish_reason": reason, **shape}], {})))
    if job.include_usage:
        out.append(_event(_encode(job, name, [], {"usage": usage(job)})))
    return out


def error_body(status: int, message: str) -> bytes:
    """vLLM's error form."""
    error = {"message": message, "type": "FakeEngineError", "param": None, "code": status}
    return msgspec.json.encode({"error": error})


def _encode(job: Job, name: str, choices: Sequence[Json], extra: Json) -> bytes:
    prefix = "chatcmpl" if job.endpoint == "chat" else "cmpl"
    return msgspec.json.encode(
        {
            "id": f"{prefix}-{job.request_id}",
            "object": name,
            "created": int(time.time()),
            "model": job.model,
            "choices": choices,
            **extra,
        }
    )


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
