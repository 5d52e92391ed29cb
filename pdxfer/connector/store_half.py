"""The store as the scheduler half sees it: chunk grid, mirror of the tiers, lookups, loads and saves, put together.

Made where `store.enabled`. EngineCore thread only, like everything it holds.
"""

import logging
import secrets
from urllib.parse import urlsplit

from blake3 import blake3

from pdxfer.config.store import StoreConfig
from pdxfer.connector.chunks import Grid, PromptChunks
from pdxfer.connector.compat import Request
from pdxfer.connector.loads import Loads
from pdxfer.connector.lookups import Lookups
from pdxfer.connector.member import EngineFacts, Member
from pdxfer.connector.mirror import Mirror
from pdxfer.connector.references import References
from pdxfer.connector.requests import unsupported_by_store
from pdxfer.connector.save_policy import policy
from pdxfer.connector.saves import POOL_SHARE, Saves
from pdxfer.core.clock import Clock
from pdxfer.kv.chunks import IDENTITY_BYTES
from pdxfer.store.reach import others_read
from pdxfer.wire.store_facts import Found, Held, Saved, StoreCounts

log = logging.getLogger(__name__)

OWN_SCHEMES = ("dram", "file", "disk", "lmdb", "sqlite")
"""Tiers that only this engine writes: their mirror is complete. Others are asked (Find)."""


class StoreHalf:
    """Store mode, and the store in transfer mode."""

    def __init__(
        self,
        config: StoreConfig,
        chunk_tokens: int,
        facts: EngineFacts,
        member: Member,
        references: References,
        clock: Clock,
    ) -> None:
        size, world = facts.block_size, facts.world_size
        self.grid = Grid(
            chunk_tokens=size if config.chunking == "blocks" else chunk_tokens,
            block_size=size,
            scheme=config.hash_scheme,
            with_partial=config.partial_chunks,
            world_size=world,
        )
        self.mirror = Mirror(world)
        others_write = bool(config.shared_memory) or not all(
            urlsplit(tier.url).scheme in OWN_SCHEMES for tier in config.tiers
        )
        self.spills = others_read(config)
        """What is spilled here other engines find."""
        self.lookups = Lookups(
            self.grid,
            self.mirror,
            member,
            clock,
            slow_tiers=others_write,
            timeout_s=config.lookup_timeout_s,
        )
        self.loads = Loads(
            self.lookups,
            member,
            block_size=size,
            world_size=world,
            timeout_s=config.load_timeout_s,
            max_pending=config.max_pending_loads,
        )
        self.saves = Saves(
            references,
            self.mirror,
            policy(config.save, references, 2 * facts.max_step_blocks),
            block_size=size,
            chunk_tokens=self.grid.chunk_tokens,
            world_size=world,
            max_pending=config.max_pending_saves,
            max_blocks=max(1, facts.num_blocks // POOL_SHARE),
            save_decoded=config.save_decoded,
        )
        self.counters: dict[str, float] = {}

    def on_new_request(self, request: Request) -> None:
        """Ask for what the tiers have of it, and save what it computes."""
        if reason := unsupported_by_store(request):
            log.info("%s is neither loaded nor saved: %s", request.request_id, reason)
            return
        chunks = self.lookups.begin(request)
        if chunks is not None:
            self.saves.begin(chunks)

    def chunks(self, request: Request) -> PromptChunks | None:
        """The request's chunks, where it is stored at all."""
        return self.lookups.chunks(request.request_id)

    def request_over(self, request: Request, table: list[int]) -> None:
        """Before vLLM frees its blocks."""
        self.lookups.over(request.request_id)
        self.saves.request_over(request, table)

    def reset(self) -> None:
        """From now on other keys: what is stored cannot be found and goes as it ages. Requests that run now are neither
        loaded nor saved any more: part of their KV is the old model's."""
        nonce = secrets.token_bytes(16)
        for rank, identity in self.grid.identities.items():
            self.grid.identities[rank] = blake3(identity + nonce).digest(length=IDENTITY_BYTES)
        self.lookups.clear()
        self.saves.forget_requests()

    def apply(self, fact: Found | Saved | Held | StoreCounts) -> None:
        """A rank's report."""
        match fact:
            case Found():
                self.lookups.found(fact)
            case Saved():
                self.saves.rank_saved(fact)
            case Held():
                self.mirror.apply(fact)
            case StoreCounts():
                for name, value in fact.counts.items():
                    self.counters[name] = self.counters.get(name, 0) + value

    def take_counters(self) -> dict[str, float]:
        """What was counted since the last call."""
        counters, self.saves.counters, self.counters = self.saves.counters | self.counters, {}, {}
        return counters
