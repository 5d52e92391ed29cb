"""What a node needs to know for codecs on the wire, made from the config's section `codec`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pdxfer.codec.registry import Codecs
from pdxfer.config.store import CodecConfig
from pdxfer.store.transcode import OPAQUE, ChunkForm

Forms = Callable[[int], ChunkForm]
"""Number of layers → how units of so many layers are values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireSettings:
    """Of one engine."""

    codec: str = "auto"
    """`auto`, or the one codec to use whenever a slot is free."""
    allow: tuple[str, ...] = ("lossless",)
    """Codecs that may be sent, `name` or `name:level`."""
    tenants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tenant → codecs instead of `allow`."""
    codecs: Codecs = field(default_factory=Codecs)
    forms: Forms | None = None
    """None: this engine's values are not known; only codecs of bytes can be used."""
    dtype: str = OPAQUE
    """Of the values in KV blocks, by frame.DTYPES."""
    staging_bytes: int = 256 << 20
    """Size of decode's staging ring."""
    workers: int = 1
    """Threads that decode."""

    def allowed(self, tenant: str) -> tuple[str, ...]:
        """Codecs that may be sent for one tenant's KV."""
        every = self.tenants.get(tenant, self.allow)
        return every if self.codec == "auto" else tuple(entry for entry in every if entry == self.codec)

    @property
    def entries(self) -> list[str]:
        """All that any tenant's KV may be sent with."""
        return sorted({e for tenant in ("", *self.tenants) for e in self.allowed(tenant)})


def split(entry: str) -> tuple[str, int]:
    """`name:level` or `name` → (name, level); level 0 is the codec's default. A `module:Class` is a name."""
    name, _, level = entry.rpartition(":")
    return (name, int(level)) if name and level.isdigit() else (entry, 0)


def wire_settings(
    config: CodecConfig, model: str, codecs: Codecs, forms: Forms | None, dtype: str
) -> WireSettings | None:
    """Of an engine that serves `model`; None: everything is sent as it is.

    A codec named in `codec.wire` is allowed by that; lists for the model or a tenant say otherwise.
    """
    if config.wire == "off":
        return None
    default = config.allow if config.wire == "auto" else [config.wire]
    return WireSettings(
        codec=config.wire,
        allow=tuple(config.models.get(model, default)),
        tenants={tenant: tuple(entries) for tenant, entries in config.tenants.items()},
        codecs=codecs,
        forms=forms,
        dtype=dtype,
        staging_bytes=int(config.staging_mib * (1 << 20)),
        workers=config.workers,
    )
