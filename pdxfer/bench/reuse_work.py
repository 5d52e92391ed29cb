"""The fixed workloads of the reuse bench: long documents, conversations, a batch with a shared prefix, one long prompt.

Token ids of real text, the same for every arm. A conversation's answers are replaced by the text that follows, so that
all arms ask exactly the same; what is stored is prompts, as with real answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pdxfer.bench.texts import Prompts

DOC_TOKENS, QUESTION_TOKENS = 3000, 24
TURN_TOKENS = 500
PREFIX_TOKENS, OWN_TOKENS = 2000, 50
LONG_TOKENS = 3500
NUM_NEW_TOKENS = 16
_DOC_SALT, _CHAT_SALT, _BATCH_SALT, _LONG_SALT, _QUESTION_SALT = 11_000, 12_000, 13_000, 14_000, 15_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How much of each."""

    docs: int = 4
    questions: int = 5
    """Of each document."""
    conversations: int = 8
    turns: int = 6
    batch: int = 64
    long: int = 5
    """Prompts of LONG_TOKENS whose time to first token is measured."""
    equal: int = 12
    """Prompts of the float32 pass."""


QUICK = Counts(docs=2, questions=2, conversations=2, turns=3, batch=8, long=2, equal=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workloads:
    """Prompts by workload; `store` is asked before, and not counted."""

    longdoc_store: Sequence[list[int]]
    longdoc: Sequence[list[int]]
    """Question by question over all documents."""
    chat_store: Sequence[list[int]]
    """First turns."""
    chat: Sequence[list[int]]
    """Turn by turn over all conversations."""
    batch_store: list[int]
    batch: Sequence[list[int]]
    long: Sequence[list[int]]
    fresh: Sequence[list[int]]
    """Prompts that nobody has seen, twice as many: half for each of two engines."""
    equal: Sequence[list[int]]


def workloads(prompts: Prompts, counts: Counts) -> Workloads:
    """All prompts of a run."""
    docs = [prompts.ids(DOC_TOKENS, _DOC_SALT + i) for i in range(counts.docs)]
    asks = [prompts.ids(QUESTION_TOKENS, _QUESTION_SALT + i) for i in range(counts.questions)]
    talks = [prompts.ids(TURN_TOKENS * counts.turns, _CHAT_SALT + i) for i in range(counts.conversations)]
    prefix = prompts.ids(PREFIX_TOKENS, _BATCH_SALT)
    own = [prompts.ids(OWN_TOKENS, _BATCH_SALT + 1 + i) for i in range(counts.batch)]
    return Workloads(
        longdoc_store=docs,
        longdoc=[[*doc, *ask] for ask in asks for doc in docs],
        chat_store=[talk[:TURN_TOKENS] for talk in talks],
        chat=[talk[: TURN_TOKENS * turn] for turn in range(2, counts.turns + 1) for talk in talks],
        batch_store=prefix,
        batch=[[*prefix, *tail] for tail in own],
        long=[prompts.ids(LONG_TOKENS, _LONG_SALT + i) for i in range(counts.long)],
        fresh=[prompts.ids(LONG_TOKENS, _LONG_SALT + 500 + i) for i in range(4 * counts.long)],
        equal=[prompts.ids(130 + 97 * i, _LONG_SALT + 900 + i) for i in range(counts.equal)],
    )
