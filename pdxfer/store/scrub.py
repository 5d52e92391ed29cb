"""The verb `verify`: read every value of a tier (or of a prompt) and check it; repair what another tier has intact.

Values of other models in a shared tier are checked by their own words (checksums, key) and left alone. See manage.py
for what all verbs promise.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pdxfer.codec.frame import FrameError, open_frame, read_header
from pdxfer.store.base import Lease
from pdxfer.store.manage import AT_ONCE, Progress, pages, slots_of, soon
from pdxfer.store.slot import TierSlot
from pdxfer.store.tiered import TieredStore
from pdxfer.store.writing import HELD


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrubbed:
    """What `verify` found in one tier."""

    tier: str
    intact: int
    foreign: int
    """Intact values of other identities, not counted in `intact`."""
    broken: int
    """Damaged, and removed."""
    repaired: int
    """Of the broken: put back from another tier, and verified."""
    gone: int
    """Listed, but not there when they were read: evicted meanwhile, or damaged and dropped by the tier itself."""
    reachable: bool = True


async def verify(
    store: TieredStore,
    progress: Progress,
    *,
    keys: Sequence[bytes] | None = None,
    tier: str = "",
    repair: bool = False,
) -> list[Scrubbed]:
    """Check `keys` (None: everything) in the tier (all tiers)."""
    slots = slots_of(store, tier)
    total = len(slots) * len(keys) if keys is not None else sum(s.tier.stats().num_values for s in slots)
    done, replies = 0, []
    for slot in slots:
        counts: Counter[str] = Counter()
        reachable = True
        async for page in pages(store, slot, keys):
            if page is None:
                reachable = False
                break
            for begin in range(0, len(page), AT_ONCE):
                part = [entry.key for entry in page[begin : begin + AT_ONCE]]
                counts.update(await asyncio.gather(*(_check(store, slot, key, repair) for key in part)))
                done += len(part)
                progress(done, max(done, total))
        replies.append(
            Scrubbed(
                tier=slot.name, intact=counts["intact"], foreign=counts["foreign"], repaired=counts["repaired"],
                broken=counts["broken"] + counts["repaired"], gone=counts["gone"],
                reachable=reachable and slot.tier.stats().reachable,
            )
        )  # fmt: skip
    return replies


async def _check(store: TieredStore, slot: TierSlot, key: bytes, repair: bool) -> str:
    """intact, foreign, broken, repaired or gone."""
    lease = await slot.get(key, soon(store))
    if lease is None:  # evicted meanwhile, or the tier's own check found it damaged and dropped it
        return "repaired" if repair and await _put_back(store, slot, key) else "gone"
    async with lease:
        said, why = await store.workers.run(_judge, lease, key, store.coder.identity)
    if said != "broken":
        return said
    await store.reader.distrust(slot, key, why)
    return "repaired" if repair and await _put_back(store, slot, key) else "broken"


async def _put_back(store: TieredStore, slot: TierSlot, key: bytes) -> bool:
    """From another tier that has it intact; verified afterwards."""
    others = [other for other in store.slots if other is not slot]
    if await store.writer.bring(key, others, slot, soon(store), "") not in HELD:
        return False
    return await store.reader.check(slot, key, soon(store)) is not None


def _judge(lease: Lease, key: bytes, identity: bytes) -> tuple[str, str]:
    try:
        header = read_header(lease.view)
        open_frame(lease.view, key, header.identity)
    except FrameError as error:
        return "broken", str(error)
    return ("intact" if header.identity == identity else "foreign"), ""
