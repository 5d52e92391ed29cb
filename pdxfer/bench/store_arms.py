"""What an arm of the store bench is, and the two of ours: the whole path through the store, and a tier by itself.

Every arm puts and gets the same bytes, and deletes what it has put before it puts again, outside the measured time.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pdxfer.codec.frame import FrameHeader
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.kv.chunks import identity_digest
from pdxfer.memory.segment import private_map
from pdxfer.store.base import Outcome, Tier
from pdxfer.store.chunk import NewChunk, Wanted
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


# ---- ours ------------------------------------------------------------------------------------------------------------


class LoopArm:
    """What arms on an event loop share; subclasses say how one chunk is put, got and deleted."""

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


class StoreArm(LoopArm):
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


class TierArm(LoopArm):
    """Put and get of the tier itself, with sealed frames; a get ends with the bytes in the tier's buffer."""

    def __init__(self, tier: Tier, load: Load) -> None:
        super().__init__(load)
        self._tier = tier
        self.frames = _frames(self.keys, self.chunks)

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


def _frames(keys: list[bytes], chunks: list[memoryview]) -> list[memoryview]:
    """Raw frames as the dram tier has them: in one mapping of huge pages, each at the start of a page."""
    coder = Transcoder(IDENTITY)
    new = [NewChunk(key=key, num_tokens=1, parts=(chunk,)) for key, chunk in zip(keys, chunks, strict=True)]
    size = coder.raw_frame_bytes(new[0])
    step = -(-size // ALIGN) * ALIGN
    whole = memoryview(private_map(step * len(new)))
    frames = [whole[begin : begin + size] for begin in range(0, len(whole), step)]
    for frame, chunk in zip(frames, new, strict=True):
        coder.fill_raw(frame, chunk)
    return frames


def _soon() -> float:
    return SYSTEM_CLOCK.now() + WAIT_S
