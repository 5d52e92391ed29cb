"""Server-sent streams: frames of the status page, and events. Bounded in number; a slow reader skips, nothing piles up.

Woken once a second by the board, on whatever event loop serves them.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable

from pdxfer.controller.board import Board
from pdxfer.controller.ui.fragments import fragments
from pdxfer.core.errors import DeadlineError
from pdxfer.router.server import RouterServer

MAX_STREAMS = 64
_LIFE_S = 3600.0
"""Then a stream ends and its reader connects again: one whose host vanished holds its place no longer."""
_QUIET_S = 15.0
"""A comment after so much silence tells reader and middle boxes that the stream lives."""
_EVENTS_AT_ONCE = 2000
_LATEST = 20


class Frames:
    """The newest frame of the page, rendered once however many look. Thread-safe."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._lock = threading.Lock()
        self._wall = 0.0
        self._version = 0
        self._parts: dict[str, tuple[int, object]] = {}
        """Section → version that changed it, content."""

    def since(self, version: int) -> tuple[int, dict[str, object]]:
        """The version now, and the sections that changed after `version`."""
        with self._lock:
            self._render()
            return self._version, {k: content for k, (changed, content) in self._parts.items() if changed > version}

    def _render(self) -> None:
        summary = self._board.summary()
        if summary.wall != self._wall:
            self._wall = summary.wall
            self._version += 1
            parts: dict[str, object] = {**fragments(summary), "latest": self._board.latest_requests(_LATEST)}
            for section, content in parts.items():
                if section not in self._parts or self._parts[section][1] != content:
                    self._parts[section] = (self._version, content)


class Streams:
    """All streams of one controller. Event-loop thread only."""

    def __init__(self, board: Board, router: RouterServer) -> None:
        self._board, self._router = board, router
        self._frames = Frames(board)
        self.num_open = 0

    @property
    def is_full(self) -> bool:
        """No more streams are taken."""
        return self.num_open >= MAX_STREAMS

    async def frames(self) -> AsyncIterator[bytes]:
        """The page's sections, all at first, then those that changed."""
        version = 0

        def news() -> bytes:
            nonlocal version
            try:
                version, changed = self._frames.since(version)
            except DeadlineError:
                return b""
            return b"data: " + json.dumps(changed).encode() + b"\n\n" if changed else b""

        async for part in self._stream(news):
            yield part

    async def events(self, since: int) -> AsyncIterator[bytes]:
        """Events after number `since`; `gap` says how many were lost to a reader that came back too late."""
        last = since

        def news() -> bytes:
            nonlocal last
            found = self._router.events_after(last, _EVENTS_AT_ONCE)
            text = ""
            if found and last and found[0].number > last + 1:
                text += f"event: gap\ndata: {json.dumps({'lost': found[0].number - last - 1})}\n\n"
            for event in found:
                data = {"number": event.number, "wall": event.wall, "kind": event.kind, "detail": event.detail}
                text += f"id: {event.number}\nevent: {event.kind}\ndata: {json.dumps(data)}\n\n"
                last = event.number
            return text.encode()

        async for part in self._stream(news):
            yield part

    async def _stream(self, news: Callable[[], bytes]) -> AsyncIterator[bytes]:
        """`news` now and after each sample, until the board closes or the stream has lived long enough."""
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(woken.set)

        stop = self._board.watch(wake)
        self.num_open += 1
        end = loop.time() + _LIFE_S
        try:
            yield b"retry: 1000\n\n"
            while not self._board.is_closed and loop.time() < end:
                woken.clear()
                part = await asyncio.to_thread(news)
                if part:
                    yield part
                try:
                    await asyncio.wait_for(woken.wait(), _QUIET_S)
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self.num_open -= 1
            stop()
