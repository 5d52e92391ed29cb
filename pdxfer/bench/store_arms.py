"""The arms of the store bench: ours and the references, each putting and getting the same frames.

Every arm deletes what it has put before it puts again, outside the measured time.
"""

import asyncio
import contextlib
import hashlib
import importlib
import mmap
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from pdxfer.codec.frame import HEADER_BYTES, FrameHeader
from pdxfer.config.store import StoreConfig, TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.kv.chunks import identity_digest
from pdxfer.store.base import Outcome, Tier
from pdxfer.store.chunk import NewChunk, Wanted
from pdxfer.store.open import open_tier
from pdxfer.store.tiered import TieredStore
from pdxfer.store.transcode import Transcoder

SLACK = 1.5
"""Capacity asked for, over what a pass needs."""
WAIT_S = 60.0
IDENTITY = identity_digest({"bench": "store"})
ALIGN = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one pass moves."""

    size: int
    """Bytes of one chunk."""
    count: int
    depth: int

    @property
    def num_bytes(self) -> int:
        return self.size * self.count

    def keys(self) -> list[bytes]:
        """One a chunk."""
        return [hashlib.sha256(f"{self.size}/{index}".encode()).digest() for index in range(self.count)]

    def chunks(self) -> "list[memoryview]":
        """Random bytes; views of one buffer."""
        whole = np.random.default_rng(1).integers(0, 256, self.num_bytes, dtype=np.uint8).data
        return [whole[begin : begin + self.size] for begin in range(0, self.num_bytes, self.size)]


class Arm(Protocol):
    """One way to keep chunks. Seconds of all chunks (`depth` at once) or of one alone."""

    name: str
    load: Load

    async def check(self) -> None:
        """Put, get, compare every byte."""
        ...

    async def put_all(self) -> float: ...

    async def get_all(self) -> float: ...

    async def put_one(self, index: int) -> float: ...

    async def get_one(self, index: int) -> float: ...


@contextlib.asynccontextmanager
async def open_arms(tier: str, url: str, load: Load) -> AsyncIterator[list[Arm]]:
    """Ours and its references for one tier, opened; closed at the end."""
    async with contextlib.AsyncExitStack() as stack:
        scratch = None
        if url.startswith("file:"):
            parent = url.removeprefix("file://")
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdxfer-bench-", dir=parent)))
            url = f"file://{scratch}/tier"
        config = TierConfig(url=url, capacity_gib=max(0.0625, SLACK * load.num_bytes / (1 << 30)))
        opened = await open_tier(config, SYSTEM_CLOCK)
        if opened.kind == "dram":
            store = TieredStore([opened], StoreConfig(tiers=[config]), IDENTITY, num_threads=1)
            await store.open()
            stack.push_async_callback(lambda: store.close(SYSTEM_CLOCK.now() + WAIT_S))
            yield [StoreArm(store, load), MemoryArm("reference", load, True), MemoryArm("memcpy", load, False)]
            return
        stack.push_async_callback(opened.close)
        arms: list[Arm] = [TierArm(opened, load)]
        if scratch is not None:
            arms.append(stack.enter_context(contextlib.closing(DiskArm(scratch / "raw", load))))
        elif (raw := await _raw_arm(opened.kind, url, load, stack)) is not None:
            arms.append(raw)
        yield arms


# ---- ours ------------------------------------------------------------------------------------------------------------


class _Ours:
    """What arms on an event loop share: `_put` and `_get` of one chunk."""

    name = "pdxfer"

    def __init__(self, load: Load) -> None:
        self.load = load
        self.keys, self.chunks = load.keys(), load.chunks()
        self.targets = [memoryview(bytearray(load.size)) for _ in range(load.count)]

    async def check(self) -> None:
        """Put, get, compare every byte."""
        await self.put_all()
        await self.get_all()
        assert all(a == b for a, b in zip(self.chunks, self.targets, strict=True)), f"{self.name}: other bytes"

    async def put_all(self) -> float:
        """All chunks, `depth` at once."""
        await self._delete(self.keys)
        return await self._all(self._put)

    async def get_all(self) -> float:
        """All chunks, `depth` at once."""
        return await self._all(self._get)

    async def put_one(self, index: int) -> float:
        """One alone."""
        await self._delete([self.keys[index]])
        begin = time.perf_counter()
        await self._put(index)
        return time.perf_counter() - begin

    async def get_one(self, index: int) -> float:
        """One alone."""
        begin = time.perf_counter()
        await self._get(index)
        return time.perf_counter() - begin

    async def _all(self, work: Callable[[int], Awaitable[None]]) -> float:
        left = iter(range(self.load.count))

        async def lane() -> None:
            for index in left:
                await work(index)

        begin = time.perf_counter()
        await asyncio.gather(*(lane() for _ in range(self.load.depth)))
        return time.perf_counter() - begin

    async def _put(self, index: int) -> None:
        raise NotImplementedError

    async def _get(self, index: int) -> None:
        raise NotImplementedError

    async def _delete(self, keys: list[bytes]) -> None:
        raise NotImplementedError


class StoreArm(_Ours):
    """Save and load of the tiered store: frame, checksum, copy."""

    def __init__(self, store: TieredStore, load: Load) -> None:
        super().__init__(load)
        self._store = store
        self._wanted = [Wanted(key=key, num_tokens=1, raw_bytes=load.size) for key in self.keys]

    async def get_all(self) -> float:
        """One load, as a request does it."""
        begin = time.perf_counter()
        loaded = await self._store.load(self._wanted, self._sink, _soon())
        assert len(loaded.delivered) == self.load.count
        return time.perf_counter() - begin

    def _sink(self, index: int, header: FrameHeader, raw: memoryview) -> None:
        self.targets[index][:] = raw

    async def _put(self, index: int) -> None:
        result = await self._store.save(
            NewChunk(key=self.keys[index], num_tokens=1, parts=(self.chunks[index],)), _soon()
        )
        assert result.outcome.value == "held", result

    async def _get(self, index: int) -> None:
        await self._store.load([self._wanted[index]], lambda _, header, raw: self._sink(index, header, raw), _soon())

    async def _delete(self, keys: list[bytes]) -> None:
        await self._store.slots[0].delete(keys, _soon())


class TierArm(_Ours):
    """Put and get of the tier itself, with sealed frames; a get ends with the bytes in the tier's buffer."""

    def __init__(self, tier: Tier, load: Load) -> None:
        super().__init__(load)
        self._tier = tier
        coder = Transcoder(IDENTITY)
        self.frames = [
            memoryview(coder.raw_frame(NewChunk(key=key, num_tokens=1, parts=(chunk,))))
            for key, chunk in zip(self.keys, self.chunks, strict=True)
        ]

    async def check(self) -> None:
        """As the others, from the leases."""
        await self.put_all()
        for key, frame in zip(self.keys, self.frames, strict=True):
            lease = await self._tier.get(key, _soon())
            assert lease is not None, "a value that was put is not there"
            async with lease:
                assert lease.view == frame, "other bytes"

    async def _put(self, index: int) -> None:
        outcome = await self._tier.put(self.keys[index], (self.frames[index],), _soon())
        assert outcome is Outcome.STORED, outcome

    async def _get(self, index: int) -> None:
        lease = await self._tier.get(self.keys[index], _soon())
        assert lease is not None, "a value that was put is not there"
        lease.release()

    async def _delete(self, keys: list[bytes]) -> None:
        await self._tier.delete(keys, _soon())


