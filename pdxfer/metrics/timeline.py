"""Where the time to first token went: the stages of one request, and their one-line header form.

    arrival ──queue──▶ started ──prefill──▶ prefilled ──exposed_transfer──▶ landed ──decode_wait──▶ scheduled
            ──first_decode──▶ first byte at the proxy

Points are wall-clock seconds from several machines, so each is clamped between its predecessor and the first byte:
stages are never negative and, when all are known, add up to ttft exactly. KV that landed before prefill ended has an
exposed transfer of 0. Pure arithmetic, used by the proxy, the bench and the CLI.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdxfer.metrics.catalog import STAGES

HEADER = "x-pdxfer-timeline"

_POINTS = (("queue", "started"), ("prefill", "prefilled"), ("exposed_transfer", "landed"), ("decode_wait", "scheduled"))
"""Stage and the point that ends it, in order; first_decode ends at the first byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What is known of one request's way to its first token."""

    mode: str
    """pair, or local: a decode engine alone."""
    arrival: float
    """Wall seconds when the proxy had read the request."""
    first_byte: float | None = None
    """Wall seconds of the first body byte from decode; None when it has not come."""
    reason: str = ""
    """Why it is local."""
    stamps: Mapping[str, float] = field(default_factory=dict)
    """Stage point → wall seconds, as the engines stamped it (see wire.messages.Stage)."""

    def stages_ms(self) -> dict[str, float]:
        """Milliseconds by stage; a stage is given only if both of its ends are known, ttft once the first byte is."""
        if self.first_byte is None:
            return {}
        end = max(self.first_byte, self.arrival)
        stages: dict[str, float] = {}
        reached, is_known = self.arrival, True
        for stage, point in _POINTS:
            was_known, is_known = is_known, point in self.stamps
            if is_known:
                at = min(max(self.stamps[point], reached), end)
                if was_known:
                    stages[stage] = (at - reached) * 1000
                reached = at
        if is_known:
            stages["first_decode"] = (end - reached) * 1000
        stages["ttft"] = (end - self.arrival) * 1000
        return stages

    def header(self) -> str:
        """``mode=pair; queue=1.2; ...; ttft=48.0``: milliseconds, safe as an HTTP header value."""
        fields = [f"mode={self.mode}"]
        if self.reason:
            fields.append(f"reason={_slug(self.reason)}")
        fields += [f"{stage}={ms:.3f}" for stage, ms in self.stages_ms().items()]
        return "; ".join(fields)


def parse_header(value: str) -> tuple[dict[str, str], dict[str, float]]:
    """The texts (mode, reason) and the stages in ms of a header. Raises ValueError for anything else."""
    texts: dict[str, str] = {}
    stages: dict[str, float] = {}
    for part in value.split(";"):
        key, equals, text = part.strip().partition("=")
        if not equals:
            raise ValueError(f"timeline header field {part!r} is not key=value, in {value!r}")
        if key in STAGES:
            stages[key] = float(text)
        else:
            texts[key] = text
    return texts, stages


def _slug(text: str) -> str:
    """`text` as one word of harmless characters."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in text[:80])
