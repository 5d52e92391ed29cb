"""The receiving end of nixl: one agent into which a group of peers writes, and their sessions.

Peers write into our blocks by themselves; this side only hears of it. To stop one of them the agent is destroyed and
replaced (`renew`), which cuts off its whole group; a node has several groups so that one bad peer costs few others.
"""

import logging
import secrets
import threading
from dataclasses import dataclass

import msgspec

from pdxfer.core.errors import ChannelError, ProtocolError
from pdxfer.kv.layout import KvLayout
from pdxfer.transport import nixl_notes
from pdxfer.transport.admission import Admission, describe
from pdxfer.transport.base import Control, PeerId, Sink, UnitHeader
from pdxfer.transport.nixl_agent import Agent
from pdxfer.transport.nixl_notes import Hello, Keys, NoteType, Welcome, seal, unseal

log = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode
_hello_decoder = msgspec.msgpack.Decoder(Hello)
_header_decoder = msgspec.msgpack.Decoder(UnitHeader)
_control_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)


@dataclass(frozen=True, slots=True)
class Session:
    """A sender's agent that has shown that it knows the secret."""

    name: str
    """Of its agent."""
    peer: PeerId
    keys: Keys


class Target:
    """One group."""

    def __init__(self, me: PeerId, layout: KvLayout, admission: Admission, sink: Sink) -> None:
        self._me, self._layout, self._admission, self._sink = me, layout, admission, sink
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self.generation = 0
        self.active = False
        """Grants are out: a lost peer may still have bytes under way, so losing one renews the agent."""
        self.agent = self._make()

    def __repr__(self) -> str:
        return f"<Target generation={self.generation} peers={[s.peer.engine_id for s in self.sessions()]} {self.agent}>"

    def _make(self) -> Agent:
        return Agent(f"{self._me.engine_id}-w{self._me.rank}-in", self._layout, receives=True)

    def sessions(self) -> list[Session]:
        """Oldest first."""
        with self._lock:
            return list(self._sessions.values())

    # ---- called by the endpoint's thread ---------------------------------------------------------------------------

    def poll(self) -> bool:
        """Handle what has come; whether more is likely to follow (a ping announces nothing)."""
        try:
            notes = list(self.agent.notes())
        except ChannelError as error:
            log.debug("%r: %s", self, error)
            return False
        came = False
        for name, note in notes:
            try:
                came = self._handle(name, note) is not NoteType.PING or came
            except (ProtocolError, msgspec.MsgspecError) as error:
                self._admission.refused["protocol"] += 1
                log.debug("note of agent %s dropped: %s", name, error)
        return came

    def ping(self) -> None:
        """Find senders that are gone."""
        for session in self.sessions():
            self._answer(session, NoteType.PING)

    def cut_strangers(self) -> None:
        """End the sessions of peers that are not admitted any more."""
        for session in self.sessions():
            if not self._admission.admits(session.peer):
                self.lose(session, "not admitted any more")

    # ---- called by anyone ------------------------------------------------------------------------------------------

    def tell(self, peer: PeerId, control: Control) -> bool:
        """Send a control to the peer's newest session; False if there is none."""
        for session in reversed(self.sessions()):
            if session.peer == peer and self._answer(session, NoteType.CONTROL, _encode(control)):
                return True
        return False

    def connections(self, peer: PeerId) -> frozenset[str]:
        """The agents of the peer that have a session here."""
        return frozenset(session.name for session in self.sessions() if session.peer == peer)

    def renew(self, reason: str) -> None:
        """The fence: when it returns, nothing that any peer of this group has posted can land."""
        with self._lock:
            self.agent.destroy()
            gone, self._sessions = list(self._sessions.values()), {}
            self.generation += 1
            try:
                self.agent = self._make()
            except ChannelError as error:
                log.error("no new NIXL agent after a fence; peers fall back to another channel: %s", error)
        for peer in {session.peer for session in gone}:
            self._sink.lost(peer, reason)

    def close(self) -> None:
        """Destroy the agent; the peers are lost."""
        with self._lock:
            self.agent.destroy()
            gone, self._sessions = list(self._sessions.values()), {}
        for peer in {session.peer for session in gone}:
            self._sink.lost(peer, "this node is closing")

    def lose(self, session: Session, reason: str) -> None:
        """A peer is gone, or must go: with a new agent, for a forgotten session could still write into the old one."""
        log.info("nixl: cutting off %s: %s", describe(session.peer), reason)
        self.renew(reason)

    # ---- notes -----------------------------------------------------------------------------------------------------

    def _handle(self, name: str, note: bytes) -> NoteType:
        kind = nixl_notes.kind_of(note)
        if kind is NoteType.HELLO:
            self._greet(name, note)
            return kind
        with self._lock:
            session = self._sessions.get(name)
        if session is None:
            raise ProtocolError(f"{kind.name} note of an agent that is in no session")
        body = unseal(session.keys.to_receiver, note)
        match kind:
            case NoteType.UNIT:
                header = _header_decoder.decode(body)
                if self._sink.claim(session.peer, header) is not None:
                    self._sink.arrived(session.peer, header)
            case NoteType.CONTROL:
                self._sink.control(session.peer, _control_decoder.decode(body))
            case NoteType.PROBE:
                self._answer(session, NoteType.PROBED)
            case NoteType.BYE:
                if self._forget(session):
                    self._sink.lost(session.peer, "the peer closed its channel")
            case NoteType.PING:
                pass
            case _:
                raise ProtocolError(f"{kind.name} note from a sender")
        return kind

    def _greet(self, name: str, note: bytes) -> None:
        """Open a session, if the sender is admitted and knows the secret; silence otherwise (it asks again)."""
        hello = _hello_decoder.decode(note[nixl_notes.HEAD.size :])
        with self._lock:
            if name in self._sessions:
                return
        try:
            secret = self._admission.secret_for(hello.sender, 0.0)
            unseal(secret, note)
            if hello.receiver != self._me:
                raise ProtocolError(f"meant for {describe(hello.receiver)}")
        except (ChannelError, ProtocolError) as error:
            self._admission.refused["unknown peer" if isinstance(error, ChannelError) else "wrong proof"] += 1
            log.debug("nixl hello of %s refused: %s", describe(hello.sender), error)
            return
        nonce = secrets.token_bytes(nixl_notes.NONCE_BYTES)
        session = Session(name, hello.sender, Keys(secret, hello.nonce, nonce))
        try:
            if self.agent.add_peer(hello.metadata) != name:
                raise ProtocolError("the hello's metadata is of another agent")
            with self._lock:
                self._sessions[name] = session
            # In this order: a grant is taken back either with the session there to be told, or before it is counted.
            welcome = Welcome(echo=hello.nonce, nonce=nonce, generation=self._sink.generation)
            self.agent.send(name, seal(secret, NoteType.WELCOME, _encode(welcome)))
        except ChannelError as error:
            log.debug("cannot answer %s: %s", describe(hello.sender), error)
            self._forget(session)

    def _answer(self, session: Session, kind: NoteType, body: bytes = b"") -> bool:
        try:
            self.agent.send(session.name, seal(session.keys.to_sender, kind, body))
        except ChannelError as error:
            with self._lock:
                known = session.name in self._sessions
            if known:
                self.lose(session, str(error))
            return False
        return True

    def _forget(self, session: Session) -> bool:
        with self._lock:
            if self._sessions.pop(session.name, None) is None:
                return False
        try:
            self.agent.remove_peer(session.name)
        except ChannelError as error:
            log.debug("%s", error)
        return True
