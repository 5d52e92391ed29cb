"""The references of the store bench, what the machine does without us; `open_arms` says which stand beside a tier."""

import asyncio
import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import xxhash

from pdxfer.bench.store_arms import ALIGN, IDENTITY, SLACK, WAIT_S, Arm, Load, LoopArm, StoreArm, TierArm
from pdxfer.bench.store_raw import RAW, RawClient
from pdxfer.codec.frame import HEADER_BYTES
from pdxfer.config.store import StoreConfig, TierConfig
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.memory.segment import private_map
from pdxfer.store.open import open_tier
from pdxfer.store.tiered import TieredStore


@contextlib.asynccontextmanager
async def open_arms(tier: str, url: str, load: Load) -> AsyncIterator[list[Arm]]:
    """Ours and its references for one tier, opened; closed at the end."""
    async with contextlib.AsyncExitStack() as stack:
        scratch, capacity_gib = None, max(0.0625, SLACK * load.num_bytes / (1 << 30))
        if url.startswith("file:"):
            parent = url.removeprefix("file://")
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdxfer-bench-", dir=parent)))
            url = f"file://{scratch}/tier"
        is_local = scratch is not None or url.startswith("dram:")
        config = TierConfig(url=url, capacity_gib=capacity_gib if is_local else 0.0)
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
            plain = DiskArm("reference", scratch / "plain", load, partial(mmap.mmap, -1))
            arms.append(stack.enter_context(contextlib.closing(plain)))
            huge = DiskArm("reference, huge pages", scratch / "huge", load, private_map)
            arms.append(stack.enter_context(contextlib.closing(huge)))
        elif opened.kind in RAW:
            make = RAW[opened.kind]
            clients = [stack.enter_context(contextlib.closing(make(url))) for _ in range(load.depth)]
            arms += [RawArm("reference", clients[:1], load), RawArm(f"{load.depth} references", clients, load)]
        yield arms


class MemoryArm(LoopArm):
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
    """pwrite and pread of aligned buffers, `depth` threads, O_DIRECT where the filesystem takes it. In huge pages, as
    our memory is, a direct call is cheaper and the disk faster."""

    def __init__(self, name: str, path: Path, load: Load, new_map: Callable[[int], mmap.mmap]) -> None:
        self.name, self.load = name, load
        self._step = -(-(load.size + HEADER_BYTES) // ALIGN) * ALIGN
        flags = os.O_RDWR | os.O_CREAT
        try:
            self._fd = os.open(path, flags | os.O_DIRECT)
        except OSError:
            self._fd = os.open(path, flags)
        os.posix_fallocate(self._fd, 0, self._step * load.count)
        self._buffers = [memoryview(new_map(self._step)) for _ in range(load.count)]
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


class RawArm(LoopArm):
    """Minimal clients that speak the server's protocol and nothing more, in a thread each."""

    def __init__(self, name: str, clients: list[RawClient], load: Load) -> None:
        super().__init__(load)
        self.name, self._clients = name, clients

    async def _all(self, work: Callable[[int], Awaitable[None]]) -> float:
        verb = _raw_put if work == self._put else _raw_get
        left = iter(range(self.load.count))

        def lane(client: RawClient) -> None:
            for index in left:  # shared by the threads: next() of a range's iterator is atomic
                verb(self, client, index)

        with ThreadPoolExecutor(len(self._clients)) as pool:
            begin = time.perf_counter()
            await asyncio.to_thread(lambda: list(pool.map(lane, self._clients)))
            return time.perf_counter() - begin

    async def _put(self, index: int) -> None:
        _raw_put(self, self._clients[0], index)

    async def _get(self, index: int) -> None:
        _raw_get(self, self._clients[0], index)

    async def _delete(self, keys: list[bytes]) -> None:
        for key in keys:
            self._clients[0].delete(_raw_name(key), self.load.size)


def _raw_put(arm: RawArm, client: RawClient, index: int) -> None:
    client.put(_raw_name(arm.keys[index]), arm.chunks[index])


def _raw_get(arm: RawArm, client: RawClient, index: int) -> None:
    client.get(_raw_name(arm.keys[index]), arm.targets[index])


def _raw_name(key: bytes) -> bytes:
    return b"raw" + key.hex().encode()
