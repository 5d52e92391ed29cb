"""The verbs of the management API on one store: what is where, clear, pin, unpin. Every reply is the verified effect.

Called on the store's loop by the node's operator. Each verb may take long, calls `progress(done, total)` as it goes,
can be cancelled at any await and repeated with the same effect. The other verbs: manage_copy.py (copy, move, prefetch,
compress), scrub.py (verify), portable.py (export, import).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from pdxfer.codec.frame import FrameError, read_header
from pdxfer.core.errors import ConfigError
from pdxfer.store.base import Entry
from pdxfer.store.disk_index import kept_tenant
from pdxfer.store.slot import TierSlot
from pdxfer.store.tiered import TieredStore

Progress = Callable[[int, int], None]
"""(done, total); total is an estimate that may grow."""

CALL_S = 30.0
"""For one call to a tier; its own timeouts are shorter."""
PAGE = 1024
AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkInfo:
    """One chunk in one tier."""

    index: int
    key: bytes
    num_bytes: int
    """As kept, header included."""
    pinned: bool
    codec: str
    """Empty: gone before it could be looked at."""
    age_s: float
    """Since it was stored here; -1: the tier does not know."""
    hits: int
    tenant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPrefix:
    """What one tier has of a prompt."""

    tier: str
    num_chunks: int
    """From the first on, without a gap."""
    chunks: list[ChunkInfo]
    """All it has, also behind a gap."""
    reachable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixInfo:
    """Answer of `lookup`."""

    num_chunks: int
    """Longest prefix over all tiers together."""
    tiers: list[TierPrefix]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """What `clear` did in one tier."""

    tier: str
    removed: int
    removed_bytes: int
    left: int
    """Of what should go, still there when looked for afterwards."""
    unknown_age: int = 0
    """Not judged by `older_than_s`: the tier does not know when they came."""
    reachable: bool = True
    """False: the tier did not answer, so nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """What `pin` and `unpin` did in one tier."""

    tier: str
    pinned: int
    """Of the keys, pinned now."""
    present: int
    """Of the keys, there now."""


def slots_of(store: TieredStore, tier: str) -> list[TierSlot]:
    """The named tier, or all that are this store's to manage. ConfigError names those there are."""
    own = [slot for slot in store.slots if not slot.foreign]
    if not tier:
        return own
    found = [slot for slot in own if slot.name == tier]
    if not found:
        names = ", ".join(slot.name for slot in own)
        raise ConfigError(f"this store has no tier {tier!r} of its own; it has {names}")
    return found


def soon(store: TieredStore) -> float:
    """Deadline of one call."""
    return store.clock.now() + CALL_S


async def lookup(store: TieredStore, keys: Sequence[bytes], tier: str = "") -> PrefixInfo:
    """Per tier, what it has of these keys. Reads a value once where its codec is not known yet."""
    slots = slots_of(store, tier)
    answers = await asyncio.gather(*(slot.lookup(keys, soon(store)) for slot in slots))
    tiers = [await _tier_prefix(store, slot, keys, entries) for slot, entries in zip(slots, answers, strict=True)]
    have = {chunk.index for one in tiers for chunk in one.chunks}
    return PrefixInfo(num_chunks=next(i for i in range(len(keys) + 1) if i not in have), tiers=tiers)


async def _tier_prefix(
    store: TieredStore, slot: TierSlot, keys: Sequence[bytes], entries: Sequence[Entry | None] | None
) -> TierPrefix:
    if entries is None:
        return TierPrefix(tier=slot.name, num_chunks=0, chunks=[], reachable=False)
    wall = store.clock.wall()
    chunks = [
        ChunkInfo(
            index=index, key=keys[index], num_bytes=entry.num_bytes, pinned=entry.pinned,
            codec=await codec_of(store, slot, keys[index]), hits=entry.hits, tenant=entry.tenant,
            age_s=wall - entry.created_wall if entry.created_wall else -1.0,
        )
        for index, entry in enumerate(entries)
        if entry is not None
    ]  # fmt: skip
    have = {chunk.index for chunk in chunks}
    num_chunks = next(i for i in range(len(keys) + 1) if i not in have)
    return TierPrefix(tier=slot.name, num_chunks=num_chunks, chunks=chunks, reachable=slot.tier.stats().reachable)


async def codec_of(store: TieredStore, slot: TierSlot, key: bytes) -> str:
    """What a value is kept in; empty if it is not there or no frame."""
    if key not in slot.codecs:
        lease = await slot.get(key, soon(store))
        if lease is None:
            return ""
        async with lease:
            try:
                slot.note_codec(key, read_header(lease.view).codec)
            except FrameError:
                return ""
    return slot.codecs[key]


