"""A prompt as text or chat messages → token ids, by asking an engine that serves the model (/tokenize).

Only the engine has the tokenizer and the chat template; the controller imports neither.
"""

import json
import urllib.error
import urllib.request
from typing import Any

from pdxfer.core.errors import PdxferError, UnreachableError
from pdxfer.router.snapshot import EngineView

TIMEOUT_S = 10.0
MAX_TOKENS = 1 << 18
_MAX_ANSWER = 8 << 20


class TokenizeError(PdxferError):
    """The engine does not take this prompt."""


def tokenize(
    engines: list[EngineView], token: str, model: str, text: str | None, messages: list[dict[str, Any]] | None
) -> list[int]:
    """Token ids. Raises TokenizeError if the prompt is refused, UnreachableError if no engine answers."""
    found = [engine for engine in engines if engine.state in ("ready", "draining") and _serves(engine, model)]
    if not found:
        raise TokenizeError(f"no engine serves {model!r}" if model else "no engine is there to tokenise the prompt")
    body: dict[str, Any] = {"model": model or found[0].served_names[0]}
    if messages is not None:
        body |= {"messages": messages, "add_generation_prompt": True}
    else:
        body |= {"prompt": text, "add_special_tokens": True}
    reasons = []
    for engine in found[:3]:
        try:
            return _ask(engine.url, token, body)
        except (OSError, ValueError) as error:
            reasons.append(f"{engine.engine_id}: {getattr(error, 'reason', error)}")
    raise UnreachableError(f"no engine could tokenise the prompt: {'; '.join(reasons)}")


def _serves(engine: EngineView, model: str) -> bool:
    return not model or model in engine.served_names


def _ask(url: str, token: str, body: dict[str, Any]) -> list[int]:
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    request = urllib.request.Request(f"{url}/tokenize", data=json.dumps(body).encode(), headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            tokens = json.loads(answer.read(_MAX_ANSWER))["tokens"]
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            raise OSError(f"{url}/tokenize answered {error.code}") from error
        raise TokenizeError(f"the engine refuses the prompt: {error.read(500).decode(errors='replace')}") from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"{url}/tokenize did not answer with tokens") from error
    if not isinstance(tokens, list) or len(tokens) > MAX_TOKENS or not all(isinstance(t, int) for t in tokens):
        raise ValueError(f"{url}/tokenize answered with something else than up to {MAX_TOKENS} token ids")
    return tokens
