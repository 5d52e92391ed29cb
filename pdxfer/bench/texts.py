"""Real English for prompts, from what every machine has: CPython's own documentation topics.

Prompts of an exact token length are cut from it by the model's tokenizer, so lengths around block and chunk borders
can be asked for. Different `salt` values start in different places, so that prefix caches cannot help by accident.
"""

from functools import cache
from typing import Protocol


class Tokenizer(Protocol):
    """What we use of a Hugging Face tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...


@cache
def real_text() -> str:
    """About 700 kB of English prose on Python, without the reStructuredText underlines."""
    from pydoc_data.topics import topics

    paragraphs = (" ".join(p.split()) for name in sorted(topics) for p in topics[name].split("\n\n"))
    return "\n\n".join(p for p in paragraphs if len(p) > 80)


class Prompts:
    """Cuts prompts of exact token lengths out of the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._ids = tokenizer.encode(real_text(), add_special_tokens=False)

    def ids(self, num_tokens: int, salt: int = 0) -> list[int]:
        """Token ids of one prompt; `salt` picks where in the text it starts."""
        start = (salt * 7919) % max(1, len(self._ids) - num_tokens)
        return self._ids[start : start + num_tokens]


QUESTION = "Summarise the text above in one sentence."


def excerpt(num_chars: int, salt: int = 0) -> str:
    """A piece of the text cut at a sentence, for prompts sent as text."""
    text = real_text()
    start = text.find(". ", (salt * 104729) % (len(text) - num_chars - 400)) + 2
    end = text.find(". ", start + num_chars) + 1
    return text[start:end]
