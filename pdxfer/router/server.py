"""The router's loop: one thread drains the ROUTER socket into RouterState and sends what it decides.

Everything else (controller, metrics) asks through `snapshot`, `events` and `drain`, which are thread-safe. Malformed
messages are dropped, counted and logged at a bounded rate; nothing that members send ends the loop.
"""

import logging
import os
import secrets
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import islice

from pdxfer.core.clock import SYSTEM_CLOCK, Clock
from pdxfer.core.errors import ConfigError, DeadlineError, ProtocolError
from pdxfer.metrics.spans import Spans
from pdxfer.router.events import (
    Action,
    Event,
    Happened,
    Log,
    Observed,
    Received,
    Send,
    SetCreditLimit,
    SetDrain,
    SetPolicy,
    SetRole,
    Stop,
    Tell,
    TellProxy,
    Tick,
    Unreachable,
)
from pdxfer.router.flood import Flood
from pdxfer.router.pair_spans import PairSpans
from pdxfer.router.settings import LIVE, RouterSettings
from pdxfer.router.snapshot import Snapshot
from pdxfer.router.state import RouterState
from pdxfer.wire.keys import ServerSecurity
from pdxfer.wire.messages import FromMember, Heartbeat, Pair
from pdxfer.wire.sockets import RouterSocket, Sent
from pdxfer.wire.version import Decoder, encode

__all__ = ["EventRecord", "RouterServer", "RouterSettings"]

log = logging.getLogger(__name__)

_BATCH = 256
"""Messages handled between two looks at the clock."""
_BEATS = 4
"""Heartbeats handled between two looks at the socket."""
_CATCH_UP_S = 0.5
"""How long a tick waits for what has come to be read."""
_EVENTS_KEPT = 16384
_EVENTS_LISTED = 1000
"""Given out at once."""
_SAME_LINE_S = 10.0
"""A log line is not repeated within this time."""
_LINES_REMEMBERED = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """One entry of the recent events."""

    number: int
    """Grows by one with each event since start."""
    wall: float
    kind: str
    detail: dict[str, str] = field(default_factory=dict)


