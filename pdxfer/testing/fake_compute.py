"""Where a FakeEngine's KV comes from: the contract, and the simplest way: to wait as long as computing takes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from pdxfer.testing.fake_api import Job


class Kv(Protocol):
    """Where the prompt's KV comes from: Wait pretends to compute it, a member of the protocol may receive it."""

    def filled(self, job: Job) -> AbstractAsyncContextManager[None]:
        """The block runs once all KV of the job's prompts is here. Raises KvError if what is here is wrong."""
        ...


class KvError(Exception):
    """The KV that arrived is not the prompt's."""


class Wait:
    """KV that is only time: takes as long as the prefill rate says."""

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s

    @asynccontextmanager
    async def filled(self, job: Job) -> AsyncIterator[None]:
        await asyncio.sleep(sum(map(len, job.prompts)) / self._tokens_per_s)
        yield
