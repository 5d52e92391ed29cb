"""The fixed workloads of the reuse bench: long documents, conversations, a batch with a shared prefix, one long prompt.

Token ids of real text, the same for every arm. A conversation's answers are replaced by the text that follows, so that
all arms ask exactly the same; what is stored is prompts, as with real answers.

Conversations grow to 3,000 tokens in six turns. In `chat` a follow-up adds 160 tokens, 6 % of the prompt: the median of
the 3,951 follow-ups in Mooncake's public conversation trace is 6.4 % (github.com/kvcache-ai/Mooncake, FAST25 release,
conversation_trace.jsonl; a follow-up shares at least 1,024 tokens with an earlier request). `even` adds 500 each turn,
which leaves any cache a third of the work or more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pdxfer.bench.texts import Prompts

DOC_TOKENS, QUESTION_TOKENS = 3000, 24
OPENING_TOKENS, TURN_TOKENS, EVEN_TURN_TOKENS = 2200, 160, 500
PREFIX_TOKENS, OWN_TOKENS = 2000, 50
LONG_TOKENS = 3500
FRESH_TOKENS, BURST_TOKENS, BURST = 1000, 500, 4
NUM_NEW_TOKENS = 16
_DOC_SALT, _CHAT_SALT, _BATCH_SALT, _LONG_SALT, _QUESTION_SALT, _EVEN_SALT, _FRESH_SALT, _BURST_SALT = (
    11_000, 12_000, 13_000, 14_000, 15_000, 16_000, 17_000, 18_000,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How much of each."""

    docs: int = 4
    questions: int = 5
    """Of each document."""
    conversations: int = 8
    even: int = 2
    """Conversations with turns of EVEN_TURN_TOKENS."""
    turns: int = 6
    batch: int = 64
    long: int = 5
    """Prompts of LONG_TOKENS whose time to first token is measured."""
    fresh: int = 20
    """Pairs of new prompts, and of bursts of new prompts, for two engines."""
    equal: int = 12
    """Prompts of the float32 pass."""


QUICK = Counts(docs=2, questions=2, conversations=2, even=1, turns=3, batch=8, long=2, fresh=2, equal=3)


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
    even_store: Sequence[list[int]]
    even: Sequence[list[int]]
    batch_store: list[int]
    batch: Sequence[list[int]]
    long: Sequence[list[int]]
    fresh: Sequence[list[int]]
    """Prompts that nobody has seen, half for each of two engines."""
    bursts: Sequence[list[list[int]]]
    """Likewise, several to be asked at once."""
    equal: Sequence[list[int]]


def workloads(prompts: Prompts, counts: Counts) -> Workloads:
    """All prompts of a run."""
    docs = [prompts.ids(DOC_TOKENS, _DOC_SALT + i) for i in range(counts.docs)]
    asks = [prompts.ids(QUESTION_TOKENS, _QUESTION_SALT + i) for i in range(counts.questions)]
    chat = [OPENING_TOKENS + TURN_TOKENS * turn for turn in range(counts.turns)]
    even = [EVEN_TURN_TOKENS * (1 + turn) for turn in range(counts.turns)]
    talks = [prompts.ids(chat[-1], _CHAT_SALT + i) for i in range(counts.conversations)]
    even_talks = [prompts.ids(even[-1], _EVEN_SALT + i) for i in range(counts.even)]
    prefix = prompts.ids(PREFIX_TOKENS, _BATCH_SALT)
    own = [prompts.ids(OWN_TOKENS, _BATCH_SALT + 1 + i) for i in range(counts.batch)]
    return Workloads(
        longdoc_store=docs,
        longdoc=[[*doc, *ask] for ask in asks for doc in docs],
        chat_store=[talk[: chat[0]] for talk in talks],
        chat=[talk[:length] for length in chat[1:] for talk in talks],
        even_store=[talk[: even[0]] for talk in even_talks],
        even=[talk[:length] for length in even[1:] for talk in even_talks],
        batch_store=prefix,
        batch=[[*prefix, *tail] for tail in own],
        long=[prompts.ids(LONG_TOKENS, _LONG_SALT + i) for i in range(counts.long)],
        fresh=[prompts.ids(FRESH_TOKENS, _FRESH_SALT + i) for i in range(2 * counts.fresh)],
        bursts=[
            [prompts.ids(BURST_TOKENS, _BURST_SALT + BURST * i + j) for j in range(BURST)]
            for i in range(2 * counts.fresh)
        ],
        equal=[prompts.ids(130 + 97 * i, _LONG_SALT + 900 + i) for i in range(counts.equal)],
    )
