"""What a node needs to know; the connector's worker half fills it from the config."""

from dataclasses import dataclass, field

from pdxfer.node.store_side import StoreSettings
from pdxfer.node.wire_settings import WireSettings
from pdxfer.router.client import ClientSecurity
from pdxfer.transport.base import EndpointOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Of one rank."""

    engine_id: str
    rank: int
    halves_path: str
    """ipc address of the scheduler half (wire/halves.py)."""
    router: str
    """ZMQ endpoint of the router; empty: no router (store mode)."""
    security: ClientSecurity | None = None
    allow_insecure: bool = False
    """The operator does without keys (security.allow_insecure)."""
    options: EndpointOptions = field(default_factory=EndpointOptions)
    chunk_blocks: int = 2
    """Blocks a chunk."""
    digest_every: int = 1
    """Units per digest; 0 takes none (transport.integrity)."""
    drain_s: float = 0.2
    store: StoreSettings | None = None
    """None: KV is not kept."""
    wire: WireSettings | None = None
    """None: everything is sent as it is."""
