"""The store process of a host: owns the DRAM tier in shared memory and serves its index to engines over a Unix socket.

Engines read and write in place (shared.py is their side). Whatever an engine holds is tracked by its connection and
comes back when that closes, so a killed engine loses nothing of ours; we outlive engines' restarts.

    python -m pdxfer.store.server --store '{"shared_memory": "/run/pdxfer/store.sock", "tiers": [{"url": "dram:"}]}'
"""

import asyncio
import fcntl
import logging
import os
import socket
import struct
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from pdxfer.core.clock import Clock
from pdxfer.core.errors import ConfigError
from pdxfer.memory.segment import Segment
from pdxfer.store.dram import DramTier
from pdxfer.store.server_session import Session
from pdxfer.store.shared_wire import VERSION, Evicted, Refused, Welcome, pack

log = logging.getLogger(__name__)

MOST_ENGINES = 64
LONGEST_PATH = 107
"""Bytes of sun_path, its final zero taken off."""
NOTICE_PERIOD_S = 0.1
"""Evictions are told to engines this often."""
shared_segment = partial(Segment.shared, name="pdxfer-store")


class StoreServer:
    """Serves one opened DramTier whose segment is shared, at a socket path. The tier is closed with the server."""

    def __init__(self, tier: DramTier, clock: Clock, path: Path) -> None:
        self._tier = tier
        self._clock = clock
        self._path = path
        self._lock_fd: int | None = None
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._sessions: set[Session] = set()

    def __repr__(self) -> str:
        return f"<StoreServer {self._path} engines={len(self._sessions)} {self._tier!r}>"

    @property
    def num_engines(self) -> int:
        """Connections that are attached now."""
        return len(self._sessions)

    async def start(self) -> None:
        """Listen. ConfigError if the path cannot be used or another store process serves it."""
        self._lock_fd = _lock(self._path)
        self._listener = _listen(self._path)
        self._spawn(self._accept(self._listener))
        self._spawn(self._tell_evictions())
        log.info("store: serving %r at %s", self._tier, self._path)

    async def close(self) -> None:
        """Stop listening, end all sessions, close the tier. Idempotent."""
        for session in list(self._sessions):
            session.end()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)
        await self._tier.close()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, or the engine has gone again
                log.warning("store: could not accept an engine: %s", error)
                await asyncio.sleep(NOTICE_PERIOD_S)
                continue
            reason = self._refusal(connection)
            if reason is None:
                self._spawn(self._serve(connection))
            else:
                log.warning("store: refused an engine: %s", reason)
                _send_first(connection, pack(Refused(reason)), None)
                connection.close()

    def _refusal(self, connection: socket.socket) -> str | None:
        pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            return f"process {pid} runs as user {uid}, the store as user {os.geteuid()}; run both as the same user"
        if len(self._sessions) >= MOST_ENGINES:
            return f"{MOST_ENGINES} engines are attached to this store already"
        return None

    async def _serve(self, connection: socket.socket) -> None:
        segment = self._tier.arena.segment
        welcome = pack(Welcome(VERSION, segment.num_bytes, os.getpid()))
        if not _send_first(connection, welcome, segment.fd):
            connection.close()
            return
        session = Session(self._tier, self._clock, self._sessions.discard)
        self._sessions.add(session)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: session, connection)

    async def _tell_evictions(self) -> None:
        while True:
            await asyncio.sleep(NOTICE_PERIOD_S)
            keys = self._tier.take_evicted()
            if keys or keys is None:
                notice = pack(Evicted(keys or [], keys is None))
                for session in self._sessions:
                    session.tell(notice)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("store: bug in serving an engine, which is detached", exc_info=error)


def _lock(path: Path) -> int:
    """Hold `PATH.lock` for life: one store process a path."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"store.shared_memory: cannot use {path}: {error}; choose a directory you own") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise ConfigError(
            f"store.shared_memory: another store process serves {path}; stop it, or choose another path"
        ) from error
    return fd


def _listen(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise ConfigError(f"store.shared_memory: {path} is longer than the {LONGEST_PATH} bytes of a Unix socket")
    path.unlink(missing_ok=True)  # of a store that was killed: we hold the lock
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    mask = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
    finally:
        os.umask(mask)
    listener.listen(MOST_ENGINES)
    return listener


def _send_first(connection: socket.socket, frame: bytes, fd: int | None) -> bool:
    """Into the empty buffer of a new connection; whether it went."""
    try:
        return socket.send_fds(connection, [frame], [] if fd is None else [fd]) == len(frame)
    except OSError as error:
        log.warning("store: an engine went before it was attached: %s", error)
        return False


if __name__ == "__main__":
    from pdxfer.store.server_main import main

    raise SystemExit(main())
