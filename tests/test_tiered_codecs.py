"""Codecs between tiers: raw in memory, smaller below; one prefix may hold several; packing is undone and redone."""

import dataclasses
import logging

import numpy as np
import pytest
from tiered_kit import TOKENS, Rig, key, rig

from pdxfer.codec.base import Bytes, ChunkSpec
from pdxfer.codec.frame import HEADER_BYTES, read_header, seal
from pdxfer.config.store import TierConfig
from pdxfer.store.chunk import NewChunk, Wanted

L, H, D = 2, 3, 32
SHAPE = (L, 2, H, TOKENS, D)
RAW_BYTES = int(np.prod(SHAPE)) * 2


class ReversedForm:
    """An engine that packs its values backwards: whoever forgets to pack or unpack is found out."""

    def spec(self, num_tokens: int, first_token: int) -> ChunkSpec:
        return ChunkSpec(dtype="bfloat16", shape=(L, 2, H, num_tokens, D), first_token=first_token)

    def unpack(self, raw: Bytes, num_tokens: int) -> Bytes:
        return raw.view(np.uint16)[::-1].copy().view(np.uint8)

    def pack(self, values: Bytes, num_tokens: int) -> Bytes:
        return values.view(np.uint16)[::-1].copy().view(np.uint8)


def packed(name: int) -> bytes:
    """bfloat16 values around 1, as the engine packs them."""
    floats = np.random.default_rng(name).normal(1.0, 0.5, RAW_BYTES // 2).astype(np.float32)
    return (floats.view(np.uint32) >> 16).astype(np.uint16)[::-1].tobytes()


def floats(raw: bytes) -> np.ndarray:
    return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)


async def save(r: Rig, *names: int) -> None:
    for name in names:
        chunk = NewChunk(key=key(name), num_tokens=TOKENS, parts=[packed(name)], first_token=16 * name)
        assert (await r.store.save(chunk, r.soon)).held
    await r.settled()


async def load(r: Rig, *names: int) -> list[bytes]:
    got: dict[int, bytes] = {}
    wanted = [Wanted(key=key(n), num_tokens=TOKENS, raw_bytes=RAW_BYTES) for n in names]
    await r.store.load(wanted, lambda i, header, raw: got.__setitem__(i, bytes(raw)), r.soon)
    return [got[i] for i in sorted(got)]


def drop(r: Rig, tier: str, *names: int) -> None:
    index = [slot.name for slot in r.store.slots].index(tier)
    for name in names:
        del r.memory(index).values[key(name)]
    r.store.events.evict(tier, [key(n) for n in names])


TIERS = (
    TierConfig(url="dram:"),
    TierConfig(url="disk:", codec="int8", promote=False),
    TierConfig(url="redis:", codec="lossless", promote=False),
)


async def test_one_prefix_in_several_codecs():
    """Raw, int8 and lossless chunks side by side: exact where the codec is, close where it is lossy."""
    async with rig(*TIERS, form=ReversedForm()) as r:
        await save(r, 0, 1, 2)
        for index, codec in enumerate(("raw", "int8", "lossless")):
            assert {read_header(bytes(v.data)).codec for v in r.memory(index).values.values()} == {codec}
        drop(r, "dram", 1, 2)
        drop(r, "disk", 2)
        zero, one, two = await load(r, 0, 1, 2)
        assert zero == packed(0) and two == packed(2)
        assert one != packed(1) and np.abs(floats(one) - floats(packed(1))).max() < 0.05
        r.nothing_is_out()


async def test_a_lossy_hit_is_promoted_as_raw():
    """Memory holds what it always holds; where the chunk stood in its context is not forgotten."""
    tiers = TierConfig(url="dram:"), TierConfig(url="disk:", codec="int8")
    async with rig(*tiers, form=ReversedForm()) as r:
        await save(r, 0, 3)
        drop(r, "dram", 0, 3)
        before = await load(r, 0, 3)
        await r.settled()
        headers = [read_header(bytes(r.memory(0).values[key(n)].data)) for n in (0, 3)]
        assert [(h.codec, h.first_token) for h in headers] == [("raw", 0), ("raw", 48)]
        assert await load(r, 0, 3) == before
        assert floats(before[0])[::-1].reshape(SHAPE)[:, :, :, :4].tolist() == (
            floats(packed(0))[::-1].reshape(SHAPE)[:, :, :, :4].tolist()
        ), "the context's first tokens are exact"


async def test_values_of_another_shape_or_dtype_are_a_counted_miss():
    """Under our key and identity: still not ours."""
    tiers = (TierConfig(url="disk:", codec="int8"),)
    async with rig(*tiers, kinds=("disk",), form=ReversedForm()) as r:
        for count, changes in enumerate(({"dtype": "float16"}, {"shape": (2, 2, H, TOKENS, D // 2 * 2 - 16)}), 1):
            chunk = NewChunk(key=key(0), num_tokens=TOKENS, parts=[packed(0)])
            await r.store.save(chunk, r.soon)
            await r.settled()
            value = r.memory(0).values[key(0)]
            header = dataclasses.replace(read_header(bytes(value.data)), **changes)
            value.data[:HEADER_BYTES] = seal(header)
            assert await load(r, 0) == []
            assert r.store.slots[0].counts["corrupt"] == count


async def test_without_the_engines_layout_a_lossy_tier_keeps_raw(caplog: pytest.LogCaptureFixture):
    """Said once, at start."""
    with caplog.at_level(logging.WARNING):
        async with rig(*TIERS) as r:
            await save(r, 0)
            assert {read_header(bytes(v.data)).codec for v in r.memory(1).values.values()} == {"raw"}
    assert len([m for m in caplog.messages if "tier disk keeps raw frames: codec int8" in m]) == 1
