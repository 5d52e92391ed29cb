"""Request bodies, purely: parse and check a completion or chat body, decide whether it can be paired, write the legs'.

Only fields that the proxy itself looks at are checked; everything else is the engine's to judge, so that new vLLM
parameters need no change here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec
from blake3 import blake3

from pdxfer.proxy.errors import ApiError

JsonObject = dict[str, object]
Endpoint = Literal["completions", "chat"]

BYTES_PER_TOKEN = 4
"""Rule of thumb, of UTF-8, for English text under byte-pair encodings; scripts of three bytes a character come near it,
too. For the router's estimate of load, and of whether a prompt is short."""

MAX_NAME_CHARS = 1024
"""Of a model; what wire.messages allows, with room for characters of several bytes."""

_KV = "kv_transfer_params"
_NOT_FOR_PREFILL = (
    "stream_options", "min_tokens", "logprobs", "top_logprobs", "logprob_token_ids", "prompt_logprobs", "echo",
    "best_of", "return_token_ids", "stream_interval", "structured_outputs",
)  # fmt: skip
"""Fields that shape the output only. Those that may reach the prompt (tools, response_format, ...) stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A checked body."""

    endpoint: Endpoint
    json: JsonObject
    """Without the client's kv_transfer_params, with the model's alias resolved."""
    model: str
    """Empty if the client named none."""
    stream: bool
    num_tokens: int
    """Estimate: exact for token ids, else bytes / BYTES_PER_TOKEN."""
    local_reason: str
    """Why it cannot be paired (a value of metrics.catalog.FALLBACKS), or empty."""


def decode_object(data: bytes) -> JsonObject:
    """The JSON object in `data`. Raises ApiError 400."""
    value = _decoded(data)
    if not isinstance(value, dict):
        raise ApiError(
            400, f"the request body is {_kind(value)}; send a JSON object with named fields", code="invalid_json"
        )
    return value


def encode(body: JsonObject) -> bytes:
    """Bytes to send to an engine. Raises ApiError 400 for strings that are not text (lone surrogates)."""
    try:
        return msgspec.json.encode(body)
    except (UnicodeEncodeError, RecursionError) as error:
        raise ApiError(400, f"the request body cannot be sent on ({error})", code="invalid_json") from error


def parse(endpoint: Endpoint, data: bytes, resolve: Callable[[str], str]) -> Parsed:
    """Check a body; `resolve` maps a model alias to the served name. Raises ApiError 400 naming field and fix."""
    body = decode_object(data)
    drop_transfer(body)
    model = take_model(body, resolve)
    _check(body, "stream", bool, "true or false")
    for name in ("max_tokens", "max_completion_tokens", "n", "best_of"):
        _check(body, name, int, "an integer")
    num_tokens, reason = _prompt(body) if endpoint == "completions" else _messages(body)
    return Parsed(
        endpoint=endpoint,
        json=body,
        model=model,
        stream=bool(body.get("stream")),
        num_tokens=num_tokens,
        local_reason=reason or _option_reason(body),
    )


def take_model(body: JsonObject, resolve: Callable[[str], str]) -> str:
    """The model's served name, put into `body` too; empty if there is none. Raises ApiError 400."""
    _check(body, "model", str, "a model name as a string")
    model = str(body.get("model") or "")
    if len(model) > MAX_NAME_CHARS:
        message = f"'model' has {len(model)} characters, at most {MAX_NAME_CHARS} are allowed; see GET /v1/models"
        raise ApiError(400, message, code="invalid_value", param="model")
    if model:
        body["model"] = model = resolve(model)
    return model


def drop_transfer(body: JsonObject) -> bool:
    """Take out a client's kv_transfer_params: transfers are ours to drive. True: there were some.

    Engines read them at the top, in vllm_xargs, and for /inference/v1/generate in sampling_params.extra_args.
    """
    sampling = body.get("sampling_params")
    places = (body, body.get("vllm_xargs"), sampling.get("extra_args") if isinstance(sampling, dict) else None)
    found = [place for place in places if isinstance(place, dict) and _KV in place]
    for place in found:
        del place[_KV]
    return bool(found)


def keep_apart(body: JsonObject, tenant: str) -> None:
    """Give each tenant prefixes of its own: nobody can find out, by a hit or its timing, what another has asked.

    A client's own cache_salt keeps parts of one tenant apart, as before. Without tenants nothing changes.
    """
    if tenant:
        salt = body.get("cache_salt")
        given = salt if isinstance(salt, str) else ""
        body["cache_salt"] = blake3(f"{len(tenant)}:{tenant}{given}".encode("utf-8", "surrogatepass")).hexdigest()


