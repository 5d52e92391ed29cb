"""The header page of a value of the NIXL tiers, and the value's name.

0  magic "PDXNIXL\\0", format, length of tenant; key; num_bytes, generation, digest; created, pinned until; tenant;
   xxh3-64 of all before; zeros up to 4096
"""

import struct

import xxhash

from pdxfer.store.base import KEY_BYTES
from pdxfer.store.disk_index import TENANT_BYTES, Record

HEADER_BYTES = 4096
HEADER_FORMAT = 1
"""1: first (2026-11-29)."""
_MAGIC = b"PDXNIXL\0"
_FACTS = struct.Struct(f"<8sII{KEY_BYTES}sQQQdd{TENANT_BYTES}s")
_CHECK = struct.Struct("<Q")


def name_of(record: Record) -> str:
    """Of the value's file or object: never given twice, so that an old one's erasure cannot hit a new one."""
    return f"{record.key.hex()}-{record.generation:016x}"


def pack_header(record: Record) -> bytes:
    """The page."""
    tenant = record.tenant.encode()
    facts = _FACTS.pack(
        _MAGIC,
        HEADER_FORMAT,
        len(tenant),
        record.key,
        record.num_bytes,
        record.generation,
        record.digest,
        record.created_wall,
        record.pin_until,
        tenant,
    )
    return (facts + _CHECK.pack(xxhash.xxh3_64_intdigest(facts))).ljust(HEADER_BYTES, b"\0")


def unpack_header(page: bytes) -> Record | None:
    """What it says; None if it is not a whole header of this format."""
    facts, end = page[: _FACTS.size], _FACTS.size + _CHECK.size
    if len(page) != HEADER_BYTES or _CHECK.unpack(page[_FACTS.size : end])[0] != xxhash.xxh3_64_intdigest(facts):
        return None
    magic, version, tenant_bytes, key, num_bytes, generation, digest, created, pin, tenant = _FACTS.unpack(facts)
    if magic != _MAGIC or version != HEADER_FORMAT:
        return None
    return Record(
        key=key,
        num_bytes=num_bytes,
        tenant=tenant[:tenant_bytes].decode(),
        created_wall=created,
        pin_until=pin,
        digest=digest,
        generation=generation,
    )
