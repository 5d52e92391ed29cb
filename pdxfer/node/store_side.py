"""One rank's store: the tiered store on its thread, and what saves into it, loads from it and asks it.

Made by the node where `store.enabled`, before the rank says that it is ready: a tier that cannot be opened ends the
engine's start with what to change.
"""

import logging
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pdxfer.codec.registry import Codecs
from pdxfer.config.store import StoreConfig, TierConfig
from pdxfer.core.clock import Clock
from pdxfer.kv.chunks import identity_digest
from pdxfer.memory.limits import default_capacity_bytes
from pdxfer.node.loader import Loader
from pdxfer.node.lookup import Lookup
from pdxfer.node.outgoing import Ready
from pdxfer.node.peering import Peering
from pdxfer.node.plan import SavePlan
from pdxfer.node.saver import Saver
from pdxfer.node.store_blocks import Blocks
from pdxfer.store.disk_options import DEFAULT_CAPACITY_BYTES
from pdxfer.store.events import Batch
from pdxfer.store.open import GIB, open_tiers
from pdxfer.store.runtime import StoreThread
from pdxfer.store.tiered import TieredStore
from pdxfer.store.transcode import ChunkForm
from pdxfer.wire.halves import ToScheduler, ToWorker
from pdxfer.wire.messages import TierReport
from pdxfer.wire.store_facts import Find, Held, Load, Prefetch, StoreCounts, Unload

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 120.0
"""A large disk index takes a while to read; no tier takes this long."""
CLOSE_S = 3.0
"""vLLM kills a worker that takes longer than 5 s to leave."""
OWN_DIRECTORY = ("file", "disk", "lmdb", "sqlite", "nixl-posix", "nixl-gds", "nixl-gds-mt")
"""Tiers of which one process at a time may use a directory."""
OWN_INDEX = "nixl-obj"
"""This one's directory is its setting `index`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """What the node's store is made from."""

    config: StoreConfig
    identity: dict[str, str]
    """What stored chunks depend on; the rank's part of the model included."""
    blocks: Blocks | None = None
    """Where KV is on a device; None: the node's region, which the CPU reaches."""
    codecs: Codecs | None = None
    form: ChunkForm | None = None
    """Lets lossy codecs see this engine's values."""
    dtype: str = "opaque"
    """Of the values in KV blocks, by frame.DTYPES."""
    subdirectory: str = ""
    """Below each tier's directory, where several processes share the configuration."""
    shares: int = 1
    """Ranks among which a tier's capacity is divided."""
    adapter: Callable[[str], str] = str
    """What a LoRA adapter's KV depends on, from where it lies."""


