"""The pairing policy: which decode, then which prefill. Pure functions over plain data.

Decode: most credit. Prefill: least outstanding prefill tokens among those that can reach that decode. Ties go to the
smaller engine_id, so equal inputs give equal answers.
"""

from collections.abc import Iterable
from typing import NamedTuple


class DecodeOffer(NamedTuple):
    """A decode engine that may take new requests."""

    engine_id: str
    credit_blocks: int
    block_size: int


class PrefillLoad(NamedTuple):
    """A prefill engine that may take new prompts."""

    engine_id: str
    outstanding_tokens: int
    capacity_tokens: int
    """Longest prompt its pool can hold."""


def num_blocks_needed(num_tokens: int, block_size: int) -> int:
    """Blocks of a prompt and its first token."""
    return (num_tokens + 1 + block_size - 1) // block_size


def pick_decode(offers: Iterable[DecodeOffer], num_tokens: int) -> str | None:
    """The decode engine with most credit that fits the prompt, or None."""
    best: tuple[int, str] | None = None
    for engine_id, credit_blocks, block_size in offers:
        if credit_blocks * block_size > num_tokens:
            rank = (-credit_blocks, engine_id)
            if best is None or rank < best:
                best = rank
    return best[1] if best else None


def pick_prefill(loads: Iterable[PrefillLoad], num_tokens: int) -> str | None:
    """The prefill engine with least outstanding tokens that can hold the prompt, or None."""
    best: tuple[int, str] | None = None
    for engine_id, outstanding_tokens, capacity_tokens in loads:
        if capacity_tokens >= num_tokens:
            rank = (outstanding_tokens, engine_id)
            if best is None or rank < best:
                best = rank
    return best[1] if best else None
