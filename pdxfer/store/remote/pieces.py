"""How a value lies on servers that like small values: pieces of at most 1 MiB, each with a header of its own.

Pure, no I/O. Piece 0 is the *head*: it is written last and alone makes the value visible; the others carry its put's
number in their names, so two writers of one key never mix. Whoever reads trusts nothing: a piece that is missing,
short, damaged, of another key, place or put makes the whole value a miss. Little-endian, 64 bytes:

    0 magic "PDXP"  4 version  6 piece count  8 index   12 payload bytes  16 value bytes  24 put (8)
   32 key digest (16)  48 zero (8)  56 header xxh3

Headers say that pieces belong together; the bytes themselves are covered by the frame's checksum, once: a digest of
each piece as well took a fifth of a put's time (memory is read twice).
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from pdxfer.core.errors import PdxferError
from pdxfer.store.base import Buffer

MAGIC = b"PDXP"
VERSION = 1
"""1: first (2026-11-29)."""
HEADER_BYTES = 64
PIECE_BYTES = (1 << 20) - 256
"""Largest piece with its header: below 1 MiB with what the server adds, else its allocator takes the next size up
(Redis: 1.25 MiB). 8 pieces of 1 MiB moved 2.7x faster than one value of 8 MiB (redis 7.0.15)."""
MAX_PIECES = 0xFFFF

_HEADER = struct.Struct("<4sHHIIQ8s16sQ")
_CHECK = struct.Struct("<Q")
assert _HEADER.size + _CHECK.size == HEADER_BYTES


class PieceError(PdxferError):
    """This is not the piece that was asked for. A miss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A checked header."""

    count: int
    """Pieces of the value."""
    index: int
    length: int
    """Payload bytes of this piece."""
    num_bytes: int
    """Of the whole value."""
    put: bytes

    def bounds(self, index: int) -> tuple[int, int]:
        """Where in the value the payload of piece `index` lies, [begin, end); self is the head."""
        return index * self.length, min((index + 1) * self.length, self.num_bytes)


def split(parts: Sequence[Buffer], room: int) -> list[list[memoryview]]:
    """The concatenation of `parts` cut into payloads of `room` bytes, each a list of views; no copy. Never empty."""
    pieces: list[list[memoryview]] = [[]]
    left = room
    for part in parts:
        view = memoryview(part).cast("B")
        while view.nbytes:
            if not left:
                pieces.append([])
                left = room
            taken = view[:left]
            pieces[-1].append(taken)
            left -= taken.nbytes
            view = view[taken.nbytes :]
    return pieces


def seal(key: bytes, put: bytes, index: int, count: int, num_bytes: int, payload: Sequence[memoryview]) -> bytes:
    """The header of one piece."""
    length = sum(view.nbytes for view in payload)
    packed = _HEADER.pack(MAGIC, VERSION, count, index, length, num_bytes, put, key_digest(key), 0)
    return packed + _CHECK.pack(xxhash.xxh3_64_intdigest(packed))


def read_header(data: bytes | memoryview, key: bytes) -> Piece:
    """The header of a piece of `key`. Raises PieceError."""
    if len(data) != HEADER_BYTES:
        raise PieceError(f"{len(data)} bytes are no piece header of {HEADER_BYTES}")
    packed = bytes(data[: _HEADER.size])
    magic, version, count, index, length, num_bytes, put, digest, _zero = _HEADER.unpack(packed)
    if magic != MAGIC or version != VERSION:
        raise PieceError(f"starts with {magic!r} version {version}; this pdxfer reads {MAGIC!r} version {VERSION}")
    if _CHECK.unpack(data[_HEADER.size :])[0] != xxhash.xxh3_64_intdigest(packed):
        raise PieceError("the piece header's checksum is wrong")
    if digest != key_digest(key):
        raise PieceError("the piece belongs to another key")
    return Piece(count=count, index=index, length=length, num_bytes=num_bytes, put=put)


def read_head(data: bytes | memoryview, key: bytes) -> Piece:
    """The header of piece 0, whose counts must agree. Raises PieceError."""
    head = read_header(data, key)
    whole = head.count * head.length
    last = whole - head.num_bytes
    if head.index or not head.count or not 0 <= last < max(1, head.length) or (head.count == 1 and last):
        raise PieceError(f"the head's counts do not agree: {head}")
    return head


def check_piece(data: bytes | memoryview, key: bytes, head: Piece, index: int, length: int) -> None:
    """Whether `data` is the header of piece `index`, of so many bytes, of the value of `head`. Raises PieceError."""
    piece = read_header(data, key)
    if (piece.index, piece.count, piece.num_bytes, piece.put) != (index, head.count, head.num_bytes, head.put):
        raise PieceError(f"piece {piece.index} of another put where {index} was asked for")
    if piece.length != length:
        raise PieceError(f"piece {index} holds {length} bytes, its header says {piece.length}")


def key_digest(key: bytes) -> bytes:
    """What names the key inside a header."""
    return key[:16] if len(key) == 32 else xxhash.xxh3_128_digest(key)
