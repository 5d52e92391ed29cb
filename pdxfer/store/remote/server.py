"""One server as a tier sees it: a few sessions with a thread each, and whether it answers.

A server that fails is *away*: calls end at once, a background task makes a new connection and asks for a sign of life,
first soon, then at growing intervals of at most 2 s with jitter. Servers that answer such questions but not calls
(too slow) rest longer and longer in the same way, so a request pays for that at most once in a while.
"""

import asyncio
import logging
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.cpus import unpin_current_thread
from pdxfer.store.remote.errors import Reason, ServerError
from pdxfer.store.remote.session import Session
from pdxfer.store.remote.stream import remaining

log = logging.getLogger(__name__)

T = TypeVar("T")
FIRST_REST_S = 0.05
MAX_REST_S = 2.0
PROBE_S = 1.5
"""A new connection and a sign of life take at most this; with the longest rest, a server is found within 4 s."""
_HARMLESS = (Reason.DAMAGED, Reason.BUSY, Reason.MOVED, Reason.FULL)
"""Failures that say nothing about whether the server answers."""


class Server:
    """`run` calls on a session; `up` says whether that makes sense. Loop only, unless said otherwise."""

    def __init__(
        self,
        name: str,
        connect: Callable[[float], Session],
        *,
        sessions: int,
        failed: Callable[[Reason], None],
        away: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.up = True
        self._connect = connect
        self._failed = failed
        self._away = away
        self._threads = ThreadPoolExecutor(sessions, "pdxfer-remote", initializer=unpin_current_thread)
        self._free = asyncio.Semaphore(sessions)
        self._lock = threading.Lock()
        self._idle: list[Session] = []
        self._strikes = 0
        self._said = ""
        self._recovery: asyncio.Task[None] | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<Server {self.name} {'up' if self.up else 'away'} idle={len(self._idle)} strikes={self._strikes}>"

    async def start(self, end: float) -> None:
        """First contact; a server that does not answer is away and looked for in the background."""
        try:
            await self.run(lambda session: session.ping(end), end)
        except ServerError as error:
            log.debug("%s: first contact: %s", self.name, error)

    async def run(
        self,
        call: Callable[[Session], T],
        end: float,
        *,
        borrows: bool = False,
        drop: Callable[[T], None] = lambda result: None,
    ) -> T:
        """`call` in a thread, on a session of its own. Raises ServerError, by `end`. Cancelled or late, the call is
        aborted; its result then goes to `drop`. `borrows`: it reads the caller's memory, so we return after it only."""
        if not self.up or self._closed:
            raise ServerError(Reason.UNREACHABLE, f"{self.name} does not answer")
        await self._slot(end)
        if self._closed:
            self._free.release()
            raise ServerError(Reason.UNREACHABLE, f"{self.name} was closed")
        job = _Job(self, call, end)
        future = asyncio.get_running_loop().run_in_executor(self._threads, job.run)
        future.add_done_callback(lambda _: self._free.release())
        is_ours = False
        try:
            await asyncio.wait((future,), timeout=max(0.0, end - SYSTEM_CLOCK.now()) + _GRACE_S)
            is_ours = future.done()
        finally:
            if not future.done():
                job.abort()
            if not is_ours:  # it may be done: we were cancelled in the turn of the loop in which it came
                future.add_done_callback(lambda done: _dropped(done, drop))
            if borrows:
                await _ended(future)
        try:
            if not future.done() or job.aborted:
                raise ServerError(Reason.TIMEOUT, f"{self.name}: a call overran its deadline")
            result = future.result()
        except ServerError as error:
            self._note(error)
            raise
        self._strikes = 0
        return result

    async def close(self) -> None:
        """End sessions and threads; calls in progress fail. Idempotent."""
        with self._lock:
            self._closed, self.up = True, False
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.gather(self._recovery, return_exceptions=True)
            self._recovery = None
        self._drop_idle()
        self._threads.shutdown(wait=False, cancel_futures=False)

    # -- sessions: worker threads -------------------------------------------------------------------------------------

    def _take(self, end: float) -> tuple[Session, bool]:
        """A session, and whether it was used before."""
        with self._lock:
            if self._idle:
                return self._idle.pop(), True
        return self._connect(min(end, SYSTEM_CLOCK.now() + PROBE_S)), False

    def _keep(self, session: Session) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(session)
                return
        session.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()

    # -- health -------------------------------------------------------------------------------------------------------

    async def _slot(self, end: float) -> None:
        try:
            async with asyncio.timeout(remaining(end)):
                await self._free.acquire()
        except TimeoutError:
            self._failed(Reason.BUSY)
            raise ServerError(Reason.BUSY, f"all connections to {self.name} are in use") from None

    def _note(self, error: ServerError) -> None:
        """Count a failure; a server that seems away is looked for."""
        self._failed(error.reason)
        if error.reason is Reason.MOVED:
            self._away()
        if error.reason in _HARMLESS or error.clean or self._closed:
            return
        self._strikes += 1
        self._drop_idle()
        if self.up:
            self.up = False
            self._say(error)
            self._away()
            self._recovery = asyncio.get_running_loop().create_task(self._recover(), name=f"find {self.name}")

    async def _recover(self) -> None:
        while True:
            await asyncio.sleep(self._rest_s())
            loop = asyncio.get_running_loop()
            try:
                await loop.run_in_executor(None, self._probe)
            except Exception as raised:  # also what a session must not raise: nobody else looks for the server
                self._strikes += 1
                self._say(raised if isinstance(raised, ServerError) else ServerError(Reason.PROTOCOL, repr(raised)))
                self._away()
                continue
            self.up, self._said = True, ""
            log.info("%s answers again", self.name)
            return

    def _probe(self) -> None:
        end = SYSTEM_CLOCK.now() + PROBE_S
        session = self._connect(end)
        try:
            session.ping(end)
        except BaseException:
            session.close()
            raise
        self._keep(session)

    def _rest_s(self) -> float:
        longest = min(MAX_REST_S, FIRST_REST_S * 2.0 ** min(self._strikes, 16))
        return longest * random.uniform(0.5, 1.0)

    def _say(self, error: ServerError) -> None:
        """Once a reason, not once a try."""
        if self._said == error.reason:
            return
        self._said = error.reason
        if error.reason is Reason.REFUSED:
            log.error("%s refuses us: %s; until that is changed the tier holds nothing", self.name, error)
        else:
            log.warning("%s: %s; its values are misses until it answers again", self.name, error)


_GRACE_S = 0.05
"""Sessions of our own end by the deadline; their threads may need a moment to say so."""


class _Job(Generic[T]):
    """One call in a worker thread."""

    def __init__(self, server: Server, call: Callable[[Session], T], end: float) -> None:
        self._server, self._call, self._end = server, call, end
        self._lock = threading.Lock()
        self._session: Session | None = None
        """While it is ours: one that went back to the server may be somebody else's already."""
        self.aborted = False

    def abort(self) -> None:
        """Any thread."""
        with self._lock:
            self.aborted = True
            if self._session is not None:
                self._session.abort()

    def run(self) -> T:
        """A connection that broke while it was idle is replaced once."""
        while True:
            session, used = self._server._take(self._end)
            with self._lock:
                self._session = session
            try:
                return self._use(session)
            except ServerError as error:
                if not used or error.clean or error.reason is not Reason.UNREACHABLE or self.aborted:
                    raise
                self._server._drop_idle()

    def _use(self, session: Session) -> T:
        good = False
        try:
            if self.aborted:
                raise ServerError(Reason.BUSY, "given up by the caller")
            result = self._call(session)
            good = True
            return result
        except ServerError as error:
            good = error.clean
            raise
        finally:
            with self._lock:
                self._session = None
                is_kept = good and not self.aborted
            if is_kept:
                self._server._keep(session)
            else:
                session.close()


async def _ended(future: "asyncio.Future[T]") -> None:
    """Until it is done, also if we are cancelled meanwhile: a thread still reads memory that is not ours."""
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError:
            continue


def _dropped(future: "asyncio.Future[T]", drop: Callable[[T], None]) -> None:
    if not future.cancelled() and future.exception() is None:
        drop(future.result())
