"""Codecs in an engine's store: blocks as vLLM's own operator packs them → frames of values → other blocks.

Error bounds are those of the codecs' own suites; what must be exact is compared bit for bit.
"""

import logging
import queue
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from codec_bounds import range_bound, rounding
from test_codec_klt import learnt

from pdxfer.codec.base import EXACT_TOKENS
from pdxfer.codec.frame import FrameHeader, read_header
from pdxfer.codec.klt import STEPS, V_GRADE
from pdxfer.codec.registry import Codecs
from pdxfer.codec.tables import TableFolder
from pdxfer.codec.values import from_float, to_float
from pdxfer.config.store import CodecConfig, StoreConfig, TierConfig
from pdxfer.connector.packing import form_of, reshape_and_cache
from pdxfer.connector.values import chunk_form, codecs_of
from pdxfer.core.clock import SYSTEM_CLOCK
from pdxfer.core.errors import ConfigError
from pdxfer.kv.layout import KvLayout
from pdxfer.kv.pack import Packing
from pdxfer.memory.region import Region
from pdxfer.node.plan import SavePlan
from pdxfer.node.store_blocks import HostBlocks
from pdxfer.node.store_side import StoreSettings, StoreSide
from pdxfer.store.chunk import NewChunk
from pdxfer.store.transcode import Transcoder
from pdxfer.wire.halves import ToScheduler
from pdxfer.wire.store_facts import Held, Load, Loaded

LAYERS, HEADS, BLOCK, DIM, NUM_BLOCKS = 2, 2, 32, 64, 16
CHUNK_BLOCKS = 2
TOKENS = CHUNK_BLOCKS * BLOCK
SHAPE = (LAYERS, 2, HEADS, TOKENS, DIM)
ISA, DTYPE = "vec", "bfloat16"
SLOW = 20.0
FROM, TO = [9, 3, 4, 8, 5, 6], [11, 15, 12, 14, 1, 2]


class Cache:
    """vLLM's KV tensors, [B, H, N, 2 D] a layer, in one storage."""

    def __init__(self) -> None:
        self.tensors = torch.zeros(LAYERS, NUM_BLOCKS, HEADS, BLOCK, 2 * DIM, dtype=torch.bfloat16)
        self.packing = Packing(kind=ISA, heads=HEADS, block_size=BLOCK, head_dim=DIM, item_bytes=2)
        size = self.packing.block_bytes
        self.layout = KvLayout(
            base=self.tensors.data_ptr(), num_bytes=self.tensors.nbytes, num_blocks=NUM_BLOCKS, block_bytes=size,
            block_stride=size, layer_offsets=tuple(i * NUM_BLOCKS * size for i in range(LAYERS)), block_size=BLOCK,
        )  # fmt: skip
        self.blocks = HostBlocks(Region(self.layout))

    def compute(self, block_ids: list[int], values: np.ndarray) -> None:
        """Write values [L, 2, H, T, D] as the model does: by vLLM's operator."""
        words = from_float(values, DTYPE).reshape(*values.shape[:4], 2 * DIM)
        for layer in range(LAYERS):
            key, value = (np.ascontiguousarray(words[layer, half].swapaxes(0, 1)) for half in (0, 1))
            packed = np.zeros((len(block_ids), self.packing.block_bytes), dtype=np.uint8)
            reshape_and_cache(key, value, packed, self.packing, DTYPE)
            self._bytes[layer, block_ids] = packed

    def holds(self, block_ids: list[int]) -> np.ndarray:
        """The values in these blocks."""
        packed = np.ascontiguousarray(self._bytes[:, block_ids]).reshape(-1)
        form = form_of(self.tensors[0], ISA, BLOCK, LAYERS)
        return to_float(form.unpack(packed, len(block_ids) * BLOCK), DTYPE).reshape(LAYERS, 2, HEADS, -1, DIM)

    @property
    def _bytes(self) -> np.ndarray:
        return self.tensors.view(torch.uint8).numpy().reshape(LAYERS, NUM_BLOCKS, self.packing.block_bytes)


