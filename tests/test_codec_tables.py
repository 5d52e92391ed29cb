"""Files of calibrated tables: they come back as they were, or not at all."""

from pathlib import Path

import numpy as np
import pytest
from test_codec_klt import coded, learnt

from pdxfer.codec.base import ChunkSpec
from pdxfer.codec.cachegen import CacheGenCodec
from pdxfer.codec.cachegen_tables import Histograms
from pdxfer.codec.calibrate import groups_of
from pdxfer.codec.klt import KltCodec
from pdxfer.codec.rank_tables import RankTables, heads_of_rank, of_rank
from pdxfer.codec.tables import MemoryTables, TableFile, TableFolder, TablesError
from pdxfer.codec.values import from_float, to_float
from pdxfer.core.errors import ConfigError
from pdxfer.testing.codec_suite import kv_like


def some(level: int | None = None, value: int = 1) -> TableFile:
    """Two small arrays."""
    facts = {"shape": [1, 2, 3, 4]} | ({} if level is None else {"level": level})
    return TableFile("klt", facts, {"a": np.arange(10, dtype=np.int16) * value, "b": np.ones((2, 3), np.float32)})


def test_tables_come_back() -> None:
    """Codec, facts, arrays, digest."""
    made = some()
    data = made.to_bytes()
    found = TableFile.from_bytes(data, "klt")
    assert found.facts == made.facts and found.digest == made.digest == data[-16:]
    assert all(np.array_equal(found.arrays[n], made.arrays[n]) for n in ("a", "b"))
    assert not found.arrays["a"].flags.writeable


def test_the_file_format_stays() -> None:
    """Golden digest: a change of the format needs a new version."""
    some().to_bytes()
    assert some().to_bytes()[-16:].hex() == "1ed3706a12ad654d6cf889781145cb07"


def test_damaged_tables_are_refused() -> None:
    """Every cut, every flipped byte, another codec, another version: TablesError."""
    data = some().to_bytes()
    with pytest.raises(TablesError, match="codec 'klt' where 'cachegen'"):
        TableFile.from_bytes(data, "cachegen")
    with pytest.raises(TablesError, match="no tables of pdxfer") as refused:
        TableFile.from_bytes(b"root:x:0" * 100, "klt")
    assert "root" not in str(refused.value), "what is in a file of others is nobody's business"
    for at in range(0, len(data), 3):
        with pytest.raises(TablesError):
            TableFile.from_bytes(data[:at], "klt")
        with pytest.raises(TablesError):
            TableFile.from_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], "klt")


def test_an_author_of_bad_tables_gets_no_further() -> None:
    """Headers that lie, with a digest that is right."""
    from blake3 import blake3

    data = some().to_bytes()[:-16]
    lies = [
        (b'"offset": 0', b'"offset": 9999'), (b'"int16"', b'"object"'), (b"[10]", b"[99999999999]"),
        (b"[10]", b"[-1]"), (b'"arrays"', b'"arrayz"'), (b'"name": "a"', b'"name": {}'), (b"{", b"["),
    ]  # fmt: skip
    for old, new in lies:
        header_bytes = int.from_bytes(data[8:12], "little")
        header = data[16 : 16 + header_bytes].replace(old, new, 1)
        body = data[16 + header_bytes :].lstrip(b"\0")
        bad = data[:8] + len(header).to_bytes(4, "little") + bytes(4) + header
        bad += bytes(-len(bad) % 64) + body
        with pytest.raises(TablesError):
            TableFile.from_bytes(bad + blake3(bad).digest(length=16), "klt")


def test_a_folder_keeps_old_tables_and_knows_the_current(tmp_path: Path) -> None:
    """Frames made with older tables stay readable; levels with their own file win."""
    folder = TableFolder(tmp_path, "model-1")
    assert folder.current("klt", 1) is None and folder.find(bytes(16)) is None and folder.files() == []
    first, second, own = some(), some(value=2), some(level=3, value=3)
    for tables in (first, second, own):
        folder.put(tables)
    current = folder.current("klt", 1)
    assert current is not None and TableFile.from_bytes(current, "klt").digest == second.digest
    third = folder.current("klt", 3)
    assert third is not None and TableFile.from_bytes(third, "klt").digest == own.digest
    old = folder.find(first.digest)
    assert old is not None and TableFile.from_bytes(old, "klt").digest == first.digest
    assert len(folder.files()) == 3
    with pytest.raises(ValueError, match="names no model"):
        TableFolder(tmp_path, "../elsewhere")


