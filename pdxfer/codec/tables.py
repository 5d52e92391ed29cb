"""Files of calibrated tables: named arrays and a few numbers of one codec and model, found by digest. Never a pickle.

    0 magic "PDXT"   4 version u16   6 zero u16   8 header bytes u32   12 zero u32   16 header (JSON), then the arrays,
    each at a multiple of 64; at the very end 16 bytes: blake3 of everything before. That digest names the tables in
    every frame made with them.

`TableFolder` keeps the files of one model: NAME-DIGEST.pdxt, and NAME.current naming the one to encode with; NAME is
the codec, or codec-lN where each level has its own. Made by calibrate.py, read by klt and cachegen.
"""

import json
import logging
import os
import re
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from pdxfer.core.errors import PdxferError

log = logging.getLogger(__name__)

MAGIC = b"PDXT"
VERSION = 1
"""1: first (2026-11-29)."""
DIGEST_BYTES = 16
MAX_BYTES = 4 << 30
MAX_HEADER_BYTES = 1 << 20
ALIGN = 64
DTYPES = ("uint8", "int16", "uint16", "int64", "float32")

_HEAD = struct.Struct("<4sHHII")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


class TablesError(PdxferError):
    """These bytes are no tables we can use: damaged, of another version, or of another codec. Calibrate again."""


class TableFile:
    """Tables in memory: `codec`, `facts` (JSON values), `arrays` (read-only views), `digest`."""

    def __init__(self, codec: str, facts: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self.codec = codec
        self.facts = dict(facts)
        self.arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        self.digest = bytes(DIGEST_BYTES)

    def __repr__(self) -> str:
        return f"<TableFile {self.codec} {self.digest.hex()[:12]} arrays={','.join(self.arrays)}>"

    def to_bytes(self) -> bytes:
        """The file; sets `digest`."""
        entries, offset = [], 0
        for name, array in self.arrays.items():
            if str(array.dtype) not in DTYPES:
                raise ValueError(f"array {name} is {array.dtype}; tables hold {', '.join(DTYPES)}")
            entries.append({"name": name, "dtype": str(array.dtype), "shape": array.shape, "offset": offset})
            offset += -(-array.nbytes // ALIGN) * ALIGN
        header = json.dumps({"codec": self.codec, "facts": self.facts, "arrays": entries}).encode()
        out = bytearray(_HEAD.pack(MAGIC, VERSION, 0, len(header), 0) + header)
        out += bytes(-len(out) % ALIGN)
        for array in self.arrays.values():
            out += array.tobytes()
            out += bytes(-len(out) % ALIGN)
        self.digest = blake3(out).digest(length=DIGEST_BYTES)
        return bytes(out) + self.digest

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, codec: str) -> "TableFile":
        """Checked tables of `codec`; arrays are views of `data`. Raises TablesError."""
        if not _HEAD.size + DIGEST_BYTES <= len(data) <= MAX_BYTES:
            raise TablesError(f"{len(data)} bytes are no tables")
        magic, version, _, header_bytes, _ = _HEAD.unpack(data[: _HEAD.size])
        if magic != MAGIC:
            raise TablesError(f"these are no tables of pdxfer: they do not start with {MAGIC!r}")
        if version != VERSION:
            raise TablesError(f"tables are of version {version}; this pdxfer reads version {VERSION}")
        digest = bytes(data[-DIGEST_BYTES:])
        if blake3(data[:-DIGEST_BYTES]).digest(length=DIGEST_BYTES) != digest:
            raise TablesError("the tables' digest is wrong: damaged or cut")
        if header_bytes > min(MAX_HEADER_BYTES, len(data) - _HEAD.size - DIGEST_BYTES):
            raise TablesError(f"tables claim a header of {header_bytes} bytes")
        try:
            header = json.loads(bytes(data[_HEAD.size : _HEAD.size + header_bytes]))
            if header["codec"] != codec:
                raise TablesError(f"tables of codec {header['codec']!r} where {codec!r} was asked for")
            first = -(-(_HEAD.size + header_bytes) // ALIGN) * ALIGN
            body = memoryview(data)[first : len(data) - DIGEST_BYTES]
            found = cls(codec, header["facts"], {e["name"]: _array(body, e) for e in header["arrays"]})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TablesError(f"the tables' header is damaged: {error}") from error
        found.digest = digest
        return found


def _array(body: memoryview, entry: dict[str, Any]) -> npt.NDArray[Any]:
    dtype, shape, offset = entry["dtype"], tuple(int(n) for n in entry["shape"]), int(entry["offset"])
    if dtype not in DTYPES or min(shape, default=0) < 0 or offset < 0:
        raise TablesError(f"tables hold {dtype} {shape} at {offset}")
    size = prod(shape) * np.dtype(dtype).itemsize
    if offset + size > len(body):
        raise TablesError(f"array {entry['name']} ends at {offset + size}, the tables at {len(body)}")
    return np.frombuffer(body[offset : offset + size], dtype=dtype).reshape(shape)


class TableFolder:
    """The tables of one model: base.Tables over a directory. Files are small and read when asked for."""

    def __init__(self, root: Path, model: str) -> None:
        if not _NAME.fullmatch(model):
            raise ValueError(f"{model!r} names no model's tables: lower-case letters, digits, - and _")
        self.path = root.expanduser() / model

    def __repr__(self) -> str:
        return f"<TableFolder {self.path}>"

    def current(self, codec: str, level: int) -> bytes | None:
        """The tables to encode with: those of this level, else those for all."""
        for name in (f"{_checked(codec)}-l{level}", codec):
            try:
                digest = (self.path / f"{name}.current").read_text(encoding="ascii").strip()
                return self.find(bytes.fromhex(digest))
            except FileNotFoundError:
                continue
            except ValueError as error:
                log.warning("%s/%s.current names no tables and is passed over: %s", self.path, name, error)
        return None

    def find(self, digest: bytes) -> bytes | None:
        """Tables by digest; None: not here. What is damaged is found out by whoever parses it."""
        for path in self.path.glob(f"*-{digest.hex()}.pdxt"):
            return path.read_bytes()
        return None

    def put(self, tables: TableFile) -> Path:
        """Store and make current; older ones stay, for the frames made with them."""
        data = tables.to_bytes()
        self.path.mkdir(parents=True, exist_ok=True)
        level = tables.facts.get("level")
        name = _checked(tables.codec) if level is None else f"{_checked(tables.codec)}-l{int(level)}"
        path = self.path / f"{name}-{tables.digest.hex()}.pdxt"
        _replace(path, data)
        _replace(self.path / f"{name}.current", tables.digest.hex().encode("ascii"))
        return path

    def files(self) -> list[Path]:
        """All tables here, by name."""
        return sorted(self.path.glob("*.pdxt"))


def _checked(codec: str) -> str:
    if not _NAME.fullmatch(codec):
        raise ValueError(f"{codec!r} is no codec's name")
    return codec


def _replace(path: Path, data: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(data)
    os.replace(beside, path)


class MemoryTables:
    """base.Tables over tables in memory: for calibration, tests and benches."""

    def __init__(self, *files: TableFile) -> None:
        self._by_digest = {}
        self._current = {}
        for file in files:
            data = file.to_bytes()
            self._by_digest[file.digest] = data
            self._current[file.codec, file.facts.get("level")] = data

    def current(self, codec: str, level: int) -> bytes | None:
        """Those of this level, else those for all."""
        return self._current.get((codec, level)) or self._current.get((codec, None))

    def find(self, digest: bytes) -> bytes | None:
        """By digest."""
        return self._by_digest.get(digest)
