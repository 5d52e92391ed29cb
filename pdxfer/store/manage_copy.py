"""The verbs that copy chunks: copy, move, prefetch, and compress in place. See manage.py for what all verbs promise.

A chunk is removed from where it was only after its new copy was read back and verified. In place: the old bytes stay
visible to readers of this store (slot.py's shadows) until the new ones are verified in the tier; if that fails, they go
back. A process that dies in between leaves that one chunk a miss in that tier.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pdxfer.codec.frame import FrameError, read_header
from pdxfer.core.errors import ConfigError
from pdxfer.store.base import Buffer, Entry, Outcome
from pdxfer.store.manage import AT_ONCE, Progress, slots_of, soon
from pdxfer.store.shadow import Shadow
from pdxfer.store.slot import TierSlot
from pdxfer.store.tiered import TieredStore
from pdxfer.store.writing import HELD

log = logging.getLogger(__name__)
T = TypeVar("T")

KNOWN = ("done", "already", "missing", "foreign")
"""What may become of a chunk; everything else is why it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What became of the chunks that were to be copied or recoded."""

    done: int
    """Verified at their target now, not there before (or in another codec)."""
    already: int
    """There before."""
    missing: int
    """In no source tier."""
    foreign: int = 0
    """Of other models, which share the tier: left alone."""
    removed: int = 0
    """`move`: gone from their source."""
    kept_pinned: int = 0
    """`move`: stay in their source because they are pinned there."""
    failed: dict[str, int] = field(default_factory=dict)
    """Reason → chunks."""
    num_bytes_before: int = 0
    num_bytes_after: int = 0
    """`compress`: of the chunks that were done."""


async def copy(
    store: TieredStore, progress: Progress, keys: Sequence[bytes], to_tier: str, from_tier: str = "", tenant: str = ""
) -> Copied:
    """Bring chunks into a tier, in its codec, from the tier named or the fastest other that has them."""
    return await _copy(store, progress, keys, to_tier, from_tier, tenant, remove=False)


async def move(
    store: TieredStore, progress: Progress, keys: Sequence[bytes], to_tier: str, from_tier: str, tenant: str = ""
) -> Copied:
    """As copy; each chunk leaves `from_tier` when its copy is verified. Pinned ones stay there, too."""
    if not from_tier:
        raise ConfigError("move needs the tier to move from; to add a copy and remove nothing, use copy")
    return await _copy(store, progress, keys, to_tier, from_tier, tenant, remove=True)


async def prefetch(
    store: TieredStore, progress: Progress, keys: Sequence[bytes], to_tier: str = "", tenant: str = ""
) -> Copied:
    """Bring chunks into memory (or a tier) before they are needed."""
    target = to_tier or (store.writer.front.name if store.writer.front else store.slots[0].name)
    return await _copy(store, progress, keys, target, "", tenant, remove=False)


async def _copy(
    store: TieredStore,
    progress: Progress,
    keys: Sequence[bytes],
    to_tier: str,
    from_tier: str,
    tenant: str,
    remove: bool,
) -> Copied:
    [target] = slots_of(store, to_tier) if to_tier else slots_of(store, "?")
    known = slots_of(store, from_tier) if from_tier else store.slots
    sources = [slot for slot in known if slot is not target]
    if not sources:
        raise ConfigError(f"a chunk cannot be copied from tier {from_tier} to itself")
    counts: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for begin in range(0, len(keys), AT_ONCE):
        part = keys[begin : begin + AT_ONCE]
        outcomes = await asyncio.gather(*(_copy_one(store, sources, target, key, tenant) for key in part))
        for key, said in zip(part, outcomes, strict=True):
            (counts if said in KNOWN else failed)[said] += 1
            if remove and said in ("done", "already"):
                counts[await remove_unpinned(store, sources, key)] += 1
        progress(min(begin + AT_ONCE, len(keys)), len(keys))
    return Copied(
        done=counts["done"], already=counts["already"], missing=counts["missing"], foreign=counts["foreign"],
        removed=counts["removed"], kept_pinned=counts["kept_pinned"], failed=dict(failed),
    )  # fmt: skip


async def _copy_one(store: TieredStore, sources: Sequence[TierSlot], target: TierSlot, key: bytes, tenant: str) -> str:
    """done, already, missing, foreign, or why it failed."""
    if await store.reader.check(target, key, soon(store)) is not None:
        return "already"
    outcome = await store.writer.bring(key, sources, target, soon(store), tenant)
    if outcome is None:
        return await _missing_or_foreign(store, sources, key)
    if outcome not in HELD:
        return outcome.value
    return "done" if await store.reader.check(target, key, soon(store)) is not None else "not readable afterwards"


async def _missing_or_foreign(store: TieredStore, slots: Sequence[TierSlot], key: bytes) -> str:
    """Why none of these tiers has it for us."""
    for slot in slots:
        lease = await slot.get(key, soon(store))
        if lease is None:
            continue
        async with lease:
            try:
                if read_header(lease.view).identity != store.coder.identity:
                    return "foreign"
            except FrameError:
                continue
    return "missing"


async def remove_unpinned(store: TieredStore, sources: Sequence[TierSlot], key: bytes) -> str:
    """One value out of these tiers: removed, kept_pinned or absent."""
    said = "absent"
    for slot in sources:
        [entry] = await slot.lookup([key], soon(store)) or [None]
        if entry is not None and entry.pinned:
            said = "kept_pinned"
        elif entry is not None and await slot.delete([key], soon(store)):
            store.events.evict(slot.name, [key])
            said = "removed"
    return said


async def compress(
    store: TieredStore, progress: Progress, keys: Sequence[bytes], tier: str, codec: str, level: int = 0
) -> Copied:
    """Keep chunks of one tier in another codec (`raw`: decompress), in place. Pins stay."""
    if not tier:
        raise ConfigError("compress and decompress need the name of the tier")
    [slot] = slots_of(store, tier)
    if not store.coder.usable(codec, level):
        raise ConfigError(
            f"codec {codec} needs KV values, and how this engine packs them is not known; use an opaque one"
        )
    counts: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    before = after = 0
    for done, key in enumerate(keys):
        said, old_bytes, new_bytes = await uninterrupted(_recode(store, slot, key, codec, level))
        (counts if said in KNOWN else failed)[said] += 1
        if said == "done":
            before, after = before + old_bytes, after + new_bytes
        progress(done + 1, len(keys))
    return Copied(
        done=counts["done"], already=counts["already"], missing=counts["missing"], foreign=counts["foreign"],
        failed=dict(failed), num_bytes_before=before, num_bytes_after=after,
    )  # fmt: skip


async def _recode(store: TieredStore, slot: TierSlot, key: bytes, codec: str, level: int) -> tuple[str, int, int]:
    """(done, already, missing, foreign or why it failed; bytes before; bytes after)."""
    header = await store.reader.check(slot, key, soon(store))
    lease = await slot.get(key, soon(store)) if header is not None else None
    [entry] = await slot.lookup([key], soon(store)) or [None]
    if header is None or lease is None or entry is None:
        if lease is not None:
            lease.release()
        return await _missing_or_foreign(store, [slot], key), 0, 0
    async with lease:
        if header.codec == codec and (not level or header.level == level):
            return "already", 0, 0
        old = memoryview(bytes(lease.view))
    try:
        parts = await store.workers.run(store.coder.recode, old, key, codec, level)
        new = memoryview(b"".join(parts))
        await store.workers.run(store.coder.open, new, key)
    except FrameError as error:
        log.warning("store: chunk %s cannot be kept as %s: %s", key.hex()[:12], codec, error)
        return "cannot be encoded", 0, 0
    said = await _replace(store, slot, key, entry, old, new, codec)
    return said, len(old), len(new)


async def _replace(
    store: TieredStore, slot: TierSlot, key: bytes, entry: Entry, old: memoryview, new: memoryview, codec: str
) -> str:
    """Swap the value; readers see `old` until `new` is verified in the tier. One copy of each in memory."""
    if key in slot.shadows:
        return "another operation replaces it now"
    slot.shadows[key] = Shadow(entry=entry, view=old)
    try:
        said = await _put_anew(store, slot, key, entry, (new,))
        if said is Outcome.STORED and await _is_there(store, slot, key, new):
            slot.note_codec(key, codec)
            return "done"
        await _put_anew(store, slot, key, entry, (old,))
        return f"put said {said}, old value put back" if await _is_there(store, slot, key, old) else "lost"
    finally:
        del slot.shadows[key]


async def _put_anew(store: TieredStore, slot: TierSlot, key: bytes, entry: Entry, parts: Sequence[Buffer]) -> Outcome:
    await slot.delete([key], soon(store))
    outcome = await slot.put(key, parts, soon(store), entry.tenant)
    if entry.pinned and outcome is Outcome.STORED:
        await slot.pin([key], slot.pin_left_s(key), soon(store))
    return outcome


async def _is_there(store: TieredStore, slot: TierSlot, key: bytes, value: memoryview) -> bool:
    """Read past the shadow, byte for byte."""
    lease = await slot.tier.get(key, soon(store))
    if lease is None:
        return False
    async with lease:
        return lease.view == value


async def uninterrupted(work: Awaitable[T]) -> T:
    """Let it end even if we are cancelled; then be cancelled."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait((task,))
            except asyncio.CancelledError:
                continue
        raise
