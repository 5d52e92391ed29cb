"""An answer whose decode engine was lost in mid-stream, continued by another: what it is asked, how its events go on.

Pure. The client has seen whole events only (Sent holds back the rest), so the second engine is asked for what follows
the text so far, and its events are rewritten to be the rest of the first stream: same id, usage counted once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from pdxfer.proxy.body import JsonObject, Parsed

MAX_KEPT_BYTES = 4 << 20
"""Events kept of one stream; a longer answer is not continued."""
DONE = b"data: [DONE]\n\n"
_END = b"\n\n"
_DATA = b"data: "
_DEFAULT_MAX_TOKENS = 16
"""vLLM's, for completions."""
# The next two were made by going through every field of vLLM 0.32's CompletionRequest and ChatCompletionRequest. The
# rest are named in tests/test_proxy_replay.py, which notices when vLLM gets a new one.
_SHAPED = (
    "stop", "stop_token_ids", "tools", "response_format", "structured_outputs", "return_token_ids", "min_tokens",
    "continue_final_message", "stream_interval", "bad_words", "repetition_detection", "suffix", "vllm_xargs",
    "ec_transfer_params",
)  # fmt: skip
"""With these a continuation could differ from what one engine would have said: their state is lost with it, they mean
something else for a prompt that holds the text, or (xargs) only a plug-in knows."""
_NEUTRAL = {
    "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "thinking_token_budget": -1,
    "truncate_prompt_tokens": None, "include_reasoning": True, "add_generation_prompt": True,
}  # fmt: skip
"""The same, for what is harmless with one value. Penalties and budget count the output's tokens, which are prompt for
the second engine; truncation would drop others; hidden reasoning is not in the text; and without a generation prompt
the text was no assistant's message."""


class CannotContinue(Exception):
    """Why this stream ends with an error event instead."""


def refusal(parsed: Parsed) -> str:
    """Why a lost answer to this request must not be continued; empty if it may."""
    body = parsed.json
    if not parsed.stream:
        return "not a stream"
    if parsed.local_reason:
        return parsed.local_reason
    for name in _SHAPED:
        if body.get(name):
            return name
    for name, neutral in _NEUTRAL.items():
        if body.get(name) not in (None, neutral):
            return name
    if body.get("logprobs") is not None and body["logprobs"] is not False:
        return "logprobs"  # 0 asks for them, too; their offsets begin anew, tokens without text would come twice
    if body.get("seed") is not None and body.get("temperature") != 0:
        return "seed"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What the client has seen."""

    text: str
    is_finished: bool
    """A finish reason was among it."""
    id: object
    created: object


class Sent:
    """The events of one stream on their way to the client."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._size = 0
        self._rest = b""
        self._is_too_long = False

    def take(self, chunk: bytes) -> bytes:
        """The whole events that `chunk` completes; the rest waits for more. Past MAX_KEPT_BYTES, whatever comes."""
        if self._is_too_long:
            return chunk
        self._size += len(chunk)
        if self._size > MAX_KEPT_BYTES:
            self._is_too_long, rest = True, self._rest
            self._events, self._rest = [], b""
            return rest + chunk
        whole, end, self._rest = (self._rest + chunk).rpartition(_END)
        if end:
            self._events.append(whole + end)
        return whole + end

    @property
    def rest(self) -> bytes:
        """Bytes after the last whole event, for a stream that ends without one."""
        return self._rest

    def account(self) -> Account:
        """Read back what was sent. Raises CannotContinue."""
        if self._is_too_long:
            raise CannotContinue(f"the answer is longer than {MAX_KEPT_BYTES} bytes")
        texts: list[str] = []
        is_finished, last = False, JsonObject()
        for event in payloads(b"".join(self._events)):
            if event == b"[DONE]":
                return Account(text="".join(texts), is_finished=True, id=None, created=None)
            last = _object(event)
            if "error" in last:
                raise CannotContinue("the client has seen an error of the first engine")
            for choice in _choices(last):
                texts.append(_text(choice))
                is_finished = is_finished or choice.get("finish_reason") is not None
        return Account(text="".join(texts), is_finished=is_finished, id=last.get("id"), created=last.get("created"))


def continuation(parsed: Parsed, text: str, tokens: list[int]) -> JsonObject:
    """The body that asks for what follows `text` (`tokens`: the same, as ids). Raises CannotContinue."""
    body = dict(parsed.json)
    if parsed.endpoint == "completions" and body.get("max_tokens") is None:
        body["max_tokens"] = _DEFAULT_MAX_TOKENS
    for name in ("max_tokens", "max_completion_tokens"):
        limit = body.get(name)
        if isinstance(limit, int):
            if limit <= len(tokens):
                raise CannotContinue("its last token was reached")
            body[name] = limit - len(tokens)
    if parsed.endpoint == "chat":
        messages = body["messages"]
        assert isinstance(messages, list)
        if text:
            body["messages"] = [*messages, {"role": "assistant", "content": text}]
            body |= {"continue_final_message": True, "add_generation_prompt": False}
    else:
        prompt = body["prompt"]
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        body["prompt"] = prompt + text if isinstance(prompt, str) else [*prompt, *tokens]  # type: ignore[misc]
    return body


class Continued:
    """Rewrites the second engine's events into the rest of the first stream."""

    def __init__(self, account: Account, num_tokens: int) -> None:
        self._account, self._num_tokens = account, num_tokens
        self._sent = Sent()

    def take(self, chunk: bytes) -> bytes:
        """Events for the client, out of the engine's next bytes. Raises CannotContinue."""
        return b"".join(self._rewritten(event) for event in payloads(self._sent.take(chunk)))

    def _rewritten(self, payload: bytes) -> bytes:
        if payload == b"[DONE]":
            return DONE
        event = _object(payload)
        if "error" in event:
            raise CannotContinue(f"the second engine answered: {str(event['error'])[:200]}")
        choices = _choices(event)
        if self._account.text and choices and all(_is_opening(choice) for choice in choices):
            return b""
        if self._account.id is not None:
            event |= {"id": self._account.id, "created": self._account.created}
        usage = event.get("usage")
        if isinstance(usage, dict):
            usage["prompt_tokens"] -= self._num_tokens
            usage["completion_tokens"] += self._num_tokens
        return _DATA + msgspec.json.encode(event) + _END


def payloads(events: bytes) -> Iterator[bytes]:
    """The data of each server-sent event; comments are skipped."""
    for event in events.split(_END):
        if event.startswith(_DATA):
            yield event[len(_DATA) :].strip()


def _object(payload: bytes) -> JsonObject:
    try:
        return msgspec.json.decode(payload, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CannotContinue(f"an event cannot be read: {error}") from error


def _choices(event: JsonObject) -> list[JsonObject]:
    found = event.get("choices")
    return [choice for choice in found if isinstance(choice, dict)] if isinstance(found, list) else []


def _text(choice: JsonObject) -> str:
    """Text of a choice's event. Raises CannotContinue for reasoning and calls: they cannot be handed back."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return str(choice.get("text") or "")
    if extra := [name for name, value in delta.items() if value and name not in ("role", "content")]:
        raise CannotContinue(f"the answer holds {extra[0]}")
    return str(delta.get("content") or "")


def _is_opening(choice: JsonObject) -> bool:
    """A chat's first event: it names the role and says nothing yet."""
    delta = choice.get("delta")
    return isinstance(delta, dict) and "role" in delta and not delta.get("content") and not choice.get("finish_reason")