class Rank:
    """A store side over such a cache, wired as the connector does it."""

    def __init__(self, *tiers: TierConfig, codecs: Codecs | None = None) -> None:
        self.cache = Cache()
        self.facts: queue.SimpleQueue[ToScheduler] = queue.SimpleQueue()
        config = StoreConfig(enabled=True, tiers=list(tiers))
        form = chunk_form(self.cache.tensors[0], ISA, BLOCK, LAYERS, config)
        settings = StoreSettings(
            config=config, identity={"m": "test"}, codecs=codecs or Codecs(), form=form, dtype=DTYPE
        )
        self.side = StoreSide(settings, 0, BLOCK, self.cache.blocks, self.facts.put, SYSTEM_CLOCK)
        self.side.begin()

    def close(self) -> None:
        self.side.close()

    def save(self, number: int, values: np.ndarray) -> None:
        """Compute chunk `number` of a prompt and save it; every tier has it then."""
        ids = tuple(FROM[CHUNK_BLOCKS * number :][:CHUNK_BLOCKS])
        self.cache.compute(list(ids), values)
        plan = SavePlan(
            save_id=1, keys=(key_of(number),), block_ids=ids, first_token=number * TOKENS, num_tokens=TOKENS
        )
        self.side.save((plan,), None)
        lacking = {slot.name for slot in self.side.thread.store.slots}
        while lacking:
            fact = self.facts.get(timeout=SLOW)
            if isinstance(fact, Held) and key_of(number) in fact.added:
                lacking.discard(fact.tier)

    def load(self, count: int) -> np.ndarray:
        """The values of the first `count` chunks, from other blocks."""
        ids = TO[: count * CHUNK_BLOCKS]
        keys = [key_of(i) for i in range(count)]
        counts = [CHUNK_BLOCKS] * count
        self.side.on_half(Load(load_id="l", keys=keys, num_blocks=counts, skip_blocks=0, block_ids=ids, timeout_s=SLOW))
        while not isinstance(fact := self.facts.get(timeout=SLOW), Loaded):
            pass
        assert (fact.num_chunks, fact.reason) == (count, "")
        return self.cache.holds(ids)

    def header(self, number: int, tier: int = 0) -> FrameHeader:
        """Of the stored frame."""

        async def look(store: object) -> FrameHeader:
            lease = await self.side.thread.store.slots[tier].get(key_of(number), SYSTEM_CLOCK.now() + SLOW)
            assert lease is not None
            async with lease:
                return read_header(lease.view)

        return self.side.thread.submit(look).result(SLOW)


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "little") * 8


def values_of(number: int) -> np.ndarray:
    """Floats around the numbers of a real K and V, rounded to the cache's dtype."""
    floats = np.random.default_rng(number).normal(0.5, 1.0, SHAPE).astype(np.float32)
    return to_float(from_float(floats, DTYPE), DTYPE).reshape(SHAPE)


def bound(codec: str, values: np.ndarray) -> np.ndarray:
    """Largest error of each value."""
    if codec == "int8":
        return range_bound(values, -1, 255.0, DTYPE)
    if codec == "klt":
        rms = np.sqrt(np.square(values).mean((2, 3, 4), keepdims=True))
        return rms * STEPS[4] * max(V_GRADE) * 0.502 + rounding(np.abs(values) + rms, DTYPE)
    return np.zeros(values.shape)


def assert_close(codec: str, found: np.ndarray, wanted: np.ndarray, is_first: bool) -> None:
    """Within the codec's bound, and really coded; a context's first tokens exactly."""
    assert (np.abs(found - wanted) <= bound(codec, wanted)).all(), codec
    assert np.array_equal(found, wanted) == (codec in ("raw", "lossless", "zstd")), codec
    if is_first:
        assert np.array_equal(found[:, :, :, :EXACT_TOKENS], wanted[:, :, :, :EXACT_TOKENS]), codec


@contextmanager
def rank(*tiers: TierConfig, codecs: Codecs | None = None) -> Iterator[Rank]:
    with closing(Rank(*tiers, codecs=codecs)) as made:
        yield made


@pytest.mark.parametrize("codec", ["raw", "lossless", "zstd", "int8", "klt"])
def test_blocks_survive_the_memory_tier_in_every_codec(codec: str) -> None:
    """Exactly where the codec is lossless, within its bound else; the stored frame is of that codec and smaller."""
    with rank(TierConfig(url="dram:", capacity_gib=0.05, codec=codec)) as r:
        for number in (0, 1):
            r.save(number, values_of(number))
            header = r.header(number)
            assert (header.codec, header.first_token, header.opaque) == (
                codec, number * TOKENS, codec in ("raw", "lossless", "zstd"),
            )  # fmt: skip
            assert codec == "raw" or header.payload_bytes < 0.9 * header.raw_bytes
        found = r.load(2)
        assert_close(codec, found[:, :, :, :TOKENS], values_of(0), is_first=True)
        assert_close(codec, found[:, :, :, TOKENS:], values_of(1), is_first=False)


def test_one_prefix_in_several_codecs(tmp_path: Path) -> None:
    """A directory that was written with int8, then klt, then lossless is one prefix to whoever reads it."""
    names = ("int8", "klt", "lossless")
    for number, codec in enumerate(names):
        with rank(TierConfig(url=f"file://{tmp_path}", capacity_gib=0.1, codec=codec)) as r:
            r.save(number, values_of(number))
    with rank(TierConfig(url="dram:", capacity_gib=0.05), TierConfig(url=f"file://{tmp_path}", capacity_gib=0.1)) as r:
        assert tuple(r.header(number, 1).codec for number in range(3)) == names
        found = r.load(3)
        for number, codec in enumerate(names):
            part = found[:, :, :, number * TOKENS :][:, :, :, :TOKENS]
            assert_close(codec, part, values_of(number), is_first=number == 0)