class RouterServer:
    """One router. `start` binds (raises ConfigError) and returns; `close` ends the thread. Both once."""

    def __init__(
        self,
        settings: RouterSettings,
        security: ServerSecurity | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        spans: Spans | None = None,
    ) -> None:
        """`spans` is the caller's to close."""
        self._traces = PairSpans(spans) if spans is not None else None
        self._settings = settings
        self._security = security
        self._clock = clock
        self._state = RouterState(settings, secret=secrets.token_bytes(32))
        self._decoder: Decoder[FromMember] = Decoder(FromMember)  # type: ignore[arg-type]
        self._flood = Flood(settings.message_rate)
        self._socket: RouterSocket | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake)
        self._inbox: deque[Event | Future[Snapshot]] = deque()
        self._thread = threading.Thread(target=self._run, name="pdxfer-router", daemon=True)
        self._policy_lock = threading.Lock()
        self._closing = threading.Event()
        self._closed = threading.Event()
        self._events: deque[EventRecord] = deque(maxlen=_EVENTS_KEPT)
        self._num_events = 0
        self._counts: Counter[str] = Counter()
        """Messages the loop itself dropped, by reason; joined with the state's in snapshots."""
        self._lines: dict[str, float] = {}
        self.listeners: list[Callable[[Observed | EventRecord], None]] = []
        """Called on the router's thread with each report and event; they must return at once. Set before `start`, or
        append and never remove."""

    def __repr__(self) -> str:
        where = self._socket.endpoint if self._socket else self._settings.bind
        return f"<RouterServer {where} engines={len(self._state.cluster.engines)} leases={len(self._state.leases)}>"

    @property
    def endpoint(self) -> str:
        """Where it listens, port included. Only after `start`."""
        assert self._socket is not None, "the router has not been started"
        return self._socket.endpoint

    def start(self) -> None:
        """Bind and serve in a thread of our own."""
        self._socket = RouterSocket(self._settings.bind, self._security, allow_insecure=self._settings.allow_insecure)
        self._socket.register(self._wake)
        log.info("router listens on %s, keys %s", self.endpoint, "on" if self._security else "off")
        self._thread.start()

    def serve_forever(self) -> None:
        """`start`, then block until `close` is called from elsewhere."""
        self.start()
        self._closed.wait()

    def close(self) -> None:
        """Stop at once; members notice by their heartbeats. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread.is_alive():
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        if self._socket is not None:
            self._socket.close()
        self._closed.set()

    # ---- for other threads -----------------------------------------------------------------------------------

    def snapshot(self, timeout_s: float = 2.0) -> Snapshot:
        """The state now. Raises DeadlineError if the loop does not answer."""
        reply: Future[Snapshot] = Future()
        self._post(reply)
        try:
            return reply.result(timeout_s)
        except TimeoutError as error:
            raise DeadlineError(f"the router's loop did not answer within {timeout_s:g} s") from error

    def events(self) -> list[EventRecord]:
        """The most recent events, oldest first."""
        return self.events_after(0, _EVENTS_LISTED)

    def events_after(self, number: int, limit: int) -> list[EventRecord]:
        """The newest `limit` events with a larger number, oldest first. A number that we have not reached yet is from
        another life of the router: then all count."""
        newest = self._num_events
        number = number if number <= newest else 0
        wanted = max(0, min(limit, newest - number))
        while True:
            try:
                found = [event for event, _ in zip(reversed(self._events), range(wanted), strict=False)]
            except RuntimeError:  # the router's thread appended meanwhile
                continue
            return [event for event in reversed(found) if event.number > number]

    def drain(self, engine_id: str, on: bool) -> None:
        """Take an engine out of new pairings, or back. Unknown ids do nothing."""
        self._post(SetDrain(engine_id, on))

    def operate(self, change: SetRole | SetCreditLimit | Tell | TellProxy) -> None:
        """An operator's wish. Unknown members are left alone."""
        self._post(change)

    def set_policy(self, changes: Mapping[str, float]) -> RouterSettings:
        """Change live settings (names of settings.LIVE). Raises ConfigError for a value out of range."""
        wrong = sorted(set(changes) - set(LIVE))
        if wrong:
            named = ", ".join(wrong)
            raise ConfigError(f"{named} cannot be changed while the router runs; these can: {', '.join(LIVE)}")
        with self._policy_lock:
            self._settings = replace(self._settings, **changes)  # type: ignore[arg-type]
            self._post(SetPolicy(self._settings))
            return self._settings

    def stop_pairing(self) -> None:
        """Answer Busy from now on; running transfers may end."""
        self._post(Stop())

    def _post(self, item: "Event | Future[Snapshot]") -> None:
        self._inbox.append(item)
        os.eventfd_write(self._wake, 1)

    # ---- the loop --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._socket is not None
        next_tick = self._clock.now() + self._settings.tick_s
        while not self._closing.is_set():
            self._socket.wait(next_tick - self._clock.now())
            self._drain_socket(self._socket)
            self._drain_inbox()
            if self._clock.now() >= next_tick:
                self._catch_up(self._socket)
                self._handle(Tick())
                next_tick = self._clock.now() + self._settings.tick_s

    def _catch_up(self, socket: RouterSocket) -> None:
        """Before silence is judged: a heartbeat that waits behind other messages was said."""
        end = self._clock.now() + _CATCH_UP_S
        while not self._drain_socket(socket) and self._clock.now() < end:
            pass

    def _drain_socket(self, socket: RouterSocket) -> bool:
        """Handle a batch; True when nothing more has come.

        Heartbeats wait for the rest: those of all members can come at once, and nobody needs their answers soon. What
        one member says is handled in its order.
        """
        beats: dict[bytes, Received] = {}
        for _ in range(_BATCH):
            received = socket.receive()
            if received is not None:
                self._take(*received, beats)
            elif beats:
                for route in list(islice(beats, _BEATS)):
                    self._handle(beats.pop(route))
            else:
                return True
        for beat in beats.values():
            self._handle(beat)
        return False

    def _take(self, route: bytes, payload: bytes, beats: dict[bytes, Received]) -> None:
        """Handle one message; a heartbeat goes to `beats`, and is due before the next message of its member."""
        if not self._flood.admits(route, len(payload), self._clock.now()):
            self._counts["rate"] += 1
            limit = f"{self._settings.message_rate:g} messages/s (router.message_rate)"
            self._log_line("warning", f"messages dropped: {route[:80]!r} sends more than {limit}")
            return
        try:
            message = self._decoder.decode(payload)
        except ProtocolError as error:
            self._counts["malformed"] += 1
            self._log_line("warning", f"message dropped, from {route[:80]!r}: {error}", kind="malformed")
            return
        event = Received(route, message, self._clock.wall())
        if beat := beats.pop(route, None):
            self._handle(beat)
        if isinstance(message, Heartbeat):
            beats[route] = event
            return
        if self._traces is not None and isinstance(message, Pair):
            self._traces.asked(route, message, event.wall)
        self._handle(event)

    def _drain_inbox(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Future):
                item.set_result(self._snapshot())
            else:
                self._handle(item)

    def _handle(self, event: Event) -> None:
        try:
            for action in self._state.handle(event, self._clock.now()):
                self._act(action)
        except Exception:
            # Our bug, found by a member's message: report it and keep serving the others.
            self._counts["internal"] += 1
            log.exception("router failed on %s: please report this", type(event).__name__)

    def _act(self, action: Action) -> None:
        if isinstance(action, Send):
            if self._traces is not None:
                self._traces.answered(action.routes, action.message, self._clock.wall())
            payload = encode(action.message)
            for route in action.routes:
                self._send(route, payload)
        elif isinstance(action, Log):
            self._log_line(action.level, action.text)
        elif isinstance(action, Observed):
            for listener in self.listeners:
                listener(action)
        else:
            self._record(action)

    def _send(self, route: bytes, payload: bytes) -> None:
        assert self._socket is not None
        sent = self._socket.send(route, payload)
        if sent is not Sent.OK:
            self._counts[sent.value] += 1
            if sent is Sent.NO_ROUTE:
                self._post(Unreachable(route))

    def _record(self, happened: Happened) -> None:
        self._num_events += 1
        record = EventRecord(
            number=self._num_events, wall=self._clock.wall(), kind=happened.kind, detail=happened.detail
        )
        self._events.append(record)
        for listener in self.listeners:
            listener(record)

    def _log_line(self, level: str, text: str, kind: str = "") -> None:
        """Once in a while for each text, or for each `kind`, whose texts an attacker can vary."""
        now, kind = self._clock.now(), kind or text
        if now - self._lines.get(kind, -_SAME_LINE_S) < _SAME_LINE_S:
            return
        if len(self._lines) >= _LINES_REMEMBERED:
            self._lines.clear()
        self._lines[kind] = now
        log.log(logging.WARNING if level == "warning" else logging.INFO, "%s", text)

    def _snapshot(self) -> Snapshot:
        assert self._socket is not None
        snapshot = self._state.snapshot(self._clock.now())
        dropped = {**self._counts, "handshake": self._socket.refused_handshakes}
        return replace(snapshot, refused={**snapshot.refused, **{k: v for k, v in dropped.items() if v}})