class StoreSide:
    """Store of one rank."""

    def __init__(
        self,
        settings: StoreSettings,
        rank: int,
        block_size: int,
        blocks: Blocks,
        report: Callable[[ToScheduler], None],
        clock: Clock,
        peering: Peering | None = None,
    ) -> None:
        """Opens the tiers; ConfigError for what a user has to change. Without `peering` it is alone."""
        self._rank, self._report, self.peering = rank, report, peering
        self._counted: dict[str, int] = {}
        self._counting = threading.Lock()
        config = _own(settings)

        async def make() -> TieredStore:
            tiers = await open_tiers(config, clock, peering.tiers if peering is not None else {})
            identity, codecs, form = identity_digest(settings.identity), settings.codecs, settings.form
            return TieredStore(tiers, config, identity, clock=clock, codecs=codecs, form=form, dtype=settings.dtype)

        self.thread = StoreThread(make)
        self.thread.start(OPEN_TIMEOUT_S)
        self._saver = Saver(rank, blocks, self.thread, report, clock)
        self._loader = Loader(rank, block_size, blocks, self.thread, report, clock)
        self._lookup = Lookup(rank, self.thread, report, clock)
        log.info("store: %s", " → ".join(slot.name for slot in self.thread.store.slots))

    def __repr__(self) -> str:
        return f"<StoreSide rank={self._rank} {self.thread.store!r}>"

    def begin(self) -> None:
        """The scheduler half listens: tell it what the tiers hold, and every change."""
        self.thread.call_soon(lambda store: store.subscribe(lambda batch: self._held(store, batch)))

    def save(self, plans: tuple[SavePlan, ...], ready: Ready) -> None:
        """The step of these plans has run. Compute thread."""
        self._saver.save(plans, ready)

    def on_half(self, message: ToWorker) -> None:
        """From the scheduler half."""
        match message:
            case Load():
                self._loader.load(message)
            case Unload():
                self._loader.stop(message)
            case Find():
                self._lookup.find(message)
            case Prefetch():
                self._lookup.prefetch(message)

    def reports(self) -> list[TierReport]:
        """The tiers' figures, for the heartbeat; tells the scheduler half what was counted since."""
        stats = self.thread.store.stats()
        damaged = sum(slot.tier.failures.get("corrupt", 0) for slot in stats.tiers)
        self._count(
            {
                "corrupt_chunks": damaged + sum(slot.counts.get("corrupt", 0) for slot in stats.tiers),
                "stored_values": sum(slot.counts.get("stored", 0) for slot in stats.tiers),
            }
        )
        return [
            TierReport(
                kind=slot.name,
                used_bytes=slot.tier.used_bytes,
                capacity_bytes=slot.tier.capacity_bytes,
                num_values=slot.tier.num_values,
                pinned_bytes=slot.tier.pinned_bytes,
                leases=slot.tier.leases,
                hits=slot.counts.get("hits", 0),
                misses=slot.counts.get("misses", 0),
                puts=slot.tier.puts,
                evictions=slot.tier.evictions,
                failures=sum(slot.tier.failures.values()),
                reachable=slot.tier.reachable,
            )
            for slot in stats.tiers
        ]

    def _count(self, totals: dict[str, int]) -> None:
        """Two threads report, and the one that looked first may come second: a counter never goes back."""
        with self._counting:
            more = {name: float(max(0, total - self._counted.get(name, 0))) for name, total in totals.items()}
            self._counted = {name: max(total, self._counted.get(name, 0)) for name, total in totals.items()}
        if any(more.values()):
            self._report(StoreCounts(rank=self._rank, counts=more))

    def close(self) -> None:
        """Leave the peers, write back what only memory has, close the tiers."""
        if self.peering is not None:
            self.peering.close()
        self.thread.close(CLOSE_S)

    def _held(self, store: TieredStore, batch: Batch) -> None:
        """Store's thread. Tiers that others write too are asked instead: what we know of them is not all."""
        self.reports()
        if batch.tier in store.local_tiers:
            self._report(
                Held(
                    rank=self._rank,
                    tier=batch.tier,
                    added=batch.added,
                    removed=batch.evicted,
                    restart=batch.restart,
                )
            )


def _own(settings: StoreSettings) -> StoreConfig:
    """The configuration of this rank: own directories and a share of each capacity. Saves are chosen by the scheduler
    half (connector/save_policy.py), so the store takes what it is given."""
    tiers = [_own_tier(tier, settings) for tier in settings.config.tiers]
    return msgspec.structs.replace(settings.config, tiers=tiers, save="computed")


def _own_tier(tier: TierConfig, settings: StoreSettings) -> TierConfig:
    scheme, _, rest = tier.url.partition(":")
    url, options = tier.url, tier.options
    if settings.subdirectory and scheme == OWN_INDEX:
        below = f"/{settings.subdirectory}"
        url = re.sub(r"(?<=[?&]index=)[^&]+", lambda found: found[0].rstrip("/") + below, url)
        if "index" in options:
            options = {**options, "index": options["index"].rstrip("/") + below}
    if settings.subdirectory and scheme in OWN_DIRECTORY:
        path, mark, query = rest.partition("?")
        own = ",".join(one.rstrip("/") + _below(scheme, settings.subdirectory) for one in path.split(","))
        url = f"{scheme}:{own}{mark}{query}"
    capacity = _share_gib(tier, scheme, settings.shares)
    return msgspec.structs.replace(tier, url=url, options=options, capacity_gib=capacity)


def _share_gib(tier: TierConfig, scheme: str, shares: int) -> float:
    """Of the capacity; also where nobody said one: each rank would take all that is meant for the host."""
    if shares == 1 or tier.capacity_gib:
        return tier.capacity_gib / shares
    if scheme == "dram":
        return default_capacity_bytes() / GIB / shares
    return DEFAULT_CAPACITY_BYTES / GIB / shares if scheme in (*OWN_DIRECTORY, OWN_INDEX) else 0.0


def _below(scheme: str, name: str) -> str:
    """sqlite's path is a file."""
    return f".{name}" if scheme == "sqlite" else f"/{name}"
