"""The pooled HTTP client to all engines. Translates aiohttp's errors into LegError; knows nothing of pairs.

Connections are closed, not returned, when a response is left before its end: that is how vLLM notices an abort.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Literal

import aiohttp
import msgspec

from pdxfer.proxy.body import JsonObject

log = logging.getLogger(__name__)

FailureKind = Literal["connect", "status", "reset", "timeout"]

KEEPALIVE_S = 2.0
"""Shorter than the 5 s after which vLLM's uvicorn closes idle connections: re-using one at that moment fails."""
MAX_DISCARDED_BYTES = 8 << 20
"""Longest body of a prefill leg, or list of models, that is read."""


class LegError(Exception):
    """An engine did not answer as it should; `kind` is a label of pdxfer_proxy_leg_failures_total."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind


class EngineHttp:
    """Sends requests to engines by URL. Made and used on the event-loop thread."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
        )

    async def send(
        self, method: str, url: str, data: bytes, headers: Mapping[str, str], deadline: float
    ) -> aiohttp.ClientResponse:
        """Status and headers of the answer; the caller reads or closes it. `deadline` is in event-loop time."""
        try:
            async with asyncio.timeout_at(deadline):
                return await self._session.request(method, url, data=data, headers=headers, allow_redirects=False)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise leg_error(url, error) from error

    async def get_models(self, base_url: str, headers: Mapping[str, str], timeout_s: float) -> list[JsonObject]:
        """Entries of an engine's /v1/models. Raises LegError."""
        url = f"{base_url}/v1/models"
        deadline = asyncio.get_running_loop().time() + timeout_s
        response = await self.send("GET", url, b"", headers, deadline)
        body = await read_all(response, deadline)
        if response.status != 200:
            raise refused(url, response.status, body)
        try:
            return msgspec.json.decode(body, type=_ModelList).data
        except msgspec.MsgspecError as error:
            raise LegError("status", f"{url} sent no list of models: {error}") from error

    async def tokenize(
        self, base_url: str, model: str, text: str, headers: Mapping[str, str], deadline: float
    ) -> list[int]:
        """Token ids of a text, without special tokens, by an engine's own tokenizer. Raises LegError."""
        if not text:
            return []
        url = f"{base_url}/tokenize"
        data = msgspec.json.encode({"model": model, "prompt": text, "add_special_tokens": False})
        response = await self.send("POST", url, data, headers, deadline)
        body = await read_all(response, deadline)
        if response.status != 200:
            raise refused(url, response.status, body)
        try:
            return msgspec.json.decode(body, type=_Tokens).tokens
        except msgspec.MsgspecError as error:
            raise LegError("status", f"{url} sent no tokens: {error}") from error

    async def close(self) -> None:
        await self._session.close()


async def chunks(response: aiohttp.ClientResponse, deadline: float) -> AsyncIterator[bytes]:
    """The body as it comes. Raises LegError."""
    try:
        async with asyncio.timeout_at(deadline):
            async for part in response.content.iter_any():
                yield part
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise leg_error(str(response.url), error) from error


async def read_all(response: aiohttp.ClientResponse, deadline: float) -> bytes:
    """The body, up to MAX_DISCARDED_BYTES. Closes the response whatever happens. Raises LegError."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout_at(deadline):
            async for part in response.content.iter_any():
                size += len(part)
                if size > MAX_DISCARDED_BYTES:
                    raise LegError("reset", f"{response.url} sent more than {MAX_DISCARDED_BYTES} bytes")
                parts.append(part)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise leg_error(str(response.url), error) from error
    finally:
        response.close()
    return b"".join(parts)


def leg_error(url: str, error: Exception) -> LegError:
    """What an exception of aiohttp means for a leg."""
    text = f"{url}: {type(error).__name__} {error}".strip()
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError | ValueError):  # or InvalidURL
        return LegError("connect", text)
    if isinstance(error, TimeoutError):
        return LegError("timeout", text)
    return LegError("reset", text)


def refused(url: str, status: int, body: bytes) -> LegError:
    """An engine's error. Its text often quotes the request, so it is logged at DEBUG only and goes no further."""
    log.debug("%s answered %d: %s", url, status, body[:200].decode("utf-8", "replace"))
    return LegError("status", f"{url} answered {status}")


class _ModelList(msgspec.Struct):
    data: list[dict[str, object]]


class _Tokens(msgspec.Struct):
    tokens: list[int]