def is_json(content_type: str) -> bool:
    """Whether an engine may read a body of this Content-Type as JSON: what FastAPI takes for it, and a little more."""
    subtype = content_type.partition(";")[0].strip().lower().rpartition("/")[2]
    return subtype == "json" or subtype.endswith("+json")


def guarded(data: bytes, tenant: str) -> bytes:
    """JSON for a path whose requests we do not know: an object has no kv_transfer_params and its tenant's salt.

    As it came where that changes nothing. Raises ApiError 400 for what cannot be read: an engine might be able to.
    """
    value = _decoded(data)
    if not isinstance(value, dict):
        return data
    had_transfer = drop_transfer(value)
    keep_apart(value, tenant)
    return encode(value) if had_transfer or tenant else data


def prefill_body(parsed: Parsed, transfer: JsonObject) -> JsonObject:
    """The prefill leg: the same prompt, one token, no stream, nothing that only shapes output."""
    body = {key: value for key, value in parsed.json.items() if key not in _NOT_FOR_PREFILL}
    body |= {"stream": False, "max_tokens": 1, "n": 1, _KV: {"pdxfer": {**transfer, "leg": "prefill"}}}
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    return body


def decode_body(parsed: Parsed, transfer: JsonObject) -> JsonObject:
    """The decode leg: what the client sent, with the transfer it takes part in."""
    return parsed.json | {_KV: {"pdxfer": {**transfer, "leg": "decode"}}}


def _decoded(data: bytes) -> object:
    """The JSON value in `data`. Raises ApiError 400."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(
            400, f"the request body is not JSON ({error}); send a JSON object as UTF-8", code="invalid_json"
        ) from error


def _option_reason(body: JsonObject) -> str:
    """The first option that needs a whole engine, or empty."""
    for name in ("n", "best_of"):
        value = body.get(name)
        if isinstance(value, int) and value > 1:
            return name
    if body.get("echo"):
        return "echo"
    if body.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    return "beam_search" if body.get("use_beam_search") else ""


def _prompt(body: JsonObject) -> tuple[int, str]:
    """Token estimate of a completion's prompt, and why it is not a single one."""
    prompt = body.get("prompt")
    if body.get("prompt_embeds") is not None:
        return 0, "prompt_embeds"
    if isinstance(prompt, str):
        return _estimate(prompt), ""
    if isinstance(prompt, list) and prompt:
        if all(_is_token(item) for item in prompt):
            return len(prompt), ""
        if all(isinstance(item, str) for item in prompt):
            return sum(_estimate(item) for item in prompt), "prompt_list" if len(prompt) > 1 else ""
        if all(isinstance(item, list) and item and all(map(_is_token, item)) for item in prompt):
            return sum(len(item) for item in prompt), "prompt_list" if len(prompt) > 1 else ""
    raise ApiError(
        400,
        f"'prompt' is {_kind(prompt)}; send a string, a list of token ids, or a non-empty list of either",
        code="invalid_type",
        param="prompt",
    )


def _messages(body: JsonObject) -> tuple[int, str]:
    """Token estimate of a chat's messages, and why they are not a single conversation."""
    messages = body.get("messages")
    if isinstance(messages, list) and messages:
        if all(isinstance(item, dict) for item in messages):
            return max(1, sum(_text_bytes(item) for item in messages) // BYTES_PER_TOKEN), ""
        if all(isinstance(item, list) for item in messages):
            return 0, "prompt_list"
    raise ApiError(
        400,
        f"'messages' is {_kind(messages)}; send a non-empty list of objects with 'role' and 'content'",
        code="invalid_type",
        param="messages",
    )


def _text_bytes(message: JsonObject) -> int:
    """Length of a message's text, in either form of `content`."""
    content = message.get("content")
    if isinstance(content, str):
        return _num_bytes(content)
    if not isinstance(content, list):
        return 0
    texts = (part.get("text") for part in content if isinstance(part, dict))
    return sum(_num_bytes(text) for text in texts if isinstance(text, str))


def _estimate(text: str) -> int:
    return max(1, _num_bytes(text) // BYTES_PER_TOKEN)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _check(body: JsonObject, name: str, kind: type, wanted: str) -> None:
    """Raise ApiError 400 unless `body[name]` has the kind, is null, or is absent."""
    value = body.get(name)
    if value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
        return
    raise ApiError(400, f"'{name}' is {_kind(value)}; send {wanted}", code="invalid_type", param=name)


def _is_token(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and item >= 0


def _kind(value: object) -> str:
    """A value's JSON kind, for messages."""
    if value is None:
        return "missing or null"
    if isinstance(value, bool):
        return f"{value}".lower()
    if isinstance(value, list):
        return "an empty list" if not value else "a list of the wrong things"
    names = {str: "a string", int: "a number", float: "a number", dict: "an object"}
    return names.get(type(value), type(value).__name__)
