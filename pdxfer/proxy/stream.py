"""Relays one engine response to the client, byte for byte.

Headers are held until the first body byte, so that they can carry the timeline and so that a failure before it can
still be answered in another way. Nothing is parsed, unless another engine has to continue a lost stream (replay.py).
At most one read (64 KiB of aiohttp's buffer) is in memory: a slow client stops us reading, which stops the engine's
socket.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import NoReturn

import aiohttp
from aiohttp import web

from pdxfer.proxy.engine_http import LegError, leg_error
from pdxfer.proxy.errors import ApiError
from pdxfer.proxy.replay import CannotContinue, Sent

log = logging.getLogger(__name__)

_KEPT_HEADERS = ("Content-Type", "Content-Length", "Content-Encoding", "Retry-After", "WWW-Authenticate", "Allow")


class ClientGone(Exception):
    """The client closed its connection while we wrote."""


class StreamBroken(Exception):
    """The engine's response ended too early, after the client had seen part of it. The client has been told."""


Resume = Callable[[Sent], AsyncIterator[bytes]]
"""The rest of a stream whose engine was lost, from another engine. Raises CannotContinue or LegError."""


class Relay:
    """One response on its way from an engine to a client."""

    def __init__(
        self,
        request: web.Request,
        upstream: aiohttp.ClientResponse,
        *,
        headers: Callable[[], Mapping[str, str]],
        on_first_byte: Callable[[], None],
        hold_s: float,
        deadline: float,
        stall_s: float,
        resume: Resume | None = None,
    ) -> None:
        """`headers` is asked after `on_first_byte` or `hold_s`, whichever comes first. `deadline` in loop time; a
        client that takes nothing for `stall_s` is given up before it.
        With `resume`, an event stream whose engine is lost goes on."""
        self._request, self._upstream = request, upstream
        self._headers, self._on_first_byte = headers, on_first_byte
        self._hold_s, self._deadline, self._stall_s = hold_s, deadline, stall_s
        self._resume = resume if self._is_event_stream() and upstream.status == 200 else None
        self._sent = Sent()
        self._tail = b""

    async def run(self) -> web.StreamResponse:
        """Relay it all. Raises LegError while the client has seen nothing, StreamBroken or ClientGone after that."""
        chunk, response = await self._first_chunk()
        if response is None:
            response = await self._open()
        while chunk:
            await self._pass_on(response, chunk)
            try:
                chunk = await self._read()
            except LegError as error:
                await self._continue(response, error)
                break
        else:
            if self._resume is not None and self._sent.rest:
                await self._write(response, self._sent.rest)
        await self._close(response)
        return response

    async def _pass_on(self, response: web.StreamResponse, chunk: bytes) -> None:
        """Of a stream that may have to be continued, whole events only."""
        if self._resume is not None:
            chunk = self._sent.take(chunk)
        if chunk:
            await self._write(response, chunk)
            self._tail = (self._tail + chunk[-2:])[-2:]

    async def _continue(self, response: web.StreamResponse, error: LegError) -> None:
        """The engine is lost: the rest comes from another one, once, or the client is told."""
        if self._resume is None or error.kind == "timeout":
            await self._break(response, error)
            return
        try:
            async for events in self._resume(self._sent):
                await self._write(response, events)
        except (CannotContinue, LegError) as second:
            log.warning("a lost stream could not be continued: %s", second)
            await self._break(response, error)

    async def _first_chunk(self) -> tuple[bytes, web.StreamResponse | None]:
        """First body bytes (empty: there are none, or another engine's have been passed on), and the response if it had
        to be opened before they came."""
        response = None
        read = asyncio.ensure_future(self._read())
        try:
            await asyncio.wait([read], timeout=self._hold_s)
            if not read.done():
                response = await self._open()
            chunk = await read
        except LegError as error:
            if response is None:
                raise
            await self._continue(response, error)
            chunk = b""
        finally:
            read.cancel()
        if chunk:
            self._on_first_byte()
        return chunk, response

    async def _read(self) -> bytes:
        """Next bytes, empty at the end. Raises LegError."""
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._upstream.content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise leg_error(str(self._upstream.url), error) from error

    async def _open(self) -> web.StreamResponse:
        """Send status and headers."""
        response = web.StreamResponse(status=self._upstream.status)
        for name in _KEPT_HEADERS:
            if name in self._upstream.headers:
                response.headers[name] = self._upstream.headers[name]
        if self._is_event_stream():
            response.headers["Cache-Control"] = "no-cache"
            response.headers["X-Accel-Buffering"] = "no"
        response.headers.update(self._headers())
        await self._to_client(response.prepare(self._request))
        return response

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        await self._to_client(response.write(data))

    async def _close(self, response: web.StreamResponse) -> None:
        await self._to_client(response.write_eof())

    async def _to_client(self, write: Awaitable[object]) -> None:
        """Run a write; a client that takes nothing for too long is gone, and frees its engines' KV."""
        stalled = asyncio.get_running_loop().time() + self._stall_s
        try:
            async with asyncio.timeout_at(min(self._deadline, stalled)):
                await write
        except (ConnectionError, aiohttp.ClientConnectionError, TimeoutError) as error:
            self._abort()
            raise ClientGone(str(error)) from error

    async def _break(self, response: web.StreamResponse, error: LegError) -> NoReturn:
        """Tell the client that no more will come: an error event in a stream, else a cut connection."""
        if self._is_event_stream():
            self._deadline += 5.0  # room for the last words when the deadline itself was the reason
            if self._tail not in (b"", b"\n\n"):
                await self._write(response, b"\n\n")
            await self._write(response, _broken(error).event())
            await self._close(response)
        else:
            self._abort()
        raise StreamBroken(str(error)) from error

    def _abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()

    def _is_event_stream(self) -> bool:
        return self._upstream.content_type == "text/event-stream"


def _broken(error: LegError) -> ApiError:
    if error.kind == "timeout":
        return ApiError(504, "the request's time was over before its last token", code="timeout")
    return ApiError(502, "the decode engine was lost in mid-stream; send the request again", code="engine_lost")
