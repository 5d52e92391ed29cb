"""The proxy's connection to the router, on its asyncio loop: no thread, one wake per batch of messages.

A Pair is answered once. When its caller gives up, its place in the router's queue is; an answer that comes all the
same is released here. Pairs without an answer are asked again when the connection returns.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from pdxfer.core.clock import SYSTEM_CLOCK, Clock
from pdxfer.core.errors import ProtocolError, UnreachableError
from pdxfer.core.ids import new_incarnation, new_request_id
from pdxfer.core.logs import own_level, set_own_level
from pdxfer.router.session import Session
from pdxfer.wire.keys import ClientSecurity
from pdxfer.wire.manage import SetLogLevel
from pdxfer.wire.messages import (
    Busy,
    Ended,
    FromRouter,
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    LegFailed,
    Local,
    Message,
    Pair,
    Pairing,
    ProxyHello,
    Redispatch,
    Refused,
    Release,
    Stamp,
)
from pdxfer.wire.sockets import DealerSocket, new_route
from pdxfer.wire.version import Decoder, encode

log = logging.getLogger(__name__)

MAX_QUEUED = 16384
"""Releases and failures kept while the router is away; more are dropped."""
_FAREWELL_S = 0.1

Answer = Pairing | Local | Busy
Notice = Stamp | Ended | LegFailed | Redispatch


class ProxyClient:
    """Connects at `start` and for good. All methods belong to the loop that called `start`."""

    def __init__(
        self,
        *,
        endpoint: str,
        proxy_id: str,
        security: ClientSecurity | None,
        on_message: Callable[[Notice], None],
        on_link: Callable[[bool], None] | None = None,
        heartbeat_s: float = 0.5,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._endpoint, self._proxy_id, self._security = endpoint, proxy_id, security
        self._on_message, self._on_link = on_message, on_link
        self._clock = clock
        self._incarnation = new_incarnation()
        self._session = Session(heartbeat_s, clock.now())
        self._was_connected = False
        self._complaint = ""
        self._decoder: Decoder[FromRouter] = Decoder(FromRouter)  # type: ignore[arg-type]
        self._asked: dict[str, tuple[Pair, asyncio.Future[Answer]]] = {}
        self._queue: deque[Message] = deque()
        self._num_dropped = 0
        self._socket: DealerSocket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_drain_due = False

    def __repr__(self) -> str:
        link = "connected" if self.connected else "offline"
        return f"<ProxyClient {self._proxy_id} → {self._endpoint} {link} asked={len(self._asked)}>"

    @property
    def connected(self) -> bool:
        """The router knows us and answered within three heartbeats."""
        return self._session.is_connected

    @property
    def num_dropped(self) -> int:
        """Messages that `send` could not keep."""
        return self._num_dropped

    async def start(self) -> None:
        """Begin to connect; returns without waiting for the router."""
        self._loop = asyncio.get_running_loop()
        self._open()
        self._beat()

    async def pair(self, request: Pair, timeout_s: float) -> Answer:
        """Where to send one request. Raises UnreachableError when no answer came in time."""
        assert self._loop is not None, "ProxyClient.start was not awaited"
        asked = request if request.request_id not in self._asked else replace(request, request_id=new_request_id())
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._asked[asked.request_id] = (asked, future)
        if self.connected:
            self._put(asked)
        is_taken = False
        try:
            await asyncio.wait((future,), timeout=timeout_s)
            is_taken = future.done()
        finally:
            self._asked.pop(asked.request_id, None)
            if not is_taken and future.done():
                self._give_back(future.result())
            elif not is_taken and self.connected:
                self.send(Release(transfer_id=asked.request_id, reason="nobody waits for an answer any more"))
        if not is_taken:
            state = "is connected but did not answer" if self.connected else "cannot be reached"
            raise UnreachableError(
                f"no pair for {request.request_id} within {timeout_s:g} s: the router at {self._endpoint} {state}"
            )
        answer = future.result()
        return answer if asked is request else replace(answer, request_id=request.request_id)

    def send(self, message: Message) -> bool:
        """Tell the router; never blocks. False: dropped, and counted."""
        if self._socket is None or len(self._queue) >= MAX_QUEUED:
            self._num_dropped += 1
            return False
        self._queue.append(message)
        self._flush()
        return True

    async def close(self) -> None:
        """Leave the router; open questions fail. Idempotent."""
        if self._socket is None:
            return
        if self.connected:
            self.send(Goodbye(reason="proxy stops"))
        if self._timer is not None:
            self._timer.cancel()
        self._shut(_FAREWELL_S)
        for _, future in self._asked.values():
            if not future.done():
                future.set_exception(UnreachableError(f"the connection to the router at {self._endpoint} was closed"))

    # ---- loop callbacks --------------------------------------------------------------------------------------

    def _open(self) -> None:
        assert self._loop is not None
        self._socket = DealerSocket(self._endpoint, new_route(f"proxy/{self._proxy_id}"), self._security)
        self._loop.add_reader(self._socket.fd, self._on_ready)

    def _shut(self, linger_s: float) -> None:
        assert self._loop is not None and self._socket is not None
        self._loop.remove_reader(self._socket.fd)
        self._socket.close(linger_s)
        self._socket = None

    def _beat(self) -> None:
        """Once a heartbeat: report, and notice silence, after what has come is read."""
        assert self._loop is not None
        self._timer = self._loop.call_later(self._session.heartbeat_s, self._beat)  # first: what follows may raise
        self._on_ready()
        now = self._clock.now()
        if self._session.judge(now):
            assert self._socket is not None
            self._complain(self._socket.why_silent())
            self._shut(0.0)
            self._open()
        if self._socket is not None and self._socket.can_send:
            self._greet(now)
            self._report()
        self._on_ready()

    def _on_ready(self) -> None:
        """The descriptor is edge-triggered: take everything, then see whether hello can be said."""
        self._is_drain_due = False
        if self._socket is None:
            return
        now = self._clock.now()
        while self._socket is not None and (payload := self._socket.receive()) is not None:
            self._take(payload, now)
        if self._socket is not None:
            if self._socket.can_send:
                self._greet(now)
            else:
                self._session.lost(now)
        self._tell_link()

    def _report(self) -> None:
        beat = Heartbeat(incarnation=self._incarnation, wall=self._clock.wall(), log_level=own_level())
        self._put(beat)

    def _greet(self, now: float) -> None:
        if self._session.is_hello_due(now) and self._socket is not None:
            self._session.said_hello(now)
            self._put(ProxyHello(proxy_id=self._proxy_id))

    def _take(self, payload: bytes, now: float) -> None:
        try:
            message = self._decoder.decode(payload)
        except ProtocolError as error:
            log.warning("proxy dropped a message of the router: %s", error)
            return
        if isinstance(message, HeartbeatAck):
            self._session.acked(message.known, now)
        elif isinstance(message, Pairing | Local | Busy):
            self._answer(message)
        elif isinstance(message, Stamp | Ended | LegFailed | Redispatch):
            self._on_message(message)
        elif isinstance(message, SetLogLevel):
            set_own_level(message.level)
            log.info("log level is %s from now on, as the controller says", message.level)
            self._report()
        elif isinstance(message, Refused):
            log.error("the router at %s refused proxy %s: %s", self._endpoint, self._proxy_id, message.reason)
            self._session.refused(now)

    def _answer(self, answer: Answer) -> None:
        _, future = self._asked.pop(answer.request_id, (None, None))
        if future is not None and not future.done():
            future.set_result(answer)
        else:
            self._give_back(answer)

    def _give_back(self, answer: Answer) -> None:
        if isinstance(answer, Pairing):
            self.send(Release(transfer_id=answer.transfer_id, reason="nobody waits for this pairing any more"))

    def _put(self, message: Message) -> bool:
        """Send now. A send may swallow the descriptor's edge, so look for input once more."""
        assert self._loop is not None
        if self._socket is None or not self._socket.send(encode(message)):
            return False
        if not self._is_drain_due:
            self._is_drain_due = True
            self._loop.call_soon(self._on_ready)
        return True

    def _flush(self) -> None:
        while self._queue and self._session.is_connected and self._put(self._queue[0]):
            self._queue.popleft()

    def _tell_link(self) -> None:
        is_connected = self._session.is_connected
        if self._was_connected == is_connected:
            return
        self._was_connected, self._complaint = is_connected, ""
        if is_connected:
            log.info("proxy %s joined the router at %s", self._proxy_id, self._endpoint)
            for asked, _ in list(self._asked.values()):
                self._put(asked)
            self._flush()
        else:
            log.warning("proxy %s lost the router at %s", self._proxy_id, self._endpoint)
        if self._on_link is not None:
            self._on_link(is_connected)

    def _complain(self, why: str) -> None:
        """Once a reason, until the router is there again."""
        if why != self._complaint:
            self._complaint = why
            log.warning("proxy %s: %s", self._proxy_id, why)
