"""The slot table on disk: what is in the slab, in self-checked entries of 256 bytes, none of which crosses a sector.

Format and nothing else (disk_slab.py does the I/O). The file is a header block of 4096 bytes, then the slots. A slot
that is not a valid entry is free: damage costs the value it hits, never more. Little-endian.

    header (at 0, again at 512): 0 magic "PDXT"  4 version  6 entry_bytes  8 block_bytes  12 zero  24 xxh3 of 0..24
    entry:   0 magic "PDXE"    4 num_extents   6 zero         8 slot         16 generation    24 num_bytes
            32 created_wall   40 pin_until    48 value xxh3  56 key (32)     88 tenant (32)
           120 extents (16 × first block u32, blocks u32)   248 xxh3 of 0..248
"""

import struct
from collections.abc import Iterator

import numpy as np
import xxhash

from pdxfer.core.errors import ConfigError
from pdxfer.store.disk_index import TENANT_BYTES, Record

MAGIC = b"PDXT"
VERSION = 1
"""1: first (2026-11-29)."""
BLOCK_BYTES = 4096
HEADER_BYTES = 4096
ENTRY_BYTES = 256
MAX_EXTENTS = 16
MAX_BLOCKS = 1 << 32
"""A slab holds less than this: 16 TiB."""

_HEADER = struct.Struct("<4sHHI12x")
_ENTRY_MAGIC = b"PDXE"
_ENTRY = struct.Struct(f"<4sHHQQQddQ32s{TENANT_BYTES}s{2 * MAX_EXTENTS}I")
_CHECK = struct.Struct("<Q")
_COPIES = (0, 512)
assert _ENTRY.size + _CHECK.size == ENTRY_BYTES


def blocks_of(num_bytes: int) -> int:
    """Blocks that hold a value."""
    return -(-num_bytes // BLOCK_BYTES)


def slot_offset(slot: int) -> int:
    """Where a slot is in the file."""
    return HEADER_BYTES + slot * ENTRY_BYTES


def pack_header() -> bytes:
    """The header block."""
    head = _HEADER.pack(MAGIC, VERSION, ENTRY_BYTES, BLOCK_BYTES)
    copy = head + _CHECK.pack(xxhash.xxh3_64_intdigest(head))
    return copy.ljust(512, b"\0") + copy.ljust(HEADER_BYTES - 512, b"\0")


def check_header(block: bytes, path: str) -> bool:
    """Whether a copy of the header is whole. ConfigError: another version."""
    for at in _COPIES:
        head = block[at : at + _HEADER.size]
        if len(block) < at + _HEADER.size + _CHECK.size or head[:4] != MAGIC:
            continue
        if _CHECK.unpack_from(block, at + _HEADER.size)[0] != xxhash.xxh3_64_intdigest(head):
            continue
        _magic, version, entry_bytes, block_bytes = _HEADER.unpack(head)
        if (version, entry_bytes, block_bytes) != (VERSION, ENTRY_BYTES, BLOCK_BYTES):
            raise ConfigError(
                f"disk tier: {path} has format version {version} (entries of {entry_bytes}, blocks of {block_bytes} B);"
                f" this pdxfer reads version {VERSION} ({ENTRY_BYTES}, {BLOCK_BYTES}): use the pdxfer that wrote it, or"
                " another directory in store.tiers[].url"
            )
        return True
    return False


def has_magic(block: bytes) -> bool:
    """Whether a copy of the header, damaged or cut, still begins as ours."""
    return any(block[at : at + len(MAGIC)] == MAGIC for at in _COPIES)


def has_entry(raw: memoryview, first_slot: int) -> bool:
    """Whether some slot is a whole entry; quick where none is. `raw` is whole slots."""
    words = np.frombuffer(raw, dtype="<u4").reshape(-1, ENTRY_BYTES // 4)
    slots = np.flatnonzero(words[:, 0] == int.from_bytes(_ENTRY_MAGIC, "little")).tolist()
    return any(unpack_entry(bytes(raw[i * ENTRY_BYTES : (i + 1) * ENTRY_BYTES]), first_slot + i) for i in slots)


def pack_entry(record: Record) -> bytes:
    """The slot's bytes for this value."""
    flat = [number for extent in record.extents for number in extent]
    flat += [0] * (2 * MAX_EXTENTS - len(flat))
    packed = _ENTRY.pack(
        _ENTRY_MAGIC,
        len(record.extents),
        0,
        record.slot,
        record.generation,
        record.num_bytes,
        record.created_wall,
        record.pin_until,
        record.digest,
        record.key,
        record.tenant.encode(),
        *flat,
    )
    return packed + _CHECK.pack(xxhash.xxh3_64_intdigest(packed))


def unpack_entry(raw: bytes, slot: int) -> Record | None:
    """The value in this slot; None: damaged."""
    if _CHECK.unpack_from(raw, _ENTRY.size)[0] != xxhash.xxh3_64_intdigest(raw[: _ENTRY.size]):
        return None
    magic, num_extents, _zero, own, generation, num_bytes, created, pin, digest, key, tenant, *flat = _ENTRY.unpack(
        raw[: _ENTRY.size]
    )
    extents = tuple((flat[2 * i], flat[2 * i + 1]) for i in range(min(num_extents, MAX_EXTENTS)))
    if magic != _ENTRY_MAGIC or own != slot or sum(count for _, count in extents) != blocks_of(num_bytes):
        return None
    return Record(
        key=key,
        num_bytes=num_bytes,
        tenant=tenant.rstrip(b"\0").decode("utf-8", "replace"),
        created_wall=created,
        pin_until=pin,
        digest=digest,
        generation=generation,
        slot=slot,
        extents=extents,
    )


def unpack_entries(raw: memoryview, first_slot: int) -> Iterator[tuple[int, Record | None]]:
    """Every slot that is not all zeros, with its value or None for damage. `raw` is whole slots."""
    words = np.frombuffer(raw, dtype=np.uint64).reshape(-1, ENTRY_BYTES // 8)
    for i in np.flatnonzero(words.any(axis=1)).tolist():
        slot = first_slot + i
        yield slot, unpack_entry(bytes(raw[i * ENTRY_BYTES : (i + 1) * ENTRY_BYTES]), slot)
