"""The controller's verbs on this rank's store: names the values that are meant, then calls store/manage*.py.

A Handler for operator.py. What comes back is what manage found afterwards, as plain values; errors name what to change.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdxfer.core.errors import ConfigError
from pdxfer.kv.chunks import Scheme, chunk_keys, extra_bytes
from pdxfer.node.peering import Peering
from pdxfer.store import manage, manage_copy, portable, scrub
from pdxfer.store.base import Entry
from pdxfer.store.manage import Progress
from pdxfer.store.peer.pull import Pull
from pdxfer.store.tiered import TieredStore
from pdxfer.wire.manage import StoreArgs, StoreOp

SUFFIX = ".pdxkv"
"""Of exported files: nothing else is ever written or replaced on a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How this rank cuts prompts into chunks (must be as connector/chunks.py does it)."""

    chunk_tokens: int
    block_size: int
    scheme: Scheme
    with_partial: bool
    adapter: Callable[[str], str] = str
    """What a LoRA adapter's KV depends on, from where it lies: its weights' digest. May read files."""

    def keys(self, args: StoreArgs, identity: bytes) -> list[bytes]:
        """Chunk keys of a prompt."""
        extras = self._extras(args)
        chunks = chunk_keys(
            args.tokens, extras, identity, self.chunk_tokens, self.scheme, block_size=self.block_size,
            with_partial=self.with_partial,
        )  # fmt: skip
        return [chunk.key for chunk in chunks]

    def _extras(self, args: StoreArgs) -> list[bytes]:
        """As vLLM names them, by block: the adapter in each, the salt in the first."""
        salt = [("cache_salt", args.salt)] if args.salt else []
        if not args.adapter:
            return [extra_bytes(salt)] if salt else []
        lora = [("lora", self.adapter(args.adapter))]
        num_blocks = len(args.tokens) // self.block_size
        return [extra_bytes([*lora, *(salt if block == 0 else [])]) for block in range(num_blocks)]


class Verbs:
    """Implements operator.Handler for one rank."""

    def __init__(self, engine_id: str, rank: int, cut: Cut, peering: Peering | None = None) -> None:
        self._engine_id, self._rank, self._cut, self._peering = engine_id, rank, cut, peering

    async def __call__(self, store: TieredStore, op: StoreOp, progress: Progress) -> dict[str, object]:
        """Do it. Store's loop. Raises PdxferError for what cannot be done as asked."""
        args = op.args
        identity = store.coder.identity
        keys = await asyncio.to_thread(self._cut.keys, args, identity) if args.tokens else None
        match op.verb:
            case "lookup":
                return self._looked_up(await manage.lookup(store, keys or [], args.tier), len(args.tokens))
            case "clear":
                cleared = await manage.clear(
                    store, progress, keys=keys, tier=args.tier, tenant=args.tenant, older_than_s=args.older_than_s
                )
                return {"tiers": cleared}
            case "pin":
                return {"tiers": await manage.pin(store, keys or [], args.ttl_s or None, args.tier)}
            case "unpin":
                return {"tiers": await manage.unpin(store, keys or [], args.tier)}
            case "verify":
                found = await scrub.verify(store, progress, keys=keys, tier=args.tier, repair=args.repair)
                return {"tiers": found}
            case "export":
                return {"file": await portable.export(store, progress, keys or [], self._path(args.path))}
            case "import":
                path = self._path(args.path)
                return {"file": await portable.import_(store, progress, path, args.tier, args.tenant)}
            case _:
                return {"chunks": await self._copying(store, op, progress, keys)}

    async def _copying(
        self, store: TieredStore, op: StoreOp, progress: Progress, keys: Sequence[bytes] | None
    ) -> manage_copy.Copied:
        args = op.args
        if args.from_engine:
            return await self._pulling(store, op, progress, keys)
        if keys is None:
            keys = await _all_keys(store, args)
        if op.verb == "copy":
            return await manage_copy.copy(store, progress, keys, args.to_tier, args.tier, args.tenant)
        if op.verb == "move":
            return await manage_copy.move(store, progress, keys, args.to_tier, args.tier, args.tenant)
        if op.verb == "prefetch":
            return await manage_copy.prefetch(store, progress, keys, args.to_tier, args.tenant)
        codec = "raw" if op.verb == "decompress" else args.codec
        return await manage_copy.compress(store, progress, keys, args.tier, codec)

    async def _pulling(
        self, store: TieredStore, op: StoreOp, progress: Progress, keys: Sequence[bytes] | None
    ) -> manage_copy.Copied:
        """Out of another node's tiers."""
        args = op.args
        if self._peering is None:
            raise ConfigError("this node knows no other: start the engine with a router")
        link = self._peering.link(args.from_engine)
        pull = Pull(store, link, to_tier=args.to_tier, from_tier=args.tier)
        if keys is None:
            wall = store.clock.wall()
            keys = [entry.key async for page in pull.listing() for entry in page if _is_meant(entry, args, wall)]
        return await pull.run(progress, keys, remove=op.verb == "move")

    def _looked_up(self, found: manage.PrefixInfo, num_tokens: int) -> dict[str, object]:
        """Prefix lengths also in tokens: what callers think in."""
        whole = num_tokens - num_tokens % self._cut.block_size

        def tokens(num_chunks: int) -> int:
            return min(num_chunks * self._cut.chunk_tokens, whole)

        return {
            "num_tokens": tokens(found.num_chunks),
            "num_chunks": found.num_chunks,
            "tiers": [
                {
                    "tier": one.tier, "num_tokens": tokens(one.num_chunks), "num_chunks": one.num_chunks,
                    "reachable": one.reachable, "chunks": one.chunks,
                }
                for one in found.tiers
            ],
        }  # fmt: skip

    def _path(self, text: str) -> Path:
        """Of an export; {engine} and {rank} keep those of several workers apart."""
        path = Path(text.replace("{engine}", self._engine_id).replace("{rank}", str(self._rank)))
        if path.suffix != SUFFIX or not path.is_absolute():
            raise ConfigError(f"path {text!r}: give an absolute path on the node that ends in {SUFFIX}")
        return path


async def _all_keys(store: TieredStore, args: StoreArgs) -> list[bytes]:
    """Keys of a tier (all tiers), narrowed down by tenant and age."""
    keys: dict[bytes, None] = {}
    wall = store.clock.wall()
    for slot in manage.slots_of(store, args.tier):
        async for page in manage.pages(store, slot, None):
            if page is None:
                raise ConfigError(f"tier {slot.name} does not answer, so its values are not known; try again later")
            keys |= {entry.key: None for entry in page if _is_meant(entry, args, wall)}
    return list(keys)


def _is_meant(entry: Entry, args: StoreArgs, wall: float) -> bool:
    """By tenant and age."""
    is_old = not args.older_than_s or (entry.created_wall > 0 and wall - entry.created_wall >= args.older_than_s)
    return is_old and manage.is_of(entry, args.tenant)