def test_calibrated_tables_are_used_where_there_are_some(tmp_path: Path) -> None:
    """By the digest of the weights; a reader without them has a miss, a model without a digest none at all."""
    tables = learnt(layers=LAYERS, heads=HEADS, dim=DIM)
    TableFolder(tmp_path, "ab12").put(tables)
    tier = TierConfig(url="dram:", capacity_gib=0.05, codec="klt")
    for weights, digest in (("ab12", tables.digest), ("cd34", bytes(16)), ("org/Model@None", bytes(16))):
        with rank(tier, codecs=codecs_of(weights, tmp_path)) as r:
            r.save(0, values_of(0))
            assert r.header(0).tables == digest
            found = r.load(1)
            assert np.array_equal(found[:, :, :, :EXACT_TOKENS], values_of(0)[:, :, :, :EXACT_TOKENS])
            assert not np.array_equal(found, values_of(0))


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("codec", ["lossless", "zstd"])
def test_a_raw_frame_says_what_its_values_are(codec: str, odd: int) -> None:
    """Another process, which knows nothing of the engine, makes a small frame of it; odd lengths are bytes."""
    data = from_float(values_of(0), DTYPE).tobytes() + bytes(odd)
    frame = Transcoder(bytes(16), dtype=DTYPE).raw_frame(NewChunk(key=key_of(0), num_tokens=TOKENS, parts=[data]))
    stranger = Transcoder(bytes(16))
    coded = b"".join(stranger.recode(memoryview(frame), key_of(0), codec, 0))
    assert bytes(stranger.open(memoryview(coded), key_of(0))[1]) == data
    assert odd or len(coded) < 0.85 * len(data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: (t, "neon", BLOCK), "neon"),
        (lambda t: (t, "plain", BLOCK), "on CPU only"),
        (lambda t: (t, ISA, 2 * BLOCK), r"not \[B, H, 64, 2 D\]"),
        (lambda t: (t.transpose(1, 2), ISA, HEADS), "not .B, H, 2, 2 D."),
        (lambda t: (t.view(torch.float8_e4m3fn), ISA, BLOCK), "float8_e4m3fn is not unpacked"),
    ],
)
def test_blocks_that_are_not_proved_cost_lossy_codecs_only(change, said, caplog: pytest.LogCaptureFixture) -> None:
    """One warning where some tier wants such a codec, a line of information else."""
    cache, isa, block_size = change(Cache().tensors[0])
    with pytest.raises(ConfigError, match=said):
        form_of(cache, isa, block_size, LAYERS)
    for codec, level in (("int8", logging.WARNING), ("lossless", logging.INFO)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "pdxfer.connector.values"):
            config = StoreConfig(tiers=[TierConfig(url="dram:", codec=codec)])
            assert chunk_form(cache, isa, block_size, LAYERS, config) is None
        assert [record.levelno for record in caplog.records] == [level]


@pytest.mark.slow
def test_a_worker_gives_its_store_form_and_tables(tmp_path: Path) -> None:
    """What register hands to the node."""
    from pdxfer.connector.settings import ConnectorSettings
    from pdxfer.connector.worker_half import WorkerHalf, layout_of

    cache = Cache()
    layers = list(cache.tensors)
    layout = layout_of(layers, NUM_BLOCKS, BLOCK)
    store = StoreConfig(enabled=True, tiers=[TierConfig(url="dram:", codec="klt")])
    settings = ConnectorSettings(
        role="both",
        engine_id="e",
        url="",
        router="",
        halves_path="",
        store=store,
        codec=CodecConfig(tables_dir=str(tmp_path)),
    )
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1, data_parallel_index=0))
    half = WorkerHalf(settings, config, SimpleNamespace(), 0)  # type: ignore[arg-type]
    made = half._store_settings({"weights": "ab12", "packing": ISA}, layers[0], layout)
    assert made.dtype == DTYPE and made.form is not None and made.form.spec(TOKENS, 0).shape == SHAPE
    assert made.codecs is not None and not made.codecs.get("klt").opaque
    directories = [made.subdirectory]
    for world_size, index in ((1, 1), (2, 0), (2, 3)):
        config.parallel_config = SimpleNamespace(world_size=world_size, data_parallel_index=index)
        made = half._store_settings({"weights": "ab12", "packing": ISA}, layers[0], layout)
        directories.append(made.subdirectory)
    assert directories == ["", "dp1", "rank0", "dp3-rank0"], "one process at a time may use a disk tier's directory"
