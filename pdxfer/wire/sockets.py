"""The control plane's two ZMQ sockets: the router's ROUTER and a member's DEALER.

Both are non-blocking and belong to one thread: `wait`, then `receive` until None. Sizes, queues and CURVE are set
here once. A message is two frames at the router, [route, payload]; the route is the member's identity + ``#`` +
random hex, so two lives of one member never steal each other's connection.
"""

import ipaddress
import logging
import math
import secrets
from enum import Enum

import zmq
from zmq.utils import z85

from pdxfer.core.errors import ConfigError, ListenError
from pdxfer.wire.keys import ClientSecurity, ServerSecurity
from pdxfer.wire.version import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

_QUEUE_MESSAGES = 16384
"""High-water mark per connection: a stall of about a second of a busy proxy."""
_MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + 4096
"""ZMQ closes a connection that sends more; what is between the two is refused and counted by the decoder."""
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 1000
_MORE = zmq.NOBLOCK | zmq.SNDMORE
_ZAP_DOMAIN = b"pdxfer"
_HANDSHAKE_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Sent(Enum):
    """What became of a message given to the router's socket."""

    OK = "ok"
    NO_ROUTE = "no_route"
    """Nobody is connected under that route."""
    FULL = "full"
    """The member does not read; its queue is full."""


def new_route(identity: str) -> bytes:
    """The routing id of one connection of `identity`."""
    return f"{identity}#{secrets.token_hex(8)}".encode()


