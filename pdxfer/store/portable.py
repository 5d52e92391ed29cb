"""A prompt's chunks as one file: the verbs `export` and `import`. See manage.py for what all verbs promise.

    "PDXFERKV"   version u16   identity (16)   number of chunks u32   xxh3 of the 30 bytes before u64
    then per chunk:  length u64   the frame as it was stored (frame.py: its own checksums, key, identity)
    "PDXFEREND"  number of chunks u32   xxh3 of all frames' header bytes, in order u64         little-endian

Frames keep their codec. Written beside its place, synced, then renamed: a file that is there is whole. Nothing of a
file of another identity, another version or with any wrong byte is taken.
"""

import os
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from pdxfer.codec.frame import HEADER_BYTES, MAX_RAW_BYTES, FrameError, read_header
from pdxfer.core.errors import IdentityError, PdxferError
from pdxfer.store.base import Outcome
from pdxfer.store.chunk import Wanted
from pdxfer.store.manage import Progress, slots_of, soon
from pdxfer.store.tiered import TieredStore

MAGIC, END = b"PDXFERKV", b"PDXFEREND"
VERSION = 1
"""1: first (2026-11-29)."""
_HEAD = struct.Struct("<8sH16sI")
_HEAD_CHECK = struct.Struct("<Q")
_LENGTH = struct.Struct("<Q")
_TAIL = struct.Struct("<9sIQ")


