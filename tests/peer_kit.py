"""What tests of the peer tier share: another node's store that is served, a tier that reads from it, and odd peers."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from pdxfer.config.store import StoreConfig, TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.errors import ChannelError, PdxferError
from pdxfer.store.base import Outcome, Tier
from pdxfer.store.open import open_tiers
from pdxfer.store.peer import wire
from pdxfer.store.peer.links import Links
from pdxfer.store.peer.service import PeerService
from pdxfer.store.peer.tier import PeerTier
from pdxfer.store.runtime import StoreThread
from pdxfer.store.tiered import TieredStore
from pdxfer.testing.tier_kit import MIB, key_of, value_of
from pdxfer.transport import admission
from pdxfer.transport.admission import Admission
from pdxfer.transport.base import EndpointOptions, PeerId
from pdxfer.transport.frames import FrameSocket, FrameType, pack_head
from pdxfer.wire.messages import StoreAddress, StoreNode

SECRET = b"s" * 32
T = TypeVar("T")
ME = PeerId(engine_id="me", incarnation=1, rank=0)
KEY, OTHER = key_of("k"), key_of("other")


def peer_id(name: str, incarnation: int = 1) -> PeerId:
    return PeerId(engine_id=name, incarnation=incarnation, rank=0)


class Peer:
    """Another node: its store on a thread of its own, served."""

    def __init__(
        self, name: str = "peer", capacity_bytes: int = 64 * MIB, incarnation: int = 1, made: Tier | None = None
    ) -> None:
        """`made`: a tier instead of memory of its own."""
        tier = TierConfig(url="dram:", capacity_gib=capacity_bytes / (1 << 30), options={"populate": "false"})
        config = StoreConfig(enabled=True, tiers=[tier])

        async def make() -> TieredStore:
            tiers = [made] if made is not None else await open_tiers(config, SYSTEM_CLOCK)
            return TieredStore(tiers, config, bytes(16))

        self.id = peer_id(name, incarnation)
        self.thread = StoreThread(make)
        self.thread.start(20)
        self.service = PeerService(EndpointOptions(connect_timeout_s=1.0), self.id, self.thread)
        self.service.admit([ME], SECRET)

    @property
    def node(self) -> StoreNode:
        return node_of(self.id, self.service.address)

    async def ask(self, call: Callable[[TieredStore], Awaitable[T]]) -> T:
        """On the store's loop."""

        async def run(store: TieredStore) -> T:
            return await call(store)

        return await asyncio.wrap_future(self.thread.submit(run))

    async def put(self, key: bytes, value: bytes) -> None:
        """Straight into its memory, and told."""

        async def run(store: TieredStore) -> None:
            assert await store.slots[0].tier.put(key, [value], store.clock.now() + 10) is Outcome.STORED
            store.events.add("dram", [key])
            store.events.flush()

        await self.ask(run)

    async def drop(self, *keys: bytes, tell: bool = True) -> None:
        """Out of its memory; told or not."""

        async def run(store: TieredStore) -> None:
            await store.slots[0].tier.delete(keys, store.clock.now() + 10)
            if tell:
                store.events.evict("dram", keys)
                store.events.flush()

        await self.ask(run)

    async def held(self, *keys: bytes) -> list[bool]:
        """Which its memory has."""
        found = await self.ask(lambda store: store.slots[0].tier.lookup(keys, soon()))
        return [entry is not None for entry in found]

    async def leases(self) -> int:
        async def run(store: TieredStore) -> int:
            return store.slots[0].tier.stats().leases

        return await self.ask(run)

    def close(self) -> None:
        self.service.close()
        self.thread.close(5)


def node_of(peer: PeerId, address: StoreAddress) -> StoreNode:
    return StoreNode(engine_id=peer.engine_id, incarnation=peer.incarnation, rank=peer.rank, address=address)


