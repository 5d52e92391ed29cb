"""The entropy coder: what goes in comes out, all implementations give the same words, and no input breaks it."""

import numpy as np
import pytest
from codec_levels import KINDS, use

from pdxfer.codec import rans
from pdxfer.codec.frame import FrameError

SHAPES = [(50, 256, 24), (7, 252, 3), (300, 1, 5), (5, 63, 1), (200, 100, 200), (1, 64, 1), (3, 0, 1), (9, 129, 2)]


def job(rows: int, cols: int, tables: int, seed: int = 0) -> tuple[rans.Symbols, rans.Rows, rans.Freq]:
    """Rows of symbols of many spreads, one of them constant."""
    rng = np.random.default_rng(seed)
    table = rng.integers(0, tables, rows).astype(np.uint32)
    spread = rng.uniform(0.05, 40, tables)
    sym = np.clip(np.rint(rng.standard_normal((rows, cols)) * spread[table][:, None]) + 128, 0, 255).astype(np.uint8)
    sym[0] = 128
    return sym, table, rans.frequencies(rans.count(sym, table, tables))


@pytest.mark.parametrize("kind", KINDS)
def test_symbols_come_back_and_words_are_the_same_everywhere(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C at every instruction set and numba: equal words, equal counts, equal symbols."""
    for seed, shape in enumerate(SHAPES):
        sym, table, freq = job(*shape, seed)
        words, counts = rans.encode(sym, table, freq), rans.count(sym, table, shape[2])
        with monkeypatch.context() as patch:
            if not use(kind, patch):
                pytest.skip(f"this CPU has no x86-64-{kind}")
            assert np.array_equal(rans.encode(sym, table, freq), words)
            assert np.array_equal(rans.count(sym, table, shape[2]), counts)
            assert np.array_equal(rans.decode(words, table, freq, shape[1]), sym)


def test_the_size_is_near_the_entropy() -> None:
    """Within 1 % and the 256 bytes of the states."""
    sym, table, freq = job(192, 256, 8)
    ideal = -np.log2(freq[table[:, None], sym] / rans.PROB).sum() / 8
    assert 2 * rans.encode(sym, table, freq).size <= ideal * 1.01 + 256


def test_frequencies_are_tables_whatever_is_counted() -> None:
    """Sums of 4096, every seen symbol at least 1, none all of it; also for nothing and for one symbol."""
    rng = np.random.default_rng(1)
    counts = [np.zeros(256), np.eye(256)[0] * 7, np.eye(256)[255] * 10**6, np.ones(256), rng.integers(0, 10**6, 256)]
    counts += [rng.integers(0, 2, 256) * rng.integers(0, 9, 256) ** 6 for _ in range(200)]
    freq = rans.frequencies(np.stack(counts).astype(np.int64))
    assert (freq.astype(int).sum(1) == rans.PROB).all() and freq.max() < rans.PROB
    assert (freq[np.stack(counts) > 0] > 0).all()


def test_a_symbol_without_a_chance_is_the_callers_error() -> None:
    """ValueError, native and numba."""
    sym, table, freq = job(4, 64, 1)
    sym[2, 5] = 255
    freq[0] = rans.frequencies(np.eye(1, 256, 128, dtype=np.int64))[0]
    for native in (True, False):
        with pytest.raises(ValueError, match="in no table"):
            rans.encode(sym, table, freq, native=native)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [150, pytest.param(20000, marks=pytest.mark.full)])
def test_hostile_streams_are_refused_or_decode(kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut, flipped, random words, wrong tables and wrong rows: FrameError or some symbols, the same everywhere."""
    rng = np.random.default_rng(2)
    for i in range(count):
        sym, table, freq = job(int(rng.integers(1, 20)), int(rng.integers(0, 200)), int(rng.integers(1, 70)), i)
        words = rans.encode(sym, table, freq).copy()
        what = i % 5
        if what == 0:
            words = words[: int(rng.integers(0, words.size))]
        elif what == 1:
            words[rng.integers(0, words.size, 3)] ^= rng.integers(1, 1 << 16, 3).astype(np.uint16)
        elif what == 2:
            words = rng.integers(0, 1 << 16, int(rng.integers(0, 400))).astype(np.uint16)
        elif what == 3:
            freq[0, int(rng.integers(256))] += int(rng.integers(1, 5000))
        else:
            table[int(rng.integers(table.size))] = len(freq) + int(rng.integers(0, 2**31))
        with monkeypatch.context() as patch:
            if not use(kind, patch):
                pytest.skip(f"this CPU has no x86-64-{kind}")
            try:
                assert rans.decode(words, table, freq, sym.shape[1]).shape == sym.shape
            except FrameError:
                assert what != 99
            else:
                assert what in (1, 2), "a cut stream or a bad table must not pass"


def test_a_damaged_stream_hardly_ever_passes() -> None:
    """The states must end where the encoder began: one flipped bit is nearly always found without any checksum."""
    sym, table, freq = job(20, 256, 4)
    words = rans.encode(sym, table, freq)
    rng, passed = np.random.default_rng(3), 0
    for _ in range(200):
        bad = words.copy()
        bad[int(rng.integers(bad.size))] ^= np.uint16(1 << int(rng.integers(16)))
        try:
            rans.decode(bad, table, freq, sym.shape[1])
            passed += 1
        except FrameError:
            continue
    assert passed < 10
