"""Settings of the tiered store and its codecs; sections `store` and `codec` of the configuration (schema.py)."""

from typing import Annotated, Literal

from msgspec import Meta, field

from pdxfer.config.section import Seconds, Section

Eviction = Literal["lru", "lfu", "s3fifo", "ttl"]


class TierConfig(Section, frozen=True):
    """One place that keeps KV. Order in `store.tiers` is order of lookup: fastest first."""

    url: Annotated[str, Meta(min_length=1)]
    """`dram:`, `file:///DIR`, `lmdb:///DIR`, `sqlite:///FILE`, `redis://`, `rediss://`, `valkey://`, `memcached://`,
    `s3://`, `gs://`, `az://`, `mooncake://`, `infinistore://`, `nixl-posix:///DIR` and its siblings (docs/remote.md),
    `peer:` (what other nodes keep), or `module:Class`."""
    capacity_gib: Annotated[float, Meta(ge=0)] = 0.0
    """Hard limit in GiB; 0: dram takes 25 % of the smaller of memory and cgroup limit, disk 10, servers their own."""
    codec: str = "raw"
    """How values are kept here: raw, lossless, zstd, int8, fp8, int4, cachegen, klt, or a plug-in's name."""
    level: Annotated[int, Meta(ge=0, le=9)] = 0
    """The codec's level; 0: its default."""
    write: Literal["through", "back", "none"] = "through"
    """When values arrive here: `through` with the save, `back` when memory is 75 % full, `none` by hand only."""
    promote: bool = True
    """A hit here is copied into the faster tiers."""
    eviction: Eviction = "lru"
    """Which value goes first."""
    ttl_s: Annotated[float, Meta(ge=0)] = 0.0
    """Values older than this are gone; 0: no limit."""
    admit_second_sight: bool = False
    """Take a value only when its key is offered a second time: spares SSDs one-time prompts."""
    get_timeout_s: Seconds = 2.0
    """A read that takes longer is a miss."""
    put_timeout_s: Seconds = 10.0
    """A write that takes longer is dropped."""
    options: dict[str, str] = field(default_factory=dict)
    """Further settings of this kind of tier: docs/disk.md, docs/remote.md."""


class StoreConfig(Section, frozen=True):
    """KV kept across requests, sessions and restarts, and the fallback of the direct path."""

    enabled: bool = False
    """Save and load at all."""
    tiers: Annotated[list[TierConfig], Meta(max_length=8)] = field(default_factory=lambda: [TierConfig(url="dram:")])
    """Where, fastest first."""
    save: Literal["computed", "second_sight", "on_gpu_eviction", "none"] = "computed"
    """Which prompts are saved: all computed, prefixes seen before, what the engine is about to forget, or none."""
    save_decoded: bool = True
    """Also what decode wrote: the next turn of a conversation starts with it."""
    chunking: Literal["fixed", "blocks"] = "fixed"
    """Keys per chunk of `transport.chunk_tokens`, or per KV block."""
    partial_chunks: bool = True
    """Keep a prompt's last, incomplete chunk too (whole blocks of it)."""
    lookup_timeout_s: Seconds = 0.2
    """A request waits this long for slow tiers to say what they have; then it is computed."""
    load_timeout_s: Seconds = 10.0
    """Loading a prefix may take this long; the rest is computed."""
    max_pending_saves: Annotated[int, Meta(ge=1)] = 64
    """Chunks waiting to be saved; more are dropped and counted, before they slow inference."""
    max_pending_loads: Annotated[int, Meta(ge=1)] = 64
    """Requests loading at once; more are computed."""
    hash_scheme: Literal["blake3", "sha256"] = "blake3"
    """Of chunk keys; all engines that share tiers must agree."""
    shared_memory: str = ""
    """Socket of the host's store process, whose DRAM all engines of this host read in place; empty: a private arena."""
    tenant_quota_gib: dict[str, float] = field(default_factory=dict)
    """Tenant → GiB it may keep in each capacity-bound tier."""
    pin_quota_fraction: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Part of a tier that may be pinned."""


class CodecConfig(Section, frozen=True):
    """Compression on the wire. Tiers choose their own under `store.tiers`."""

    wire: str = "off"
    """`off`; `auto`: per chunk what the measured link and the codecs' rates make fastest, raw where nothing helps; or
    one codec, `name` or `name:level`, for every chunk. Works over `tcp` channels; the others always send raw."""
    allow: list[str] = field(default_factory=lambda: ["lossless"])
    """Codecs that `auto` may choose, `name` or `name:level`. Lossy ones change answers slightly, so they must be named
    here: int8 halves the bytes at a KL of 0.00005 on the demo model (docs/codecs.md)."""
    models: dict[str, list[str]] = field(default_factory=dict)
    """Served model name → codecs it allows instead of `allow`; an empty list keeps it raw."""
    tenants: dict[str, list[str]] = field(default_factory=dict)
    """Tenant → codecs it allows instead of `allow`."""
    tables_dir: str = "~/.cache/pdxfer/codecs"
    """Calibrated tables, by model identity (`pdxfer codec calibrate`)."""
    staging_mib: Annotated[float, Meta(ge=1, le=65536)] = 256.0
    """Memory of each decode engine's staging ring, in slots of one chunk; without a free slot chunks come raw."""
    workers: Annotated[int, Meta(ge=1, le=64)] = 1
    """Threads that decode what arrives, in each engine."""
