"""What is measured on a running arm, one function each: time to first token, open loop, inter-token gaps, equality.

Prompts are the same for every arm: real text cut to exact token lengths, a different piece for every request.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pdxfer.bench.texts import Prompts
from pdxfer.bench.ttft_arms import SERVED_NAME
from pdxfer.bench.ttft_errors import BenchError
from pdxfer.bench.ttft_load import Answer, Client, completion, open_loop, poisson_arrivals
from pdxfer.bench.ttft_options import MAX_MODEL_LEN, NUM_COMPARED_TOKENS, NUM_NEW_TOKENS, Options
from pdxfer.bench.ttft_routes import Route, require_pair

_STREAM_PROMPT_TOKENS = 512
_SETTLE_TOKENS = 8
"""The first gaps of a stream are not counted."""
_IDLE_TOKENS = 48
"""Gaps taken before each long prompt as the idle value."""
_STREAM_S = 300.0
_WARM_UP_SALT = 9_000
_LONG_SALT = 5_000


def prompts_of(prompts: Prompts, options: Options) -> dict[int, list[list[int]]]:
    """Length → one prompt a repetition."""
    return {
        length: [prompts.ids(length, salt=100 * place + rep) for rep in range(options.reps)]
        for place, length in enumerate(options.lens)
    }


async def warm_up(route: Route, prompts: Prompts, options: Options) -> None:
    """One request of each length, not counted: handshakes, first touch of memory."""
    for length in sorted(options.lens):
        await route.stream(prompts.ids(length, salt=_WARM_UP_SALT), NUM_NEW_TOKENS)


async def ttft(route: Route, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """One request after the other."""
    return [require_pair(await route.stream(prompt, NUM_NEW_TOKENS)) for prompt in prompts]


async def at_rate(route: Route, prompts: Prompts, options: Options) -> list[Answer]:
    """Requests at their own times, the lengths by turns."""

    async def send(index: int) -> Answer:
        length = options.lens[index % len(options.lens)]
        return await route.stream(prompts.ids(length, salt=index), NUM_NEW_TOKENS)

    return await open_loop(poisson_arrivals(options.rate, options.count), send)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Seconds between the pieces of a running stream, alone and while long prompts were read."""

    idle_s: tuple[float, ...]
    busy_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median under prefill over idle median."""
        return statistics.median(self.busy_s) / statistics.median(self.idle_s)

    @property
    def longest_stall_s(self) -> float:
        return max(self.busy_s)


async def gaps_under_prefill(route: Route, prompts: Prompts, options: Options) -> Gaps:
    """Let one stream run and send the longest prompts beside it, one at a time with idle time between."""
    times: list[float] = []
    arrived = asyncio.Event()

    def on_token(now: float) -> None:
        times.append(now)
        arrived.set()

    num_tokens = MAX_MODEL_LEN - _STREAM_PROMPT_TOKENS - 1
    prompt = prompts.ids(_STREAM_PROMPT_TOKENS, salt=_LONG_SALT)
    stream = asyncio.create_task(route.stream(prompt, num_tokens, on_token))
    busy: list[tuple[float, float]] = []

    async def until(count: int) -> None:
        """Wait until the stream has brought that many pieces."""
        while len(times) < count:
            arrived.clear()
            waiter = asyncio.create_task(arrived.wait())
            await asyncio.wait([waiter, stream], return_when=asyncio.FIRST_COMPLETED)
            waiter.cancel()
            if stream.done() and len(times) < count:
                await stream
                raise BenchError(
                    f"the running stream ended after {len(times)} tokens, before the long prompts were read"
                )

    try:
        async with asyncio.timeout(_STREAM_S):
            await until(_SETTLE_TOKENS)
            for rep in range(options.num_gaps_reps):
                await until(len(times) + _IDLE_TOKENS)
                start, end = time.perf_counter(), list[float]()
                await route.stream(prompts.ids(max(options.lens), salt=_LONG_SALT + 1 + rep), 1, end.append)
                busy.append((start, end[0]))
            await until(len(times) + 1)
    except TimeoutError:
        raise BenchError(f"the running stream brought {len(times)} tokens in {_STREAM_S:g} s") from None
    finally:
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
    return split_gaps(times[_SETTLE_TOKENS:], busy)


def split_gaps(times: Sequence[float], busy: Sequence[tuple[float, float]]) -> Gaps:
    """Gaps between consecutive times; those that touch a busy span belong to it."""
    idle_s: list[float] = []
    busy_s: list[float] = []
    for before, after in zip(times, times[1:], strict=False):
        touches = any(before < end and after > start for start, end in busy)
        (busy_s if touches else idle_s).append(after - before)
    if not idle_s or not busy_s:
        raise BenchError(f"a stream of {len(times)} tokens has {len(idle_s)} idle and {len(busy_s)} busy gaps")
    return Gaps(idle_s=tuple(idle_s), busy_s=tuple(busy_s))


async def count_equal(
    client: Client, pair: Route, alone_url: str, prompts: Sequence[Sequence[int]]
) -> tuple[int, list[int]]:
    """How many prompts the pair continues as one engine alone does, greedy; and the lengths of those it does not."""
    different = []
    for prompt in prompts:
        answer = require_pair(await pair.stream(prompt, NUM_COMPARED_TOKENS))
        body = completion(SERVED_NAME, prompt, NUM_COMPARED_TOKENS)
        alone, _ = await client.post(f"{alone_url}/v1/completions", body, f"alone-{answer.request_id}")
        if alone["choices"][0]["text"] != answer.text:
            different.append(len(prompt))
    return len(prompts) - len(different), different
