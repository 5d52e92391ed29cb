"""The peers this node knows, one Link each: a server to ask, and (for a peer tier) an index of what it holds.

The router names them (meet); a peer that is not named any more is forgotten. Store's loop only, but for the threads
that follow: they hand each batch to the loop and wait for it, so a fast teller does not run ahead of us.
"""

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.cpus import unpin_current_thread
from pdxfer.store.events import MAX_HELD, Batch, Mirror
from pdxfer.store.peer import wire
from pdxfer.store.peer.session import PeerSession, Way
from pdxfer.store.remote.errors import Reason, ServerError
from pdxfer.store.remote.server import Server
from pdxfer.transport.base import PeerId
from pdxfer.wire.messages import StoreNode

log = logging.getLogger(__name__)

CONNECT_S = 5.0
MAX_REST_S = 2.0
SESSIONS = 2
"""Connections, with a thread each, to one peer; made when they are needed."""


class Link:
    """One peer in one life."""

    def __init__(self, way: Way, sessions: int, failed: Callable[[Reason], None]) -> None:
        self.way = way
        self.server = Server(
            f"store of {way.peer.engine_id}", lambda end: PeerSession(way, end), sessions=sessions, failed=failed
        )
        self.index = Mirror()
        self.num_snapshots = 0
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._following: PeerSession | None = None
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<Link {self.way.peer.engine_id} {'up' if self.server.up else 'away'} {self.index!r}>"

    def follow(self) -> None:
        """Begin to keep the index."""
        if self._thread is None:
            name = f"pdxfer-follow-{self.way.peer.engine_id}"
            self._thread = threading.Thread(target=self._follow, name=name, daemon=True)
            self._thread.start()

    def among(self, keys: set[bytes]) -> set[bytes]:
        """Those it has, as it said last; none while it does not answer."""
        return self.index.among(keys) if self.server.up else set()

    async def close(self) -> None:
        """Idempotent."""
        self._stop.set()
        if (session := self._following) is not None:
            session.abort()
        await self.server.close()
        self.index = Mirror()

    # ---- the following thread ----------------------------------------------------------------------------------------

    def _follow(self) -> None:
        unpin_current_thread()
        said = ""
        while not self._stop.is_set():
            try:
                session = self._following = PeerSession(self.way, SYSTEM_CLOCK.now() + CONNECT_S)
                try:
                    if self._stop.is_set():  # close did not see this session: nobody would abort it
                        return
                    session.follow(self._heard)
                finally:
                    session.close()
                why = "a batch is missing; beginning anew"
            except ServerError as error:
                why = str(error)
            except Exception as error:  # a bug of ours must not leave the index as it is for good
                log.exception("store: following peer %s failed; beginning anew", self.way.peer.engine_id)
                why = repr(error)
            self._on_loop(self._forget)
            if why != said and not self._stop.is_set():
                log.info("store: what peer %s holds is not known for now: %s", self.way.peer.engine_id, why)
                said = why
            self._stop.wait(random.uniform(0.5, 1.0) * MAX_REST_S)

    def _heard(self, told: wire.Told | None) -> bool:
        if self._stop.is_set():
            return False
        return told is None or bool(self._on_loop(lambda: self._apply(told)))

    def _on_loop(self, work: Callable[[], object]) -> object:
        """Run it there and wait; None if the loop is gone."""
        done: Future[object] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)
                raise

        try:
            self._loop.call_soon_threadsafe(run)
        except RuntimeError:
            return None
        while not self._stop.is_set():
            try:
                return done.result(0.5)
            except TimeoutError:
                continue
        return None

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def _apply(self, told: wire.Told) -> bool:
        if self._stop.is_set():
            return False
        self.num_snapshots += told.restart
        if told.tier not in self.index.tiers and len(self.index.tiers) >= wire.MAX_TIERS:
            return False
        added = told.added if len(self.index) < MAX_HELD else []
        batch = Batch(seq=told.seq, tier=told.tier, added=added, evicted=told.evicted, restart=told.restart)
        return self.index.apply(batch)

    def _forget(self) -> None:
        self.index = Mirror()


class Links:
    """All of them. `join`, then `meet` as often as the router speaks, `close` last."""

    def __init__(self) -> None:
        self._links: dict[PeerId, Link] = {}
        self._me: PeerId | None = None
        self._closed = False
        self._closing: set[asyncio.Task[None]] = set()
        self.sessions = SESSIONS
        self.follows = False
        """A peer tier wants indexes."""
        self.failed: Callable[[Reason], None] = lambda reason: None
        """Counts failures; a peer tier puts its own here."""

    def __repr__(self) -> str:
        return f"<Links {list(self._links.values())}>"

    def __iter__(self) -> Iterator[Link]:
        return iter(list(self._links.values()))

    def join(self, me: PeerId) -> None:
        """Who we are."""
        self._me = me

    def meet(self, nodes: Sequence[StoreNode], secret: bytes) -> None:
        """These are all the peers there are."""
        me = self._me
        assert me is not None, "meet before join"
        if self._closed:
            return
        ways = {}
        for node in nodes:
            peer = PeerId(engine_id=node.engine_id, incarnation=node.incarnation, rank=node.rank)
            if peer.engine_id != me.engine_id and peer.rank == me.rank:
                ways[peer] = Way(me=me, peer=peer, address=node.address, secret=secret)
        for peer, link in list(self._links.items()):
            if ways.get(peer) != link.way:
                del self._links[peer]
                task = asyncio.get_running_loop().create_task(link.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        for peer, way in ways.items():
            if peer not in self._links:
                link = self._links[peer] = Link(way, self.sessions, lambda reason: self.failed(reason))
                if self.follows:
                    link.follow()

    def get(self, engine_id: str) -> Link | None:
        """The peer of this name."""
        return next((link for peer, link in self._links.items() if peer.engine_id == engine_id), None)

    async def close(self) -> None:
        """Idempotent; nobody is met afterwards."""
        self._closed = True
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links), *self._closing)
