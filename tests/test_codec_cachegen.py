"""Codec cachegen: the suite with its own tables and with offline tables; its structure; strays; equal bits."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from codec_bounds import rounding
from codec_levels import KINDS, use

from pdxfer.codec.base import ChunkSpec, Codec
from pdxfer.codec.cachegen import CacheGenCodec
from pdxfer.codec.cachegen_tables import GROUP, LEVELS, Histograms, Offline, code_anchors, grades, is_anchor
from pdxfer.codec.registry import Codecs
from pdxfer.codec.tables import MemoryTables, TableFile, TablesError
from pdxfer.codec.values import from_float, to_float
from pdxfer.core.errors import ConfigError
from pdxfer.testing.codec_suite import CodecSuite, kv_like

GOLDEN = Path(__file__).parent / "golden"
SHAPE = (3, 2, 2, 32)


def offline() -> MemoryTables:
    """Tables from synthetic KV."""
    histograms = Histograms(SHAPE)
    for seed in (1, 2):
        spec = ChunkSpec(dtype="float32", shape=(3, 2, 2, 300, 32), first_token=4)
        histograms.add(to_float(kv_like(spec, seed), "float32").reshape(spec.shape))
    return MemoryTables(*histograms.tables({"model": "synthetic"}))


OFFLINE = offline()


class TestOwnTables(CodecSuite):
    """No offline tables: half a step of the differences, at least half an anchor's."""

    golden_dir = GOLDEN
    golden_encoding = False  # zlib, in another version, may deflate the frequency tables to other bytes

    def codec(self) -> Codec:
        return CacheGenCodec()

    def bound(self, values: npt.NDArray[np.float32], spec: ChunkSpec) -> npt.NDArray[np.floating]:
        layers, _, heads, tokens, dim = spec.shape
        x = np.where(np.abs(values) < 1e30, values, 0).astype(np.float64)
        largest = np.abs(x).max((2, 3, 4))
        step = 4 * largest * grades(layers).reshape(layers, 2) * LEVELS[3]
        whole = np.maximum(step / 2, largest / 100) + rounding(largest * 3, spec.dtype)
        return np.broadcast_to(whole[:, :, None, None, None], (layers, 2, heads, tokens, dim))


class TestOfflineTables(CodecSuite):
    """With offline tables: exactness is asked; what a value costs is up to the calibration."""

    def codec(self) -> Codec:
        return CacheGenCodec(0, OFFLINE)

    def codecs(self) -> Codecs:
        return Codecs(OFFLINE)

    def specs(self) -> list[ChunkSpec]:
        return [
            ChunkSpec(dtype=dtype, shape=(3, 2, 2, tokens, 32), first_token=first)
            for dtype in self.dtypes
            for tokens in (1, 11, 64)
            for first in (0, 256)
        ]

    def bound(self, values: npt.NDArray[np.float32], spec: ChunkSpec) -> npt.NDArray[np.floating]:
        return np.full(spec.shape, np.inf)


@pytest.mark.parametrize("kind", KINDS)
def test_payloads_are_the_same_everywhere(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C at every instruction set and numba."""
    spec = ChunkSpec(dtype="bfloat16", shape=(3, 2, 2, 70, 32), first_token=0)
    for tables in (None, OFFLINE):
        expected = bytes(CacheGenCodec(0, tables).encode(kv_like(spec), spec).payload)
        with monkeypatch.context() as patch:
            if not use(kind, patch):
                pytest.skip(f"this CPU has no x86-64-{kind}")
            assert bytes(CacheGenCodec(0, tables).encode(kv_like(spec), spec).payload) == expected


def test_groups_of_ten_share_an_anchor_of_eight_bits() -> None:
    """Every tenth token is an anchor; its symbols use the range, its error is half a step of 127."""
    assert GROUP == 10 and np.flatnonzero(is_anchor(25)).tolist() == [0, 10, 20]
    x = np.random.default_rng(1).standard_normal((4, 7, 64)).astype(np.float32)
    x[0, 0] = 0
    sym, scales, decoded = code_anchors(x)
    assert sym.min() >= 1 and np.abs(sym.astype(int) - 128).max(2)[1:].min() >= 126
    largest = np.abs(x).max(2, keepdims=True)
    assert scales.shape == (4, 7) and (np.abs(decoded - x) <= largest / 127 * 0.51 + 1e-7).all()


def test_steps_grow_with_depth() -> None:
    """0.5, 1, 1.5 by thirds of the layers, K and V alike."""
    assert grades(6).tolist() == [0.5] * 4 + [1.0] * 4 + [1.5] * 4
    assert grades(1).tolist() == [0.5] * 2


def test_symbols_the_tables_do_not_know_come_back() -> None:
    """KV far from the calibration's: strays beside the stream, same decoding as with own tables' steps."""
    spec = ChunkSpec(dtype="float32", shape=(3, 2, 2, 64, 32), first_token=64)
    x = to_float(kv_like(spec, 9), "float32").reshape(spec.shape)
    x[:, :, :, 5::7] *= 1.8
    suite = TestOfflineTables()
    values = from_float(x, "float32")
    out = to_float(suite.roundtrip(values, spec), "float32").reshape(spec.shape)
    offline_tables = Offline.parse(OFFLINE.current("cachegen", 3) or b"")
    step = offline_tables.step.reshape(3, 2)[:, :, None, None, None]
    anchors = np.abs(x).max((2, 4), keepdims=True) / 100
    assert (np.abs(out - x) <= np.maximum(step / 2, anchors.max(3, keepdims=True)) + 1e-4).all()


def test_levels_trade_size_for_error() -> None:
    """Finer is larger and nearer, with both kinds of tables."""
    spec = ChunkSpec(dtype="bfloat16", shape=(3, 2, 2, 200, 32), first_token=64)
    values = kv_like(spec, 1)
    for tables in (None, OFFLINE):
        sizes = [len(CacheGenCodec(level, tables).encode(values, spec).payload) for level in sorted(LEVELS)]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] < values.nbytes


def test_bad_tables_and_levels_are_refused() -> None:
    """ConfigError when made, TablesError when parsed."""
    with pytest.raises(ConfigError, match="levels 1"):
        CacheGenCodec(8)
    good = TableFile.from_bytes(OFFLINE.current("cachegen", 3) or b"", "cachegen")
    for name, bad in (("step", -good.arrays["step"]), ("anchors", good.arrays["anchors"][1:]), ("deltas", None)):
        arrays = {k: v for k, v in {**good.arrays, name: bad}.items() if v is not None}
        with pytest.raises(TablesError):
            Offline.parse(TableFile("cachegen", good.facts, arrays).to_bytes())
    with pytest.raises(ConfigError, match="calibrate again"):
        CacheGenCodec(3, MemoryTables(TableFile("cachegen", {}, {})))
