"""An engine half's connection to the router, with an IO thread of its own; vLLM's threads only put into its queue.

Says hello when connected and when the router does not know it, reports at each heartbeat, notices a router that does
not answer, and finds a restarted one again without help.
"""

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from pdxfer.core.clock import SYSTEM_CLOCK, Clock
from pdxfer.core.errors import ProtocolError
from pdxfer.core.logs import own_level, set_own_level
from pdxfer.router.proxy_client import ProxyClient
from pdxfer.router.session import Session
from pdxfer.wire.keys import ClientSecurity
from pdxfer.wire.manage import SetLogLevel
from pdxfer.wire.messages import FromRouter, Goodbye, Heartbeat, HeartbeatAck, Message, Refused
from pdxfer.wire.sockets import DealerSocket, new_route
from pdxfer.wire.version import Decoder, encode

__all__ = ["ClientSecurity", "MemberClient", "ProxyClient"]

log = logging.getLogger(__name__)

MAX_QUEUED = 16384
"""Messages kept while the router is away; more are dropped."""
_FAREWELL_S = 0.2
_AFTER_BUG_S = 0.1


class MemberClient:
    """Connects at once and for good. `hello`, `beat`, `on_message` and `on_link` run on the IO thread; keep them short.

    `hello` gives what the router must know of us, its Hello or WorkerHello first.
    """

    def __init__(
        self,
        *,
        endpoint: str,
        identity: str,
        security: ClientSecurity | None,
        hello: Callable[[], list[Message]],
        beat: Callable[[], Heartbeat],
        on_message: Callable[[FromRouter], None],
        on_link: Callable[[bool], None],
        heartbeat_s: float = 0.5,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._endpoint, self._identity, self._security = endpoint, identity, security
        self._hello, self._beat = hello, beat
        self._on_message, self._on_link = on_message, on_link
        self._clock = clock
        self._session = Session(heartbeat_s, clock.now())
        self._was_connected = False
        self._complaint = ""
        self._decoder: Decoder[FromRouter] = Decoder(FromRouter)  # type: ignore[arg-type]
        self._queue: deque[Message] = deque()
        self._num_dropped = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake)
        self._is_roused = False
        self._closing = threading.Event()
        self._socket = self._open()
        self._thread = threading.Thread(target=self._run, name=f"pdxfer-{identity}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        link = "connected" if self.connected else "offline"
        return f"<MemberClient {self._identity} → {self._endpoint} {link} queued={len(self._queue)}>"

    @property
    def connected(self) -> bool:
        """The router knows us and answered within three heartbeats."""
        return self._session.is_connected

    @property
    def num_dropped(self) -> int:
        """Messages that `send` could not keep."""
        return self._num_dropped

    def send(self, message: Message) -> bool:
        """Queue a message and wake the IO thread; any thread, never blocks. False: dropped, and counted."""
        if self._closing.is_set() or len(self._queue) >= MAX_QUEUED:
            self._num_dropped += 1
            return False
        self._queue.append(message)
        if not self._is_roused:  # one write, however many messages follow before the thread looks
            self._is_roused = True
            os.eventfd_write(self._wake, 1)
        return True

    def close(self, goodbye: str = "") -> None:
        """End the thread; with `goodbye`, leave the router on purpose first. Idempotent."""
        if goodbye and self.connected:
            self.send(Goodbye(reason=goodbye))
        self._closing.set()
        os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- IO thread -------------------------------------------------------------------------------------------

    def _open(self) -> DealerSocket:
        socket = DealerSocket(self._endpoint, new_route(self._identity), self._security)
        socket.register(self._wake)
        return socket

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._turn()
            except Exception:
                # A callback's bug must not cost the engine its place in the cluster.
                log.exception("router client of %s failed: please report this", self._identity)
                self._closing.wait(_AFTER_BUG_S)
        self._flush()
        self._socket.close(_FAREWELL_S)

    def _turn(self) -> None:
        now = self._clock.now()
        self._socket.wait(self._session.wait_s(now), to_send=self._session.is_hello_due(now))
        self._settle_wake()
        self._receive()
        self._report(self._clock.now())
        self._flush()
        self._tell_link()

    def _settle_wake(self) -> None:
        """Read, then clear: a message queued in between is flushed in this turn."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass
        self._is_roused = False

    def _receive(self) -> None:
        while (payload := self._socket.receive()) is not None:
            try:
                message = self._decoder.decode(payload)
            except ProtocolError as error:
                log.warning("%s dropped a message of the router: %s", self._identity, error)
                continue
            if isinstance(message, HeartbeatAck):
                self._session.acked(message.known, self._clock.now())
                self._tell_link()
                continue
            if isinstance(message, SetLogLevel):
                set_own_level(message.level)
                log.info("log level is %s from now on, as the controller says", message.level)
                self._session.beat_now()
                continue
            if isinstance(message, Refused):
                log.error("the router at %s refused %s: %s", self._endpoint, self._identity, message.reason)
                self._session.refused(self._clock.now())
            self._on_message(message)

    def _report(self, now: float) -> None:
        if self._session.judge(now):
            self._complain(self._socket.why_silent())
            self._socket.close()
            self._socket = self._open()
        if not self._socket.can_send:
            self._session.lost(now)
            self._session.take_beat(now)  # due or not: an overdue one would turn the wait into a spin
            return
        if self._session.is_hello_due(now):
            self._session.said_hello(now)
            for message in self._hello():
                self._socket.send(encode(message))
        if self._session.take_beat(now):
            beat = replace(self._beat(), lag_s=self._session.lag_s, log_level=own_level())
            self._socket.send(encode(beat))

    def _flush(self) -> None:
        """Queued messages wait until the router knows us: hello comes first."""
        while self._queue and self._session.is_connected:
            if not self._socket.send(encode(self._queue[0])):
                return
            self._queue.popleft()

    def _tell_link(self) -> None:
        is_connected = self._session.is_connected
        if self._was_connected != is_connected:
            self._was_connected, self._complaint = is_connected, ""
            self._on_link(is_connected)

    def _complain(self, why: str) -> None:
        """Once a reason, until the router is there again."""
        if why != self._complaint:
            self._complaint = why
            log.warning("%s: %s", self._identity, why)
