"""What tests of the tiered store share: a store over memory tiers, chunks, and loads as plain values."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from pdxfer.config.store import StoreConfig, TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.kv.chunks import identity_digest
from pdxfer.store.chunk import NewChunk, Wanted
from pdxfer.store.tiered import TieredStore
from pdxfer.testing.faulty_tier import FaultyTier
from pdxfer.testing.memory_tier import MemoryTier

IDENTITY = identity_digest({"model": "demo"})
OTHER = identity_digest({"model": "other"})
RAW_BYTES = 3000
TOKENS = 16
MIB = 1 / 1024


def key(name: object) -> bytes:
    return hashlib.sha256(repr(name).encode()).digest()


def raw(name: object, size: int = RAW_BYTES) -> bytes:
    return hashlib.shake_128(repr(name).encode()).digest(size)


def chunk(name: object, size: int = RAW_BYTES, first_token: int = 0) -> NewChunk:
    data = raw(name, size)
    return NewChunk(
        key=key(name), num_tokens=TOKENS, parts=[data[: size // 3], memoryview(data)[size // 3 :]],
        first_token=first_token,
    )  # fmt: skip


def wanted(names: Sequence[object], size: int = RAW_BYTES) -> list[Wanted]:
    return [Wanted(key=key(name), num_tokens=TOKENS, raw_bytes=size) for name in names]


class Rig:
    """A store, its tiers (each behind a FaultyTier), and short calls with a deadline that comes only in a hang."""

    def __init__(self, store: TieredStore, tiers: list[FaultyTier]) -> None:
        self.store, self.tiers = store, tiers

    @property
    def soon(self) -> float:
        return self.store.clock.now() + 20

    def memory(self, index: int) -> MemoryTier:
        inner = self.tiers[index].inner
        assert isinstance(inner, MemoryTier)
        return inner

    async def save(self, *names: object, size: int = RAW_BYTES, **more: object) -> list[str]:
        return [(await self.store.save(chunk(n, size), self.soon, **more)).outcome.value for n in names]  # type: ignore[arg-type]

    async def saved(self, *names: object, size: int = RAW_BYTES) -> None:
        """Saved, and every lane has ended."""
        await self.save(*names, size=size)
        await self.settled()

    async def settled(self) -> None:
        await until(lambda: self.store.writer.pending == 0, "copies to end")

    async def found(self, *names: object) -> list[str]:
        return [f.tier for f in (await self.store.lookup([key(n) for n in names], self.soon)).found]

    async def load(
        self, *names: object, within: float = 20, start: int = 0, size: int = RAW_BYTES
    ) -> dict[object, str]:
        """Name → tier of what was delivered, after comparing every byte."""
        got: dict[int, bytes] = {}
        loaded = await self.store.load(
            wanted(names, size), lambda i, header, view: got.__setitem__(i, bytes(view)),
            self.store.clock.now() + within, start_chunk=start,
        )  # fmt: skip
        assert set(got) >= set(loaded.delivered)
        assert all(got[i] == raw(names[i], size) for i in got)
        return {names[i]: loaded.tiers[i] for i in sorted(loaded.delivered)}

    def nothing_is_out(self) -> None:
        """Every lease, reservation, copy and byte came back."""
        for tier in self.tiers:
            stats = tier.stats()
            assert (stats.leases, stats.reservations) == (0, 0), stats
        assert self.store.stats().pending_saves == self.store.stats().staged_bytes == self.store.stats().loads == 0


@asynccontextmanager
async def rig(
    *tiers: TierConfig, kinds: Sequence[str] = ("dram", "disk", "redis"), **more: object
) -> AsyncIterator[Rig]:
    """An open store over memory tiers with these settings."""
    settings = list(tiers) or [TierConfig(url=f"{kind}:") for kind in kinds]
    faulty = [FaultyTier(MemoryTier(t, kind=kind)) for t, kind in zip(settings, kinds, strict=False)]
    options = {k: more.pop(k) for k in list(more) if k in ("form", "identity", "codecs")}
    config = StoreConfig(tiers=settings, **more)  # type: ignore[arg-type]
    store = TieredStore(faulty, config, options.pop("identity", IDENTITY), **options)  # type: ignore[arg-type]
    await store.open()
    made = Rig(store, faulty)
    try:
        yield made
    finally:
        for tier in faulty:
            tier.thaw()
        await store.close(store.clock.now() + 5)


async def until(condition: Callable[[], object], what: str, timeout_s: float = 20) -> None:
    """Let the loop run until `condition`."""
    end = SYSTEM_CLOCK.now() + timeout_s
    while not condition():
        assert SYSTEM_CLOCK.now() < end, f"waited {timeout_s:g} s for {what}"
        await asyncio.sleep(0.001)
