"""Messages of the management API to the members' stores and processes; part of the unions in messages.py.

S scheduler half   W worker half   R router
"""

from typing import Annotated, Literal

import msgspec

from pdxfer.wire.base import Id, Message, Text

StoreVerb = Literal[
    "lookup",
    "clear",
    "pin",
    "unpin",
    "move",
    "copy",
    "compress",
    "decompress",
    "prefetch",
    "export",
    "import",
    "verify",
]


class StoreArgs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Arguments of the store verbs; each verb reads those it knows (docs/operations.md)."""

    tokens: Annotated[list[int], msgspec.Meta(max_length=1 << 18)] = []
    """The prompt whose prefix is meant; empty: see the other selectors."""
    salt: Id = ""
    """Cache salt of the prompt."""
    adapter: Text = ""
    """Where the LoRA adapter lies whose KV is meant, as its engine names it; empty: the model's own."""
    tier: Id = ""
    """Where; empty: every tier."""
    to_tier: Id = ""
    from_engine: Id = ""
    """move, copy: out of this engine's tiers (`tier`: of that one alone); empty: between tiers of the node."""
    tenant: Id = ""
    everything: bool = False
    """clear, verify: all values. Never the default."""
    older_than_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    codec: Id = ""
    ttl_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """pin: for this long; 0: until unpinned."""
    path: Text = ""
    """export, import: a file on the node."""
    repair: bool = False
    """verify: replace a broken value from another copy, or delete it."""


class StoreOp(Message, frozen=True, tag="store_op"):
    """R → W of every rank it concerns. Do this to your store; report with StoreOpUpdate."""

    op_id: Id
    verb: StoreVerb
    args: StoreArgs
    deadline_s: float
    """Seconds from now after which nobody waits."""


class StoreOpCancel(Message, frozen=True, tag="store_op_cancel"):
    """R → W. Stop; what is done stays done, and the last update says how much that was."""

    op_id: Id


class StoreOpUpdate(Message, frozen=True, tag="store_op_update"):
    """W → R. Progress of an operation on this rank; the one with `over` is the last."""

    op_id: Id
    rank: int
    done: int = 0
    total: int = 0
    over: bool = False
    result: Annotated[bytes, msgspec.Meta(max_length=1 << 20)] = b""
    """A JSON object, with `over`."""
    error: Text = ""
    """Why it failed or ended early, with `over`."""


class SetLogLevel(Message, frozen=True, tag="set_log_level"):
    """R → S, W. Log at this level from now on."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"]


class SetWire(Message, frozen=True, tag="set_wire"):
    """R → W. Send new prompts as codec frames where that is faster, or all raw; the heartbeat confirms it."""

    is_on: bool