def test_damaged_names_and_files_are_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Values would silently be kept in a worse codec otherwise."""
    folder = TableFolder(tmp_path, "m")
    folder.path.mkdir(parents=True)
    (folder.path / "klt.current").write_text("no digest")
    (folder.path / f"klt-{'00' * 16}.pdxt").write_bytes(b"PDXT and nothing else")
    assert folder.current("klt", 0) is None and "klt.current names no tables" in caplog.text
    assert RankTables(folder, 0, 2).find(bytes(16)) is None and "00.pdxt are passed over" in caplog.text


def test_tables_in_memory_answer_alike() -> None:
    """As the folder does."""
    first, own = some(), some(level=3, value=3)
    tables = MemoryTables(first, own)
    assert tables.current("klt", 1) == first.to_bytes() and tables.current("klt", 3) == own.to_bytes()
    assert tables.find(own.digest) == own.to_bytes() and tables.find(bytes(16)) is None
    assert tables.current("cachegen", 1) is None


def test_heads_are_dealt_as_vllm_deals_them() -> None:
    """Equal shares, or with more ranks than heads a head on several."""
    assert [heads_of_rank(8, rank, 4) for rank in range(4)] == [range(i, i + 2) for i in (0, 2, 4, 6)]
    assert [heads_of_rank(2, rank, 4).start for rank in range(4)] == [0, 0, 1, 1]
    with pytest.raises(TablesError, match="3 KV heads cannot be dealt to 2 ranks"):
        heads_of_rank(3, 0, 2)
    assert groups_of(8, 64) == 2 and groups_of(8, 64, 4) == 4 and groups_of(2, 64, 8) == 2
    with pytest.raises(ConfigError, match="neither divides the other"):
        groups_of(3, 64, 2)


def test_ranks_give_the_values_of_the_whole_model(tmp_path: Path) -> None:
    """klt with tables cut for each of two ranks: every rank's heads come back as those of the unparallel engine do."""
    folder = TableFolder(tmp_path, "model-1")
    folder.put(learnt(heads=4, num_ranks=2))
    spec = ChunkSpec(dtype="bfloat16", shape=(2, 2, 4, 70, 32), first_token=2)
    values = kv_like(spec)
    _, expected = coded(KltCodec(0, folder), values, spec)
    whole, back = (a.view(np.uint16).reshape(spec.shape) for a in (values, expected))
    for rank in range(2):
        tables, heads = of_rank(folder, rank, 2), slice(2 * rank, 2 * rank + 2)
        part = ChunkSpec(dtype="bfloat16", shape=(2, 2, 2, 70, 32), first_token=2)
        mine = np.ascontiguousarray(whole[:, :, heads]).reshape(-1).view(np.uint8)
        fresh = KltCodec(0, RankTables(folder, rank, 2))  # another process finds them by the frame's digest
        fresh._model = None
        encoded = KltCodec(0, tables).encode(mine, part)
        assert encoded.tables != bytes(16) and encoded.tables != folder.files()[0].read_bytes()[-16:]
        _, out = coded(KltCodec(0, tables), mine, part, fresh)
        assert np.array_equal(out.view(np.uint16).reshape(part.shape), back[:, :, heads])


def test_tables_that_cannot_be_cut_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A transform over heads of two ranks: no tables, and a warning that says how to make some."""
    folder = TableFolder(tmp_path, "model-1")
    folder.put(learnt(heads=4))
    assert of_rank(folder, 0, 1) is folder
    tables = RankTables(folder, 1, 2)
    assert tables.current("klt", 0) is None and tables.find(bytes(16)) is None
    assert "calibrate with --tensor-parallel 2" in caplog.text
    folder.put(some())
    assert RankTables(folder, 1, 3).current("klt", 0) is None and "damaged" in caplog.text


def test_cachegen_tables_are_cut_by_channel(tmp_path: Path) -> None:
    """Each rank's are its own heads': they code those in no more bytes than another rank's do."""
    spec = ChunkSpec(dtype="bfloat16", shape=(2, 2, 3, 256, 16), first_token=256)
    values = to_float(kv_like(spec, 1), "bfloat16").reshape(spec.shape) * np.array([0.5, 1, 2])[:, None, None]
    histograms = Histograms((2, 2, 3, 16))
    histograms.add(values.astype(np.float32))
    folder = TableFolder(tmp_path, "model-1")
    for made in histograms.tables({}):
        folder.put(made)
    part = ChunkSpec(dtype="bfloat16", shape=(2, 2, 1, 256, 16), first_token=256)
    for rank in range(3):
        tables, mine = RankTables(folder, rank, 3), from_float(values[:, :, rank : rank + 1], "bfloat16")
        found = CacheGenCodec(0, tables).encode(mine, part)
        other = CacheGenCodec(0, RankTables(folder, (rank + 1) % 3, 3)).encode(mine, part)
        assert RankTables(folder, rank, 3).find(found.tables) is not None
        assert len(found.payload) < len(other.payload)
