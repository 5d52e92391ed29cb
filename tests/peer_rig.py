"""Several nodes with real stores behind one router, on fake engines: what tests of peers share."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from router_kit import wait_until

from pdxfer.config.store import StoreConfig, TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.kv.chunks import chunk_keys, identity_digest
from pdxfer.node.lookup import Lookup
from pdxfer.node.node import Node
from pdxfer.node.settings import NodeSettings
from pdxfer.node.store_side import StoreSettings
from pdxfer.store.chunk import NewChunk, Wanted
from pdxfer.store.tiered import TieredStore
from pdxfer.testing.fake_engine import FakeEngine, FakeEngineSettings
from pdxfer.testing.fake_kv import FakeCache
from pdxfer.testing.fake_link import MemberSettings
from pdxfer.testing.fake_member import FakeMember
from pdxfer.transport.kinds import endpoint_factories
from pdxfer.wire.messages import Role
from pdxfer.wire.run_sockets import socket_path
from pdxfer.wire.store_facts import Find, Found

BLOCK, CHUNK_BLOCKS = 16, 2
CHUNK = BLOCK * CHUNK_BLOCKS
IDENTITY = {"model": "fake", "rank": "0"}
TOKENS = list(range(100, 100 + 3 * CHUNK + BLOCK))
"""Three chunks and a partial one."""
VALUE_BYTES = 64 << 10
ALL, NONE = [True] * 4, [False] * 4


class Store:
    """One node's store, asked from a test's thread."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def __call__(self, call: Any) -> Any:
        """Run a coroutine function of the store on its thread."""
        assert self.node.store is not None
        return self.node.store.thread.submit(call).result(20)

    def save(self, keys: Sequence[bytes], tenant: str = "") -> None:
        """As an engine would; waits until every tier that is written through has them."""

        async def run(store: TieredStore) -> None:
            soon = store.clock.now() + 10
            for key in keys:
                data = bytes(key[:1]) * VALUE_BYTES
                await store.save(NewChunk(key=key, num_tokens=CHUNK, parts=[data]), soon, tenant=tenant)
            await store.writer.quiet(soon)

        self(run)

    def held(self, tier: str, keys: Sequence[bytes]) -> list[bool]:
        """Which of the keys the tier itself has, asked behind the store's back."""

        async def run(store: TieredStore) -> list[bool]:
            [slot] = [slot for slot in store.slots if slot.name == tier]
            return [entry is not None for entry in await slot.tier.lookup(keys, store.clock.now() + 10)]

        return self(run)  # type: ignore[no-any-return]

    def tenants(self, tier: str, keys: Sequence[bytes]) -> list[str]:
        """Whose they are, as the tier says."""

        async def run(store: TieredStore) -> list[str]:
            [slot] = [slot for slot in store.slots if slot.name == tier]
            return [entry.tenant for entry in await slot.tier.lookup(keys, store.clock.now() + 10) if entry is not None]

        return self(run)  # type: ignore[no-any-return]

    def read(self, key: bytes) -> tuple[bytes, str] | None:
        """A chunk's bytes and the tier it came from."""

        async def run(store: TieredStore) -> tuple[bytes, str] | None:
            chunk = await store.get_chunk(key, store.clock.now() + 10)
            if chunk is None:
                return None
            try:
                return bytes(chunk.raw), chunk.tier
            finally:
                chunk.release()

        return self(run)  # type: ignore[no-any-return]

    def put_raw(self, tier: str, key: bytes, value: bytes) -> None:
        """Into one tier, whatever it is, and told."""

        async def run(store: TieredStore) -> None:
            [slot] = [slot for slot in store.slots if slot.name == tier]
            await slot.tier.put(key, [value], store.clock.now() + 10)
            store.events.add(tier, [key])

        self(run)

    def drop_silently(self, tier: str, key: bytes) -> None:
        """Out of one tier, and not told."""

        async def run(store: TieredStore) -> None:
            [slot] = [slot for slot in store.slots if slot.name == tier]
            await slot.tier.delete([key], store.clock.now() + 10)

        self(run)

    def find(self, keys: Sequence[bytes]) -> int:
        """How many the scheduler half is told there are."""
        facts: queue.SimpleQueue[Found] = queue.SimpleQueue()
        assert self.node.store is not None
        lookup = Lookup(0, self.node.store.thread, facts.put, SYSTEM_CLOCK)
        lookup.find(Find(find_id="f", keys=list(keys), timeout_s=10.0))
        return facts.get(timeout=20).num_keys

    def load(self, keys: Sequence[bytes]) -> int:
        """How many chunks come whole, with the right bytes."""

        async def run(store: TieredStore) -> int:
            got: dict[int, bytes] = {}

            def sink(index: int, header: object, raw: memoryview) -> None:
                got[index] = bytes(raw)

            wanted = [Wanted(key=key, num_tokens=CHUNK, raw_bytes=VALUE_BYTES) for key in keys]
            loaded = await store.load(wanted, sink, store.clock.now() + 10)
            assert all(got[index] == keys[index][:1] * VALUE_BYTES for index in loaded.delivered)
            return len(loaded.delivered)

        return self(run)  # type: ignore[no-any-return]

    @property
    def num_peers(self) -> int:
        """Nodes whose stores it may read."""
        assert self.node.store is not None and self.node.store.peering is not None
        return len(list(self.node.store.peering._links))

    def leases(self) -> int:
        """Out now, over all tiers."""

        async def run(store: TieredStore) -> int:
            return sum(slot.tier.stats().leases for slot in store.slots)

        return self(run)  # type: ignore[no-any-return]


