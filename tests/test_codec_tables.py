"""Files of calibrated tables: they come back as they were, or not at all."""

from pathlib import Path

import numpy as np
import pytest

from pdxfer.codec.tables import MemoryTables, TableFile, TableFolder, TablesError


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


def test_tables_in_memory_answer_alike() -> None:
    """As the folder does."""
    first, own = some(), some(level=3, value=3)
    tables = MemoryTables(first, own)
    assert tables.current("klt", 1) == first.to_bytes() and tables.current("klt", 3) == own.to_bytes()
    assert tables.find(own.digest) == own.to_bytes() and tables.find(bytes(16)) is None
    assert tables.current("cachegen", 1) is None