# ---- references ------------------------------------------------------------------------------------------------------


class MemoryArm(_Ours):
    """memcpy into memory that is there, on one thread; with or without xxh3 of the same bytes."""

    def __init__(self, name: str, load: Load, digest: bool) -> None:
        super().__init__(load)
        self.name, self._digest = name, digest
        self._kept = [memoryview(bytearray(load.size)) for _ in range(load.count)]
        for kept in self._kept:
            kept[:] = bytes(load.size)

    async def _put(self, index: int) -> None:
        self._kept[index][:] = self.chunks[index]
        if self._digest:
            xxhash.xxh3_64_intdigest(self._kept[index])

    async def _get(self, index: int) -> None:
        if self._digest:
            xxhash.xxh3_64_intdigest(self._kept[index])
        self.targets[index][:] = self._kept[index]

    async def _delete(self, keys: list[bytes]) -> None:
        return


class DiskArm:
    """pwrite and pread of aligned buffers, `depth` threads, O_DIRECT where the filesystem takes it."""

    name = "reference"

    def __init__(self, path: Path, load: Load) -> None:
        self.load = load
        self._step = -(-(load.size + HEADER_BYTES) // ALIGN) * ALIGN
        flags = os.O_RDWR | os.O_CREAT
        try:
            self._fd = os.open(path, flags | os.O_DIRECT)
        except OSError:
            self._fd = os.open(path, flags)
        os.posix_fallocate(self._fd, 0, self._step * load.count)
        self._buffers = [memoryview(mmap.mmap(-1, self._step)) for _ in range(load.count)]
        for index, chunk in enumerate(load.chunks()):
            self._buffers[index][: load.size] = chunk
        self._pool = ThreadPoolExecutor(load.depth)

    async def check(self) -> None:
        """Put, clear, get, compare."""
        before = [bytes(buffer[:64]) for buffer in self._buffers]
        await self.put_all()
        for buffer in self._buffers:
            buffer[:64] = bytes(64)
        await self.get_all()
        assert before == [bytes(buffer[:64]) for buffer in self._buffers]

    async def put_all(self) -> float:
        """All chunks."""
        return await self._all(self._put)

    async def get_all(self) -> float:
        """All chunks."""
        return await self._all(self._get)

    async def put_one(self, index: int) -> float:
        """One alone."""
        return await self._one(self._put, index)

    async def get_one(self, index: int) -> float:
        """One alone."""
        return await self._one(self._get, index)

    def close(self) -> None:
        """Threads and file."""
        self._pool.shutdown()
        os.close(self._fd)

    def _put(self, index: int) -> None:
        assert os.pwrite(self._fd, self._buffers[index], index * self._step) == self._step

    def _get(self, index: int) -> None:
        assert os.preadv(self._fd, [self._buffers[index]], index * self._step) == self._step

    async def _all(self, work: Callable[[int], None]) -> float:
        begin = time.perf_counter()
        await asyncio.to_thread(lambda: list(self._pool.map(work, range(self.load.count))))
        return time.perf_counter() - begin

    async def _one(self, work: Callable[[int], None], index: int) -> float:
        begin = time.perf_counter()
        work(index)
        return time.perf_counter() - begin


async def _raw_arm(kind: str, url: str, load: Load, stack: contextlib.AsyncExitStack) -> Arm | None:
    """The raw client of this kind of server, if there is one (store_raw.py)."""
    try:
        module: Any = importlib.import_module("pdxfer.bench.store_raw")
    except ModuleNotFoundError:
        return None
    factory = module.RAW.get(kind)
    return None if factory is None else RawArm(stack.enter_context(contextlib.closing(factory(url))), load)


class RawArm(_Ours):
    """A minimal client that speaks the server's protocol and nothing more: `put(key, value)`, `get(key, into)`."""

    name = "reference"

    def __init__(self, client: Any, load: Load) -> None:
        super().__init__(load)
        self._client = client

    async def _put(self, index: int) -> None:
        self._client.put(b"raw" + self.keys[index].hex().encode(), self.chunks[index])

    async def _get(self, index: int) -> None:
        self._client.get(b"raw" + self.keys[index].hex().encode(), self.targets[index])

    async def _delete(self, keys: list[bytes]) -> None:
        return


def _soon() -> float:
    return SYSTEM_CLOCK.now() + WAIT_S
