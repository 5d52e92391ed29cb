"""A model without weights: text → token ids → text, the same in every engine and every process.

Output depends on all token ids of the prompt, so an engine that answered from another prompt's KV would say something
else. Pure.
"""

import struct
import zlib
from collections.abc import Iterable, Sequence

import blake3

VOCABULARY = 50_000
_CHARS_PER_TOKEN = 4
_WORDS = (
    "amber", "birch", "cloud", "delta", "ember", "fjord", "grove", "heron", "inlet", "juniper", "kelp", "lagoon",
    "meadow", "north", "ocean", "pine", "quartz", "river", "stone", "tide", "upland", "valley", "willow", "zephyr",
)  # fmt: skip


def tokenize(text: str) -> list[int]:
    """One id for every four characters."""
    pieces = (text[i : i + _CHARS_PER_TOKEN] for i in range(0, len(text), _CHARS_PER_TOKEN))
    return [zlib.crc32(piece.encode("utf-8", "surrogatepass")) % VOCABULARY for piece in pieces]


def render_chat(messages: Iterable[tuple[str, str]]) -> str:
    """The chat template: (role, content) pairs → prompt text."""
    return "".join(f"<{role}>{content}</{role}>" for role, content in messages) + "<assistant>"


def next_words(token_ids: Sequence[int], num_tokens: int, choice: int = 0) -> list[str]:
    """The continuation of a prompt: one word a token."""
    seed = blake3.blake3(pack(token_ids) + struct.pack("<I", choice)).digest(length=2 * max(num_tokens, 1))
    return [" " + _WORDS[seed[2 * i] % len(_WORDS)] for i in range(num_tokens)]


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as bytes."""
    return struct.pack(f"<{len(token_ids)}q", *token_ids)
