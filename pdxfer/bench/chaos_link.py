"""Faults of the link between the two sides of a chaos run: nothing passes (both ways, one way), or little does.

A side that must lose what it sends gets a token bucket of one byte: every packet is larger and is dropped in silence,
as by a cut cable; sockets on both sides notice nothing. The kernel's counters say that it was so.
"""

import asyncio
import json
from collections.abc import Sequence

from pdxfer.bench.chaos_faults import Fault, Kind
from pdxfer.bench.ttft_errors import BenchError
from pdxfer.bench.ttft_link import LinkPlan, run_command

SLOW_BITS_PER_S = 20_000_000
_SLOW_BURST = 256 << 10
_CUT = "rate 8kbit burst 1 limit 1"
_SLOW = f"rate {SLOW_BITS_PER_S}bit burst {_SLOW_BURST} latency 20ms"
_SLACK = 1.25
"""The measured time is a little shorter than the fault."""


class FaultyLink:
    """The link of a run; `inject` one fault at a time."""

    def __init__(self, plan: LinkPlan) -> None:
        self._plan = plan

    @property
    def sides(self) -> tuple[str, str]:
        """Near, far: names of a namespace and of its end of the link."""
        return self._plan.prefill_side, self._plan.decode_side

    def sent(self) -> tuple[int, int]:
        """Bytes that the near and the far side have put on the link so far."""
        near, far = (_counter(side) for side in self.sides)
        return near, far

    async def inject(self, fault: Fault) -> None:
        """Hurt it for `fault.pause_s`. Raises BenchError if more passed than may."""
        loop = asyncio.get_running_loop()
        hurt = self._hurt(fault.kind)
        try:
            for side in hurt:
                self._set(side, _SLOW if fault.kind is Kind.slow else _CUT)
            before, began = [_counter(side) for side in hurt], loop.time()
            await asyncio.sleep(fault.pause_s)
            passed = [_counter(side) - was for side, was in zip(hurt, before, strict=True)]
            check_passed(fault, passed, loop.time() - began)
        finally:
            for side in hurt:
                self._set(side, self._plan.qdisc)

    def _hurt(self, kind: Kind) -> Sequence[str]:
        near, far = self.sides
        return {Kind.cut_out: (near,), Kind.cut_back: (far,)}.get(kind, (near, far))

    def _set(self, side: str, bucket: str) -> None:
        run_command(f"tc -n {side} qdisc replace dev {side} root tbf {bucket}".split())


def check_passed(fault: Fault, passed: Sequence[int], elapsed_s: float) -> None:
    """Whether the fault did what it says, from the bytes that each hurt side has sent meanwhile. Raises BenchError."""
    allowed = int((SLOW_BITS_PER_S / 8 * elapsed_s + _SLOW_BURST) * _SLACK) if fault.kind is Kind.slow else 0
    if max(passed) > allowed:
        raise BenchError(
            f"{fault}: {max(passed):,} bytes passed in {elapsed_s:.1f} s, at most {allowed:,} may: it did not work"
        )


def _counter(side: str) -> int:
    shown = run_command(["ip", "-n", side, "-s", "-j", "link", "show", side])
    return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])
