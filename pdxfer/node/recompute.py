"""Whether decode would compute a prompt sooner than the rest of it can arrive: measured rates in, an answer out. Pure.

Decode measures its steps (StepRate) and tells the rate with its credits; prefill's lane asks before each unit and ends
the transfer if so (lane.py). Decode then computes what is missing, as after any other failure.
"""

from dataclasses import dataclass

CHEAPER = "computing the rest is faster than sending it"
"""Begins the reason of such an end; decode asks no other prefill then (connector/recovery.py)."""
FACTOR = 2.0
"""Sending must take so many times as long: decode has other requests too, and attention makes long prompts dearer."""
MIN_STEP_TOKENS = 128
"""A step of fewer tokens says nothing about prompts."""
TRIAL_BYTES = 4 << 20
"""So much of each transfer is sent in any case, or a link that has become fast would never be noticed."""
SMOOTHING = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What is left of a transfer before one of its units is sent."""

    num_bytes: int
    """To be sent, the unit included."""
    sent_bytes: int
    num_tokens: int
    """Of the whole grant: while layers are missing everywhere, nothing of it is of use."""
    deadline: float = float("inf")
    """By this host's monotonic clock."""


class StepRate:
    """Tokens a second that this engine computes in steps with a prompt in them."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        """0: not known, as on GPUs, whose steps the CPU does not see."""

    def note(self, num_tokens: int, elapsed_s: float) -> None:
        """One step."""
        if num_tokens >= MIN_STEP_TOKENS and elapsed_s > 0:
            rate = num_tokens / elapsed_s
            self.tokens_per_s += (SMOOTHING if self.tokens_per_s else 1.0) * (rate - self.tokens_per_s)


class Recompute:
    """Decides for one peer."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        """The peer's, as it has told; 0: not known, so everything is sent."""
        self._not_before = 0.0

    def is_cheaper(self, rest: Rest, send_s: float, now: float) -> bool:
        """Whether to give a transfer up that takes `send_s` more. Then no other one is until decode has computed it."""
        if not self.tokens_per_s or rest.sent_bytes < TRIAL_BYTES or now < self._not_before:
            return False
        compute_s = rest.num_tokens / self.tokens_per_s
        if send_s <= FACTOR * compute_s:
            return False
        self._not_before = now + compute_s
        return True
