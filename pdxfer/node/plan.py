"""What the scheduler half tells the worker to send and to save, step by step: plain picklable values.

A block is planned once, in the step in which it becomes final; `num_ready` of the blocks were final before the step
began (prefix hits), the others become final layer by layer while the step runs.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPlan:
    """Blocks of one prompt that become final in this step."""

    transfer_id: str
    first_block: int
    """Index of block_ids[0] in the prompt's block table."""
    block_ids: tuple[int, ...]
    """Our block ids, in prompt order."""
    num_ready: int
    """The first so many are final in all layers already."""
    total_blocks: int
    """Blocks of the whole prompt, the last partial one included."""
    num_tokens: int
    """Prompt length in tokens; must equal the Grant's."""
    token_digest: bytes
    """Identity of the prompt; must equal the Grant's."""
    tenant: str = ""
    """Whose prompt it is: decides which codecs the wire may use."""
    deadline: float = float("inf")
    """When decode computes it itself, by this host's monotonic clock."""

    @property
    def is_last(self) -> bool:
        """This step completes the prompt."""
        return self.first_block + len(self.block_ids) == self.total_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """One chunk to be put into the store; its blocks are final when the step it came with has run."""

    save_id: int
    """The scheduler half's; Saved answers it, exactly once."""
    keys: tuple[bytes, ...]
    """The chunk's key on each rank."""
    block_ids: tuple[int, ...]
    """In prompt order."""
    first_token: int
    num_tokens: int
    tenant: str = ""
    reserved: bool = False
    """Must not be dropped (spill)."""


@dataclass(frozen=True, slots=True)
class Area:
    """A rectangle of final KV: blocks [first_block, +len(block_ids)) × layers [first_layer, +num_layers)."""

    first_block: int
    block_ids: tuple[int, ...]
    first_layer: int
    num_layers: int

    def clip(self, first_block: int) -> "Area | None":
        """The part from `first_block` on, or None."""
        cut = max(0, first_block - self.first_block)
        if cut >= len(self.block_ids):
            return None
        return Area(self.first_block + cut, self.block_ids[cut:], self.first_layer, self.num_layers)

    def split(self, chunk_blocks: int) -> "list[Area]":
        """Pieces that each lie inside one chunk of `chunk_blocks` blocks on the prompt's grid."""
        pieces, start, end = [], self.first_block, self.first_block + len(self.block_ids)
        while start < end:
            stop = min(end, (start // chunk_blocks + 1) * chunk_blocks)
            ids = self.block_ids[start - self.first_block : stop - self.first_block]
            pieces.append(Area(start, ids, self.first_layer, self.num_layers))
            start = stop
        return pieces
