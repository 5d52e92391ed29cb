"""One connection to another node's PeerService, for one thread at a time: a remote/session.py Session, and following.

Raises ServerError and nothing else. A wait for an answer has no limit here: whoever calls aborts it by its deadline
(remote/server.py does).
"""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pdxfer.core.errors import PdxferError, ProtocolError
from pdxfer.store.base import Buffer, Entry, Outcome
from pdxfer.store.lease import PooledBuffer
from pdxfer.store.peer import wire
from pdxfer.store.remote.errors import Reason, ServerError
from pdxfer.store.remote.session import Lend, Session
from pdxfer.store.remote.stream import remaining
from pdxfer.transport import admission
from pdxfer.transport.base import PeerId
from pdxfer.transport.frames import FrameSocket, FrameType, Head
from pdxfer.transport.tcp import keep_alive
from pdxfer.wire.messages import StoreAddress

A = TypeVar("A")

STALL_S = 10.0
"""A peer that stops in mid-frame for this long is dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a peer's service is reached."""

    me: PeerId
    peer: PeerId
    address: StoreAddress
    secret: bytes


class PeerSession:
    """Connected and past the handshake when constructed. Implements remote.session.Session."""

    def __init__(self, way: Way, end: float) -> None:
        self._name = admission.describe(way.peer)
        where = (way.address.host, way.address.port)
        try:
            sock = socket.create_connection(where, remaining(end))
        except OSError as error:
            raise ServerError(Reason.UNREACHABLE, f"store of {self._name} at {where[0]}:{where[1]}: {error}") from error
        keep_alive(sock, STALL_S)
        self._frames = FrameSocket(sock, max(0.01, remaining(end)))
        try:
            admission.enter(self._frames, wire.KIND, way.me, way.peer, way.secret)
            self._frames.set_timeout(STALL_S)
        except PdxferError as error:
            self._frames.close()
            raise self._failed(error) from error

    @classmethod
    def of(cls, session: Session) -> "PeerSession":
        """A session of a Link's server, as what it is."""
        assert isinstance(session, cls), session
        return session

    def ping(self, end: float) -> None:
        """See Session."""
        self._ask(wire.Ping(), wire.Quiet)

    def read(self, key: bytes, lend: Lend, end: float) -> PooledBuffer | None:
        """See Session."""
        found = self.take(key, "", lend)
        return found[0] if found is not None else None

    def take(self, key: bytes, tier: str, lend: Lend) -> tuple[PooledBuffer, wire.Value] | None:
        """The value, from one of its tiers, and whose it is. None: not there."""
        try:
            head, said = self._exchange(wire.Read(key=key, tier=tier))
            if isinstance(said, wire.Absent):
                return None
            if not isinstance(said, wire.Value) or head.type is not FrameType.UNIT:
                raise self._nonsense(said)
            buffer = lend(head.payload_bytes)
            try:
                self._frames.receive_into([buffer.view] if head.payload_bytes else [])
            except BaseException:
                buffer.give_back()
                raise
            return buffer, said
        except PdxferError as error:
            raise self._failed(error) from error

    def lookup(self, keys: Sequence[bytes], end: float) -> list[Entry | None]:
        """See Session. At most wire.MAX_KEYS."""
        return self._entries(wire.Look(keys=list(keys)), len(keys))

    def scan(self, after: bytes, limit: int, end: float) -> list[Entry]:
        """See Session."""
        return self.page(after, limit, "")

    def page(self, after: bytes, limit: int, tier: str) -> list[Entry]:
        """The same of one tier."""
        found = self._entries(wire.Page(after=after, limit=limit, tier=tier), None)
        return [entry for entry in found if entry is not None]

    def remove(self, keys: Sequence[bytes], end: float) -> int:
        """See Session; pinned ones stay."""
        return self.moved(keys, "").count("removed")

    def moved(self, keys: Sequence[bytes], tier: str) -> list[str]:
        """They are here now: what became of each there."""
        said = self._ask(wire.Remove(keys=list(keys), tier=tier), wire.Removed).said
        if len(said) != len(keys):
            raise ServerError(Reason.PROTOCOL, f"store of {self._name}: {len(said)} answers to {len(keys)} keys")
        return said

    def write(self, key: bytes, parts: Sequence[Buffer], num_bytes: int, end: float) -> Outcome:
        """Nothing is ever put into another node's store: it takes what it wants."""
        return Outcome.TOO_LARGE

    def follow(self, heard: Callable[[wire.Told | None], bool]) -> None:
        """Hand every batch to `heard`, and None now and then while there is none, until it says False or the connection
        ends (ServerError)."""
        try:
            self._frames.send(FrameType.CONTROL, wire.encode(wire.Follow()))
            while True:
                said = wire.answer(self._frames.receive_meta(self._frames.receive_head()))
                if not isinstance(said, wire.Told | wire.Quiet):
                    raise self._nonsense(said)
                if not heard(said if isinstance(said, wire.Told) else None):
                    return
        except PdxferError as error:
            raise self._failed(error) from error

    def abort(self) -> None:
        """See Session."""
        self._frames.cut()

    def close(self) -> None:
        """See Session."""
        self._frames.close()

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _entries(self, question: wire.Question, count: int | None) -> list[Entry | None]:
        items = self._ask(question, wire.Entries).items
        if count is not None and len(items) != count:
            raise ServerError(Reason.PROTOCOL, f"store of {self._name}: {len(items)} answers to {count} keys")
        return [item.entry() if item is not None else None for item in items]

    def _ask(self, question: wire.Question, kind: type[A]) -> A:
        try:
            _, said = self._exchange(question)
            if not isinstance(said, kind):
                raise self._nonsense(said)
            return said
        except PdxferError as error:
            raise self._failed(error) from error

    def _exchange(self, question: wire.Question) -> tuple[Head, wire.Answer]:
        self._frames.send(FrameType.CONTROL, wire.encode(question))
        head = self._frames.receive_head()
        if head.type not in (FrameType.CONTROL, FrameType.UNIT):
            raise ProtocolError(f"{head.type.name} frame where an answer belongs")
        return head, wire.answer(self._frames.receive_meta(head))

    def _nonsense(self, said: wire.Answer) -> ServerError:
        if isinstance(said, wire.Failed):
            return ServerError(Reason.PROTOCOL, f"store of {self._name}: {said.reason}", clean=True)
        return ServerError(Reason.PROTOCOL, f"store of {self._name} answered {type(said).__name__}")

    def _failed(self, error: PdxferError) -> ServerError:
        if isinstance(error, ServerError):
            return error
        reason = Reason.PROTOCOL if isinstance(error, ProtocolError) else Reason.UNREACHABLE
        return ServerError(reason, f"store of {self._name}: {error}")