async def clear(
    store: TieredStore,
    progress: Progress,
    *,
    keys: Sequence[bytes] | None = None,
    tier: str = "",
    tenant: str = "",
    older_than_s: float = 0.0,
) -> list[Cleared]:
    """Remove `keys` (None: every value of the tiers, also of other models that share them), narrowed down by tenant and
    age; pinned ones too. Then look whether they are gone."""
    slots = slots_of(store, tier)
    total = len(slots) * len(keys) if keys is not None else sum(s.tier.stats().num_values for s in slots)
    done, begun = 0, store.clock.wall()
    replies = []
    cleared: dict[bytes, None] = {}
    await store.writer.quiet(soon(store))
    for slot in slots:
        removed = removed_bytes = left = unknown = 0
        reachable = True
        async for page in pages(store, slot, keys):
            if page is None:
                reachable = False
                break
            chosen, unjudged = _chosen(page, tenant, older_than_s, store.clock.wall())
            unknown += unjudged
            gone = [entry.key for entry in chosen]
            cleared |= dict.fromkeys(gone)
            removed += await slot.delete(gone, soon(store))
            still = await _present(store, slot, gone)
            left += len(still)
            removed_bytes += sum(entry.num_bytes for entry in chosen if entry.key not in still)
            _noted(store, slot, [key for key in gone if key not in still])
            done += len(page)
            progress(done, max(done, total))
        replies.append(
            Cleared(
                tier=slot.name, removed=removed, removed_bytes=removed_bytes, left=left, unknown_age=unknown,
                reachable=reachable and slot.tier.stats().reachable,
            )
        )  # fmt: skip
    await store.writer.quiet(soon(store))
    for number, slot in enumerate(slots[:-1]):
        if replies[number].reachable:
            left = await _clear_again(store, slot, list(cleared), tenant, older_than_s, begun)
            replies[number] = replace(replies[number], left=left)
    store.events.flush()
    return replies


async def _clear_again(
    store: TieredStore, slot: TierSlot, keys: Sequence[bytes], tenant: str, older_than_s: float, begun: float
) -> int:
    """Loads may have brought some of these here from a tier that was cleared later. How many are left."""
    left = 0
    for begin in range(0, len(keys), PAGE):
        found = await slot.lookup(keys[begin : begin + PAGE], soon(store))
        there = [entry for entry in found or () if entry is not None]
        chosen, _ = _chosen(there, tenant, older_than_s, store.clock.wall())
        came = [entry for entry in there if is_of(entry, tenant) and entry.created_wall >= begun]
        back = list(dict.fromkeys(entry.key for entry in (*chosen, *came)))
        await slot.delete(back, soon(store))
        still = await _present(store, slot, back)
        _noted(store, slot, [key for key in back if key not in still])
        left += len(still)
    return left


async def pages(store: TieredStore, slot: TierSlot, keys: Sequence[bytes] | None) -> AsyncIterator[list[Entry] | None]:
    """Entries of the keys, or of everything; None: no answer."""
    if keys is not None:
        for begin in range(0, len(keys), PAGE):
            entries = await slot.lookup(keys[begin : begin + PAGE], soon(store))
            yield None if entries is None else [entry for entry in entries if entry is not None]
        return
    after = b""
    while True:
        page = await slot.scan(after, PAGE, soon(store))
        yield page
        if page is None or len(page) < PAGE:
            return
        after = page[-1].key


def is_of(entry: Entry, tenant: str) -> bool:
    """Whether it is this tenant's (empty: anybody's); tiers keep long names shortened."""
    return not tenant or kept_tenant(entry.tenant) == kept_tenant(tenant)


def _chosen(page: Sequence[Entry], tenant: str, older_than_s: float, wall: float) -> tuple[list[Entry], int]:
    """Entries to remove, and how many have no age to judge."""
    mine = [entry for entry in page if is_of(entry, tenant)]
    if not older_than_s:
        return mine, 0
    dated = [entry for entry in mine if entry.created_wall]
    return [entry for entry in dated if wall - entry.created_wall >= older_than_s], len(mine) - len(dated)


async def _present(store: TieredStore, slot: TierSlot, keys: Sequence[bytes]) -> set[bytes]:
    """Those that are there; all of them if the tier does not say."""
    entries = await slot.lookup(keys, soon(store))
    if entries is None:
        return set(keys)
    return {key for key, entry in zip(keys, entries, strict=True) if entry is not None}


def _noted(store: TieredStore, slot: TierSlot, keys: Sequence[bytes]) -> None:
    store.events.evict(slot.name, keys)
    if slot is store.writer.front:
        store.writer.forget(keys)


async def pin(store: TieredStore, keys: Sequence[bytes], ttl_s: float | None, tier: str = "") -> list[Pinned]:
    """Keep these from eviction in the tier (all tiers that have them); None: until unpinned."""
    for slot in slots_of(store, tier):
        await slot.pin(keys, ttl_s, soon(store))
    return await _pins(store, keys, tier)


async def unpin(store: TieredStore, keys: Sequence[bytes], tier: str = "") -> list[Pinned]:
    """Let them be evicted again."""
    for slot in slots_of(store, tier):
        await slot.unpin(keys, soon(store))
    return await _pins(store, keys, tier)


async def _pins(store: TieredStore, keys: Sequence[bytes], tier: str) -> list[Pinned]:
    replies = []
    for slot in slots_of(store, tier):
        entries = [entry for entry in await slot.lookup(keys, soon(store)) or () if entry is not None]
        replies.append(Pinned(tier=slot.name, pinned=sum(e.pinned for e in entries), present=len(entries)))
    return replies
