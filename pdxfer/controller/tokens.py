"""A prompt as text or chat messages → token ids, a LoRA adapter's name → where it lies: by asking engines.

Only the engine has the tokenizer and the chat template; the controller imports neither.
"""

import json
import logging
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pdxfer.core.errors import PdxferError, UnreachableError
from pdxfer.router.snapshot import EngineView

TIMEOUT_S = 10.0
MAX_TOKENS = 1 << 18
_MAX_ANSWER = 8 << 20
_MAX_LISTED = 16
"""Engines asked for their adapters."""

log = logging.getLogger(__name__)


class TokenizeError(PdxferError):
    """The engine does not take this prompt."""


def find_model(engines: list[EngineView], token: str, model: str) -> tuple[list[EngineView], str]:
    """Engines that serve it, and the path of its LoRA adapter there; empty for a base model, or none named. A name that
    the router does not know as a model's is looked for among the adapters that engines list at /v1/models."""
    there = [engine for engine in engines if engine.state in ("ready", "draining")]
    if not model or any(model == engine.served_names[0] for engine in there if engine.served_names):
        return [engine for engine in there if _serves(engine, model)], ""
    found: dict[str, list[EngineView]] = {}
    asked = there[:_MAX_LISTED]
    with ThreadPoolExecutor(_MAX_LISTED, "pdxfer-models") as pool:  # at once: silent ones cost one timeout, not 16
        paths = pool.map(lambda engine: _find_adapter(engine, token, model), asked)
        for engine, path in zip(asked, paths, strict=True):
            if path:
                found.setdefault(path, []).append(engine)
    if len(found) > 1:
        raise TokenizeError(f"{model!r} lies elsewhere on each engine ({', '.join(sorted(found))}): name one engine")
    for path, serving in found.items():
        return serving, path
    return [engine for engine in there if _serves(engine, model)], ""


def tokenize(
    found: list[EngineView], token: str, model: str, text: str | None, messages: list[dict[str, Any]] | None
) -> list[int]:
    """Token ids. Raises TokenizeError if the prompt is refused, UnreachableError if no engine answers."""
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


def _find_adapter(engine: EngineView, token: str, model: str) -> str:
    """Path of the adapter there; empty where it is not, or nothing is said."""
    try:
        return _adapter(_call(f"{engine.url}/v1/models", token), model)
    except (OSError, ValueError) as error:
        log.info("%s does not list its models: %s", engine.engine_id, error)
        return ""


def _adapter(cards: Any, model: str) -> str:
    """Path of the adapter of this name, as vLLM lists it; empty if there is none."""
    try:
        cards = [card for card in cards["data"] if card["id"] == model and card.get("parent")]
        return str(cards[0]["root"]) if cards else ""
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("/v1/models did not answer with models") from error


def _call(url: str, token: str, body: dict[str, Any] | None = None) -> Any:
    """JSON of an engine's answer."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    data = None if body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, data=data, headers=headers), timeout=TIMEOUT_S) as answer:
        return json.loads(answer.read(_MAX_ANSWER))


def _ask(url: str, token: str, body: dict[str, Any]) -> list[int]:
    try:
        tokens = _call(f"{url}/tokenize", token, body)["tokens"]
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            raise OSError(f"{url}/tokenize answered {error.code}") from error
        raise TokenizeError(f"the engine refuses the prompt: {error.read(500).decode(errors='replace')}") from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"{url}/tokenize did not answer with tokens") from error
    if not isinstance(tokens, list) or len(tokens) > MAX_TOKENS or not all(isinstance(t, int) for t in tokens):
        raise ValueError(f"{url}/tokenize answered with something else than up to {MAX_TOKENS} token ids")
    return tokens
