"""What became of each request of a chaos run: right, wrong, hung, or failed, and whether a failure is explained.

The reference is one engine alone, asked before the first fault. A stream that lost its decode engine is continued by
another from the text so far (proxy/replay.py); where that differs from the reference, one engine alone is asked the
same: prompt and text up to there. Only then is it right.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from pdxfer.bench.chaos_faults import CUTS, PROXY, Happened, Kind
from pdxfer.bench.chaos_load import Got, Question

TIE = 1e-4
"""Below this gap between the two best log-probabilities, batch composition may swap them (float32)."""
_RACE_S = 0.1
"""A request sent so shortly before SIGTERM may come after it."""


class Verdict(StrEnum):
    """How a request ended."""

    right = "right"
    wrong = "wrong"
    hung = "hung"
    failed = "failed"
    """Explained: its only decode engine was down, its stream lost its engine and it was told so, or the proxy died."""
    left = "left"
    """Its client went away; what it got was right."""
    unexplained = "unexplained"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What one engine alone says to a question."""

    text: str
    ends: tuple[int, ...] = ()
    """Length of the text after each token; empty if the engine tells no log-probabilities."""
    gaps: tuple[float, ...] = ()
    """Log-probability of each token minus the second best."""

    @classmethod
    def of(cls, got: Got) -> "Reference":
        """From a complete answer."""
        tops = got.logprobs.get("top_logprobs") or []
        best = [sorted(top.values(), reverse=True) for top in tops]
        gaps = tuple(two[0] - two[1] if len(two) > 1 else float("inf") for two in best)
        ends = tuple(accumulate(map(len, got.logprobs.get("tokens") or [])))
        return cls(text=got.text, ends=ends, gaps=gaps)

    def agrees(self, text: str, *, is_whole: bool) -> bool:
        """Whether an answer (or the beginning of one) is this text, up to the first tie."""
        if text == self.text or (not is_whole and self.text.startswith(text)):
            return True
        at = common(text, self.text)
        return next((gap < TIE for end, gap in zip(self.ends, self.gaps, strict=True) if end > at), False)


Alone = Callable[[Question, str], Awaitable[str]]
"""What one engine alone says to a question whose answer has begun with this text; empty if nothing may follow."""


class Judge:
    """Knows the right answers and the faults."""

    def __init__(
        self, references: Mapping[str, Reference], happened: Sequence[Happened], num_decode: int, alone: Alone,
        *, is_decode_far: bool = False,
    ) -> None:  # fmt: skip
        """`references` by prompt. `is_decode_far`: a decode engine is beyond the link."""
        self._references, self._num_decode, self._alone = references, num_decode, alone
        self._lost = [
            h for h in happened
            if (h.fault.ends_process and h.fault.target.startswith("d")) or (h.fault.kind in CUTS and is_decode_far)
        ]  # fmt: skip
        self._no_proxy = [h for h in happened if h.fault.ends_process and h.fault.target == PROXY]

    async def verdict(self, got: Got) -> Verdict:
        """How it ended; what it was told before a failure must be right too."""
        if got.is_hung:
            return Verdict.hung
        lost = [h for h in self._lost if h.touches(got.began, got.ended)]
        is_whole = not got.failure
        if not self._references[got.question.prompt].agrees(got.text, is_whole=is_whole):
            if not (got.is_stream and lost and await self._is_continued(got, is_whole)):
                return Verdict.wrong
        if is_whole:
            return Verdict.right
        if got.has_left:
            return Verdict.left
        return Verdict.failed if self._explains(got, lost) else Verdict.unexplained

    def _explains(self, got: Got, lost: Sequence[Happened]) -> bool:
        """Nothing else could have answered; or it had begun to, and the client was told; or there was no proxy."""
        if lost and self._num_decode == 1:
            return True
        if any(_cut_off(got, h) for h in self._no_proxy):
            return True
        return bool(got.pieces) and got.is_told and any(got.began <= h.ended for h in lost)

    async def _is_continued(self, got: Got, is_whole: bool) -> bool:
        """Whether it is the reference up to the end of some piece, and from there what an engine alone goes on with."""
        reference = self._references[got.question.prompt].text
        ends = [0, *accumulate(map(len, got.pieces))]
        agreed = common(got.text, reference)
        for end in sorted((end for end in ends if 0 < end <= agreed), reverse=True):
            begun, rest = got.text[:end], got.text[end:]
            expected = await self._alone(got.question, begun)
            if rest == expected or (not is_whole and expected.startswith(rest)):
                return True
        return False


def _cut_off(got: Got, lost: Happened) -> bool:
    """The proxy's death took its connection, or nobody took it: a proxy told to leave finishes what it has begun."""
    if lost.fault.kind is Kind.restart and got.began < lost.began - _RACE_S:
        return False
    return lost.touches(got.began, got.ended) and (not got.is_told or got.failure.startswith("503"))


def common(one: str, other: str) -> int:
    """Length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