def keys_of(tokens: list[int] = TOKENS) -> list[bytes]:
    """A prompt's chunk keys, the same on all nodes."""
    return [chunk.key for chunk in chunk_keys(tokens, [], identity_digest(IDENTITY), CHUNK, "blake3", block_size=BLOCK)]


def local_tiers(disk: Path) -> list[TierConfig]:
    """Memory, and a disk that is written by command."""
    dram = TierConfig(url="dram:", capacity_gib=64 / 1024)
    return [dram, TierConfig(url=f"file://{disk}", capacity_gib=64 / 1024, write="none")]


@contextmanager
def nodes(router: str, engines: dict[str, list[TierConfig]], role: Role = "both") -> Iterator[dict[str, Store]]:
    """Fake engines by name, each with a store of these tiers; all know each other when this returns."""
    with ExitStack() as stack:
        found = {name: stack.enter_context(one(router, name, tiers, role)) for name, tiers in engines.items()}
        wait_until(lambda: all(store.num_peers == len(found) - 1 for store in found.values()), 20, "peers")
        yield found


@contextmanager
def one(
    router: str, engine_id: str, tiers: list[TierConfig], role: Role = "both", model: str = "fake"
) -> Iterator[Store]:
    """A fake engine on an event loop of its own thread."""
    ready: list[Node] = []
    stop = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def run() -> None:
        async with running(router, engine_id, tiers, role, model) as node:
            ready.append(node)
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), name=engine_id)
    thread.start()
    try:
        wait_until(lambda: ready or not thread.is_alive(), 20, f"engine {engine_id}")
        yield Store(ready[0])
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        loop.close()


@asynccontextmanager
async def running(router: str, engine_id: str, tiers: list[TierConfig], role: Role, model: str) -> AsyncIterator[Node]:
    """A fake engine on this loop, whose node has a store."""
    cache = FakeCache(num_blocks=64, block_size=BLOCK, num_layers=2, block_bytes=1024)
    halves = socket_path(f"{engine_id}-{id(cache):x}")
    store = StoreSettings(config=StoreConfig(enabled=True, tiers=tiers), identity=IDENTITY)
    made: list[Node] = []

    def make_node() -> Node:
        settings = NodeSettings(
            engine_id=engine_id, rank=0, halves_path=halves, router=router, chunk_blocks=CHUNK_BLOCKS, store=store
        )
        made.append(Node(settings, cache.region, {"model": model}, endpoint_factories(["tcp"])))
        return made[0]

    async with FakeEngine(FakeEngineSettings(engine_id=engine_id)) as server:
        settings = MemberSettings(
            engine_id=engine_id, role=role, url=server.url, served_names=("fake",), max_model_len=900, router=router,
            security=None, halves_path=halves,
        )  # fmt: skip
        member = FakeMember(settings, cache, make_node)
        try:
            yield made[0]
        finally:
            await member.close()