@asynccontextmanager
async def peers(*names: str) -> AsyncIterator[list[Peer]]:
    made = [await asyncio.to_thread(Peer, name) for name in names or ("peer",)]
    try:
        yield made
    finally:
        for peer in made:
            await asyncio.to_thread(peer.close)


@asynccontextmanager
async def reading(*nodes: StoreNode) -> AsyncIterator[tuple[PeerTier, Links]]:
    """A peer tier that knows these nodes; nothing is lent in the end."""
    links = Links()
    tier = PeerTier(TierConfig(url="peer:"), SYSTEM_CLOCK, links=links)
    await tier.open()
    links.join(ME)
    links.meet(nodes, SECRET)
    try:
        yield tier, links
    finally:
        await tier.close()
        stats = tier.stats()
        assert (stats.leases, stats.reservations) == (0, 0), stats


async def knows(tier: PeerTier, *keys: bytes, held: bool = True) -> None:
    """Until its lookup says so of all keys."""

    async def said() -> list[bool]:
        return [entry is not None for entry in await tier.lookup(keys, soon())]

    deadline = SYSTEM_CLOCK.now() + 20
    while await said() != [held] * len(keys):
        assert SYSTEM_CLOCK.now() < deadline, "peers' news did not come"
        await asyncio.sleep(0.002)


def soon(seconds: float = 10.0) -> float:
    return SYSTEM_CLOCK.now() + seconds


async def read(tier: PeerTier, key: bytes, deadline: float | None = None) -> bytes | None:
    lease = await tier.get(key, deadline or soon())
    if lease is None:
        return None
    async with lease:
        return bytes(lease.view)


Script = Callable[[FrameSocket], None]


@contextmanager
def scripted(script: Script) -> Iterator[StoreNode]:
    """A peer that passes the handshake, says that it holds KEY, and answers a question by `script`."""
    me = peer_id("odd")
    server = socket.create_server(("127.0.0.1", 0))
    admitted = Admission()
    admitted.set([ME], SECRET)

    def serve(sock: socket.socket) -> None:
        frames = FrameSocket(sock, 5.0)
        try:
            admission.receive(frames, wire.KIND, me, admitted, 5.0)
            while True:
                asked = wire.question(frames.receive_meta(frames.receive_head()))
                if isinstance(asked, wire.Ping):
                    say(frames, wire.Quiet())
                elif isinstance(asked, wire.Follow):
                    say(frames, wire.Told(seq=1, tier="dram", added=[KEY], restart=True))
                else:
                    script(frames)
        except PdxferError:
            pass
        finally:
            frames.close()

    def accept() -> None:
        while True:
            try:
                sock, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(sock,), daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield node_of(me, StoreAddress(host="127.0.0.1", port=server.getsockname()[1]))
    finally:
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        server.close()


def say(frames: FrameSocket, answer: wire.Answer, payload: bytes = b"") -> None:
    kind = FrameType.UNIT if payload else FrameType.CONTROL
    frames.send(kind, wire.encode(answer), [memoryview(payload)] if payload else [])


def half(frames: FrameSocket) -> None:
    """A value of 1 MiB of which half comes."""
    frames.sock.sendall(unit(wire.encode(wire.Value(tier="dram")), 1 << 20) + bytes(1 << 19))
    raise ChannelError("gone")


def stalls(frames: FrameSocket) -> None:
    """The same, and the connection stays open."""
    frames.sock.sendall(unit(wire.encode(wire.Value(tier="dram")), 1 << 20) + bytes(1 << 19))
    frames.receive_head()


def unit(meta: bytes, payload_bytes: int) -> bytes:
    return pack_head(FrameType.UNIT, len(meta), payload_bytes) + meta


def serve_until_killed() -> None:
    """The other process."""
    peer = Peer()
    asyncio.run(peer.put(KEY, value_of("k", 4 * MIB)))
    print(peer.service.address.port, flush=True)
    threading.Event().wait()
