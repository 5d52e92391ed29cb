"""Which tiers other engines read from: servers, a host's shared memory and, where nodes read each other's tiers
(`peer:`), what a node keeps for itself. Used by writing.py for a spill, and by the connector, which spills only where
there is such a tier. Pure.
"""

from collections.abc import Sequence

from pdxfer.config.store import StoreConfig
from pdxfer.store.open import PEER, scheme_of
from pdxfer.store.slot import LOCAL, TierSlot

_UNLISTED = frozenset({"nixl-gds", "nixl-gds-mt", "nixl-obj"})
"""Not served to peers, and no server either: their index is a directory of this host."""


def others_read(config: StoreConfig) -> bool:
    """Whether other engines reach some tier of this configuration."""
    schemes = [scheme_of(tier.url) for tier in config.tiers]
    memory = {"shm", "dram"} if config.shared_memory else {"shm"}
    return any(
        scheme in memory or _is_server(scheme) or (scheme in LOCAL and PEER in schemes)
        for scheme in schemes
        if scheme != PEER
    )


def in_reach(slots: Sequence[TierSlot]) -> list[TierSlot]:
    """Those that others read. Among peers the fastest is first; else servers, which engines of other hosts reach, too,
    and then the memory that this host's engines share."""
    own = [slot for slot in slots if not slot.foreign]
    servers = [slot for slot in own if _is_server(slot.tier.kind)]
    if len(own) < len(slots):
        return [slot for slot in own if slot in servers or slot.local]
    return [*servers, *(slot for slot in own if slot.shared)]


def _is_server(kind: str) -> bool:
    """Also a plug-in's scheme or kind, of which nothing is known."""
    return kind not in LOCAL and kind not in _UNLISTED and kind != "shm"