def is_loopback(endpoint: str) -> bool:
    """Whether only this host can reach a ZMQ endpoint."""
    scheme, _, rest = endpoint.partition("://")
    if scheme in ("ipc", "inproc"):
        return True
    host = rest.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class RouterSocket:
    """The router's end: bound, many members, CURVE if keys are given."""

    def __init__(self, endpoint: str, security: ServerSecurity | None, *, allow_insecure: bool = False) -> None:
        _check_exposure(endpoint, security, allow_insecure)
        self.refused_handshakes = 0
        """Connections that did not pass the handshake: wrong or no key, or not ZMQ at all."""
        self._context = zmq.Context(1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._poller = zmq.Poller()
        self._zap: zmq.Socket[bytes] | None = None
        self._allowed = security.allowed if security else frozenset()
        _limit(self._socket, endpoint)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.ROUTER_HANDOVER, 1)
        if security is not None:
            self._secure(security)
        self._monitor = self._socket.get_monitor_socket(_HANDSHAKE_REFUSED)
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ListenError(
                f"the router cannot listen on {endpoint}: {error.strerror}. "
                "Choose another address with router.port or network.bind, or stop what uses this one"
            ) from error
        bound = self._socket.get(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        self.endpoint = bound.rstrip(b"\0").decode()
        """Where it listens, the port chosen."""

    def register(self, fd: int) -> None:
        """Also wake `wait` when this descriptor becomes readable."""
        self._poller.register(fd, zmq.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Return when something can be received, a registered descriptor is readable, or time is up."""
        for ready, _ in self._poller.poll(_ms(timeout_s)):
            if ready is self._zap:
                self._answer_handshakes()
            elif ready is self._monitor:
                self._count_refusals()

    def receive(self) -> tuple[bytes, bytes] | None:
        """Next (route, payload), or None. A message of another shape comes with an empty payload."""
        try:
            route: bytes = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        payload, num_parts = b"", 0
        while self._socket.get(zmq.RCVMORE):
            part: bytes = self._socket.recv()
            num_parts += 1
            payload = part if num_parts == 1 else b""
        return route, payload

    def send(self, route: bytes, payload: bytes) -> Sent:
        """Queue one message; never blocks."""
        try:
            self._socket.send(route, _MORE)
            self._socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return Sent.NO_ROUTE
            raise
        return Sent.OK

    def close(self) -> None:
        """Close at once; what is queued is dropped. Idempotent."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        for socket in (self._socket, self._zap):
            if socket is not None:
                socket.close(0)
        self._context.destroy(0)

    def _secure(self, security: ServerSecurity) -> None:
        zap = self._context.socket(zmq.ROUTER)
        zap.set(zmq.LINGER, 0)
        zap.bind("inproc://zeromq.zap.01")
        self._zap = zap
        self._poller.register(zap, zmq.POLLIN)
        self._socket.set(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        self._socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._socket.set(zmq.CURVE_SERVER, 1)
        self._socket.set(zmq.CURVE_SECRETKEY, security.secret_key)

    def _answer_handshakes(self) -> None:
        """ZAP (RFC 27): admit exactly the public keys we know."""
        assert self._zap is not None
        while True:
            try:
                request: list[bytes] = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            peer, _, version, request_id, _, _, _, mechanism, *credentials = request
            known = mechanism == b"CURVE" and z85.encode(credentials[0]) in self._allowed
            verdict = (b"200", b"OK", b"member") if known else (b"400", b"unknown key", b"")
            self._zap.send_multipart((peer, b"", version, request_id, *verdict, b""))

    def _count_refusals(self) -> None:
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            self.refused_handshakes += 1


class DealerSocket:
    """A member's end: connects, and reconnects by itself. Messages go only to an established connection."""

    def __init__(
        self, endpoint: str, route: bytes, security: ClientSecurity | None, *, beside: "DealerSocket | None" = None
    ) -> None:
        """`beside` shares that socket's IO thread, and must be closed after this one."""
        self._owns_context = beside is None
        self._endpoint, self._has_keys = endpoint, security is not None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1) if beside is None else beside._context
        self._socket = self._context.socket(zmq.DEALER)
        _limit(self._socket, endpoint)
        self._socket.set(zmq.ROUTING_ID, route)
        self._socket.set(zmq.IMMEDIATE, 1)
        self._socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        if security is not None:
            self._socket.set(zmq.CURVE_SERVERKEY, security.server_key)
            self._socket.set(zmq.CURVE_PUBLICKEY, security.public_key)
            self._socket.set(zmq.CURVE_SECRETKEY, security.secret_key)
        self._monitor = self._socket.get_monitor_socket(_HANDSHAKE_REFUSED)
        self._poller = zmq.Poller()
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"{endpoint!r} is no address of a router: {error.strerror}. Write it as tcp://HOST:PORT"
            ) from error

    @property
    def fd(self) -> int:
        """Edge-triggered descriptor for an event loop: after any wake or send, receive until None."""
        return int(self._socket.get(zmq.FD))

    @property
    def can_send(self) -> bool:
        """Whether a connection is established (keys accepted) and takes more messages."""
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLOUT)

    def why_silent(self) -> str:
        """For the log, when nothing has come for long: the other end refuses us, or nobody is there."""
        if not self._monitor.poll(0):
            return f"no router answers at {self._endpoint}: is it running, and do firewalls let its port through?"
        keys = "it does not know our keys, or has none" if self._has_keys else "it wants keys, and we have none"
        return (
            f"the router at {self._endpoint} refuses the connection: {keys}. Set security.keys_dir (--keys) to a "
            "directory with server.pub, client.pub and client.key of its cluster"
        )

    def register(self, fd: int) -> None:
        """Also wake `wait` when this descriptor becomes readable."""
        self._poller.register(fd, zmq.POLLIN)

    def wait(self, timeout_s: float, *, to_send: bool) -> None:
        """Return when something can be received (or sent), a registered descriptor is readable, or time is up."""
        self._poller.register(self._socket, zmq.POLLIN | zmq.POLLOUT if to_send else zmq.POLLIN)
        self._poller.poll(_ms(timeout_s))

    def receive(self) -> bytes | None:
        """Next payload, or None. A message of another shape comes empty."""
        try:
            parts: list[bytes] = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return parts[0] if len(parts) == 1 else b""

    def send(self, payload: bytes) -> bool:
        """Queue one message; False when there is no connection or its queue is full."""
        try:
            self._socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self, linger_s: float = 0.0) -> None:
        """Close; messages not sent within `linger_s` are dropped. Idempotent."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(int(linger_s * 1000))
            if self._owns_context:
                self._context.term()


def _ms(timeout_s: float) -> int:
    """Whole milliseconds, rounded up: a short wait must not become a spin."""
    return math.ceil(max(0.0, timeout_s) * 1000)


def _limit(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
    socket.set(zmq.SNDHWM, _QUEUE_MESSAGES)
    socket.set(zmq.RCVHWM, _QUEUE_MESSAGES)
    socket.set(zmq.HEARTBEAT_IVL, 0)
    if "[" in endpoint:
        socket.set(zmq.IPV6, 1)


def _check_exposure(endpoint: str, security: ServerSecurity | None, allow_insecure: bool) -> None:
    if security is not None or is_loopback(endpoint):
        return
    if not allow_insecure:
        raise ConfigError(
            f"the router would listen on {endpoint}, for other machines too, but no keys are set: make them with "
            "`pdxfer keys new DIR` and set security.keys_dir on every host, or bind to 127.0.0.1"
        )
    log.warning(
        "INSECURE: the router listens on %s without keys. Anyone who reaches it can join and read or corrupt KV.",
        endpoint,
    )