class PortableError(PdxferError):
    """This file cannot be written, or is not a whole, unchanged export."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Answer of `export`."""

    path: str
    num_chunks: int
    """Leading chunks that some tier had; the prefix that the file holds."""
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Answer of `import_`."""

    num_chunks: int
    """In the file; all of them verified."""
    num_tokens: int
    stored: int
    already: int
    refused: dict[str, int]
    """What the tier said → chunks."""


async def export(store: TieredStore, progress: Progress, keys: Sequence[bytes], path: Path) -> Exported:
    """Write the longest present prefix of `keys`. Replaces a file that is there."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    num_chunks = num_tokens = 0
    digest = xxhash.xxh3_64()
    prefix = await store.lookup(keys, soon(store))
    try:
        file = await store.workers.run(temporary.open, "xb")
        try:
            # Its number of chunks is known at the end: written again then.
            await store.workers.run(file.write, _head(store.coder.identity, 0))
            for key in keys[: prefix.num_chunks]:
                frame = await _frame(store, key)
                if frame is None:
                    break
                num_tokens += read_header(frame).num_tokens
                digest.update(frame[:HEADER_BYTES])
                await store.workers.run(_append, file, frame)
                num_chunks += 1
                progress(num_chunks, prefix.num_chunks)
            num_bytes = await store.workers.run(_finish, file, store.coder.identity, num_chunks, digest.intdigest())
        finally:
            await store.workers.run(file.close)
        await store.workers.run(_publish, temporary, path)
    except OSError as error:
        raise PortableError(f"cannot write {path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return Exported(path=str(path), num_chunks=num_chunks, num_tokens=num_tokens, num_bytes=num_bytes)


async def import_(store: TieredStore, progress: Progress, path: Path, tier: str = "", tenant: str = "") -> Imported:
    """Check the whole file first, then put its chunks into the tier (the first one), in its codec."""
    slot = slots_of(store, tier)[0]
    try:
        file = await store.workers.run(path.open, "rb")
    except OSError as error:
        raise PortableError(f"cannot read {path}: {error}") from error
    said: dict[str, int] = {}
    num_tokens = 0
    with file:
        frames = await store.workers.run(_checked, file, path, store)
        for done, (offset, length) in enumerate(frames):
            frame = await store.workers.run(_read_at, file, offset, length)
            header = await store.workers.run(store.coder.check, frame, read_header(frame).key)
            outcome = await store.writer.put_frame(slot, header.key, frame, soon(store), tenant)
            if outcome in (Outcome.STORED, Outcome.ALREADY):
                want = Wanted(key=header.key, num_tokens=header.num_tokens, raw_bytes=header.raw_bytes)
                there = await store.reader.chunk(header.key, soon(store), [slot], want)
                if there is None:
                    outcome = Outcome.FAILED
                else:
                    there.release()
            said[outcome.value] = said.get(outcome.value, 0) + 1
            num_tokens += header.num_tokens
            progress(done + 1, len(frames))
    return Imported(
        num_chunks=len(frames), num_tokens=num_tokens, stored=said.pop("stored", 0), already=said.pop("already", 0),
        refused=said,
    )  # fmt: skip


# ---- file ------------------------------------------------------------------------------------------------------------


async def _frame(store: TieredStore, key: bytes) -> memoryview | None:
    """A verified copy of the stored frame, from the fastest tier that has it."""
    for slot in store.slots:
        if await store.reader.check(slot, key, soon(store)) is None:
            continue
        lease = await slot.get(key, soon(store))
        if lease is not None:
            async with lease:
                return memoryview(bytes(lease.view))
    return None


def _head(identity: bytes, num_chunks: int) -> bytes:
    head = _HEAD.pack(MAGIC, VERSION, identity, num_chunks)
    return head + _HEAD_CHECK.pack(xxhash.xxh3_64_intdigest(head))


def _append(file: BinaryIO, frame: memoryview) -> None:
    file.write(_LENGTH.pack(len(frame)))
    file.write(frame)


def _finish(file: BinaryIO, identity: bytes, num_chunks: int, digest: int) -> int:
    file.write(_TAIL.pack(END, num_chunks, digest))
    num_bytes = file.tell()
    file.seek(0)
    file.write(_head(identity, num_chunks))
    file.flush()
    os.fsync(file.fileno())
    return num_bytes


def _publish(temporary: Path, path: Path) -> None:
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _checked(file: BinaryIO, path: Path, store: TieredStore) -> list[tuple[int, int]]:
    """(offset, length) of each frame of a file that is whole, ours and right in every byte."""
    size = os.fstat(file.fileno()).st_size
    head = file.read(_HEAD.size + _HEAD_CHECK.size)
    if len(head) < _HEAD.size + _HEAD_CHECK.size or not head.startswith(MAGIC):
        raise PortableError(f"{path} is not an export of pdxfer")
    _, version, identity, num_chunks = _HEAD.unpack(head[: _HEAD.size])
    if version != VERSION:
        raise PortableError(f"{path} is of version {version}; this pdxfer reads version {VERSION}")
    if head[_HEAD.size :] != _HEAD_CHECK.pack(xxhash.xxh3_64_intdigest(head[: _HEAD.size])):
        raise PortableError(f"{path} is damaged: its header's checksum is wrong")
    if identity != store.coder.identity:
        raise IdentityError(
            f"{path} holds KV of identity {identity.hex()}, this engine is {store.coder.identity.hex()}: another "
            "model, weights, dtype, layout or rank; its KV would be wrong here"
        )
    frames, digest = [], xxhash.xxh3_64()
    for number in range(num_chunks):
        length_bytes = file.read(_LENGTH.size)
        length = _LENGTH.unpack(length_bytes)[0] if len(length_bytes) == _LENGTH.size else 0
        offset = file.tell()
        if not HEADER_BYTES <= length <= min(size - offset, MAX_RAW_BYTES):
            raise PortableError(f"{path} is cut or damaged: chunk {number} of {num_chunks} claims {length} bytes")
        frame = _read_at(file, offset, length)
        try:
            store.coder.check(frame, read_header(frame).key)
        except FrameError as error:
            raise PortableError(f"{path} is damaged: chunk {number} of {num_chunks}: {error}") from error
        digest.update(frame[:HEADER_BYTES])
        frames.append((offset, length))
    if file.read() != _TAIL.pack(END, num_chunks, digest.intdigest()):
        raise PortableError(f"{path} is cut or damaged: its end is not that of {num_chunks} chunks")
    return frames


def _read_at(file: BinaryIO, offset: int, length: int) -> memoryview:
    file.seek(offset)
    return memoryview(file.read(length))
