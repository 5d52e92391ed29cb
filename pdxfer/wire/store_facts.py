"""What the halves of an engine tell each other about its store: lookups, loads, saves, and which keys are near.

Members of the unions in halves.py. Keys are a rank's own (its identity is in them), so messages with keys go to or come
from one rank; ids (`load_id`, `find_id`, `save_ids`) are the scheduler half's and mean the same on all ranks.
"""

from typing import Annotated

import msgspec

from pdxfer.wire.base import BlockIds, Id, Text

Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Keys = Annotated[list[Key], msgspec.Meta(max_length=1 << 15)]
"""At most a million tokens in chunks of 32; about 1.1 MiB."""


class Fact(msgspec.Struct, frozen=True, kw_only=True, tag_field="m", forbid_unknown_fields=True):
    """Base of the messages between halves."""


# ---- scheduler half → worker halves ------------------------------------------------------------------------------


class Find(Fact, tag="find", frozen=True):
    """How many of these keys, from the first on, does some tier hold? Slow tiers are asked; answer Found."""

    find_id: Id
    keys: Keys
    timeout_s: float


class Load(Fact, tag="load", frozen=True):
    """Fill these blocks with the chunks of these keys; answer Loaded when nothing is written any more."""

    load_id: Id
    keys: Keys
    num_blocks: Annotated[list[int], msgspec.Meta(max_length=1 << 15)]
    """Blocks of each key's chunk."""
    skip_blocks: int
    """So many blocks of the first chunk are not wanted."""
    block_ids: BlockIds
    """Destinations, in prompt order: sum(num_blocks) - skip_blocks."""
    timeout_s: float


class Unload(Fact, tag="unload", frozen=True):
    """Stop this load; Loaded follows (or has left already)."""

    load_id: Id


class Prefetch(Fact, tag="prefetch", frozen=True):
    """A request that will probably load these keys has arrived; `on` False: it is gone."""

    find_id: Id
    keys: Keys
    on: bool = True


# ---- worker half → scheduler half --------------------------------------------------------------------------------


class Found(Fact, tag="found", frozen=True):
    """Answer to Find: so many keys from the first on are held."""

    rank: int
    find_id: Id
    num_keys: int


class Loaded(Fact, tag="loaded", frozen=True):
    """A load is over on this rank and nothing of it will be written any more; the first `num_valid` blocks are good."""

    rank: int
    load_id: Id
    num_valid: int
    num_bytes: int
    num_chunks: int
    wall: float
    reason: Text = ""
    """Why not all blocks are good."""


class Saved(Fact, tag="saved", frozen=True):
    """The bytes of these saves have been copied out of the blocks, or will not be: references go back."""

    rank: int
    save_ids: Annotated[list[int], msgspec.Meta(max_length=1 << 15)]
    num_bytes: int
    num_dropped: int
    """Of them not taken by any tier."""


class Held(Fact, tag="held", frozen=True):
    """Keys that came into, or left, one tier; in order, one stream a rank."""

    rank: int
    tier: Id
    added: Keys = []
    removed: Keys = []
    restart: bool = False
    """Forget all keys said before of this tier."""


class StoreCounts(Fact, tag="store_counts", frozen=True):
    """What the rank's store counted since its last report, by name of connector/stats.py."""

    rank: int
    counts: dict[str, float]


ToWorkerStore = Find | Load | Unload | Prefetch
ToSchedulerStore = Found | Loaded | Saved | Held | StoreCounts
